"""TOVA: token omission via attention."""

from typing import ClassVar

from torch import Tensor

from foveate import ops
from foveate.methods._settings import redefined
from foveate.methods.base import About, Observation, register, setting
from foveate.methods.bases import KeepsByScore
from foveate.state import Channel, Evicts, Geometry, SlotCache


@register
class TOVA(KeepsByScore):
    """The tokens to which the latest query attends most, chosen for all heads of a layer together.

    The prefill is dense; the last prompt token's attention decides what is kept of the prompt, and from then on the
    token with the least attention leaves at every step.
    """

    name = "tova"
    about: ClassVar[About] = About("TOVA, Oren et al. 2024, arXiv:2401.06104", small_budget={"top_k": 0.2, "min_k": 8})
    evicts = Evicts.IN_DECODE
    sinks, window = 0, 0

    top_k: int | float = setting(0.25, "tokens kept: a number, or a share of the tokens so far")
    min_k: int = redefined(KeepsByScore, "min_k", 128)
    pool: str = setting("layer", "heads that choose together: layer (the paper) or kv_head")

    def __post_init__(self):
        super().__post_init__()
        self._check_count("min_k", 1)
        self._check_choice("pool", "layer", "kv_head")

    def channels(self, geometry: Geometry) -> dict[str, Channel]:
        return {"mass": Channel(least=0.0)}

    @property
    def observation(self) -> Observation:
        return Observation((TOVA, self.pool))

    def observe(self, cache: SlotCache, q: Tensor, attended: ops.Attended, scaling: float) -> None:
        keys = ops.KV(cache.keys)
        mass = ops.query_mass(q[:, :, -1:], keys, logits=cache.logits(scaling), offset=cache.used - 1)
        self.note(cache, mass.unflatten(1, (cache.geometry.num_kv_heads, -1)).sum(2))

    def note(self, cache: SlotCache, mass: Tensor) -> None:
        cache.channel("mass").copy_(mass.sum(1, keepdim=True) if self.pool == "layer" else mass)

    def scores(self, cache: SlotCache, scaling: float) -> Tensor:
        return cache.channel("mass")
