"""TOVA: token omission via attention."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from foveate import ops
from foveate.methods._common import attend_all, evict_weakest, eviction_setting, keep_heavy
from foveate.methods.base import Method, Observation, Replay, setting
from foveate.methods.budgets import Number, budget
from foveate.state import Channel, Evicts, Geometry, SlotCache


@dataclass(frozen=True)
class TOVA(Method):
    """The tokens to which the latest query attends most, chosen for all heads of a layer together.

    The prefill is dense; the last prompt token's attention decides what is kept of the prompt, and from then on the
    token with the least attention leaves at every step.
    """

    name: ClassVar[str] = "tova"
    source: ClassVar[str] = "TOVA, Oren et al. 2024, arXiv:2401.06104"
    evicts: ClassVar[Evicts] = Evicts.IN_DECODE
    replay: ClassVar[Replay] = Replay()
    needs_prompt_end: ClassVar[bool] = True
    full_budget: ClassVar[dict] = {"top_k": 1.0}
    small_budget: ClassVar[dict] = {"top_k": 0.2, "min_k": 8}

    top_k: int | float = setting(0.25, "tokens kept: a number, or a share of the tokens so far")
    min_k: int = setting(128, "least number of tokens when top_k is a share")
    pool: str = setting("layer", "heads that choose together: layer (the paper) or kv_head")
    evict_every: int = eviction_setting()  # type: ignore[misc]

    def __post_init__(self):
        self._check_budget("top_k")
        self._check_count("min_k", 1)
        self._check_choice("pool", "layer", "kv_head")
        self._check_count("evict_every")

    def channels(self, geometry: Geometry) -> dict[str, Channel]:
        return {"mass": Channel(least=0.0)}

    @property
    def observation(self) -> Observation:
        return Observation((TOVA, self.pool))

    def observe(self, cache: SlotCache, q: Tensor, attended: ops.Attended, scaling: float) -> None:
        mass = ops.query_mass(q[:, :, -1:], cache.keys, logits=cache.logits(scaling), offset=cache.used - 1)
        cache.channel("mass").copy_(self._pooled(mass.unflatten(1, (cache.geometry.num_kv_heads, -1)).sum(2)))

    def prompt_end(self, cache: SlotCache, scaling: float) -> Tensor | None:
        return keep_heavy(cache, cache.channel("mass"), self.allowed(cache.lengths[0]), 0)

    def decode(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        attended = attend_all(cache, q, scaling, need_mass=True)
        mass = self._pooled(attended.mass)
        evict_weakest(cache, mass, self._over, 0)
        return attended.out

    def _over(self, live: Number, length: Number) -> bool | Tensor:
        return live > self.allowed(length)

    def allowed(self, length: int | Number) -> int | Number:
        """Tokens kept of a row of this length."""
        return budget(self.top_k, length, self.min_k)

    def _pooled(self, mass: Tensor) -> Tensor:
        return mass.sum(1, keepdim=True).expand(mass.shape) if self.pool == "layer" else mass
