"""H2O, the heavy-hitter oracle; the LuKA paper's lined attention, with a correct causal prefill."""

from typing import ClassVar

from torch import Tensor

from foveate import ops
from foveate.methods._settings import redefined
from foveate.methods.base import About, Observation, register, setting
from foveate.methods.bases import KeepsByScore
from foveate.state import Channel, Evicts, Geometry, SlotCache


@register
class H2O(KeepsByScore):
    """The tokens that received the most attention so far, and the most recent ones.

    Mass is accumulated over prefill and decode without decay, per KV head (summed over its group). The prefill is dense
    and causal; what exceeds the budget is evicted when the prompt ends and, from then on, at every step.
    """

    name = "h2o"
    about: ClassVar[About] = About(
        "H2O, Zhang et al. 2023, arXiv:2306.14048; LuKA, section 3.1",
        small_budget={"top_k": 0.15, "min_k": 4, "window": 8},
    )
    evicts = Evicts.IN_DECODE
    observation: ClassVar[Observation] = Observation("column_mass", needs_lse=True)
    sinks = 0

    top_k: int | float = setting(0.125, "heavy hitters: a number, or a share of the tokens so far")
    min_k: int = setting(0, "least number of heavy hitters when top_k is a share")
    window: int = redefined(KeepsByScore, "window", 128)

    def channels(self, geometry: Geometry) -> dict[str, Channel]:
        return {"mass": Channel(least=0.0)}

    def observe(self, cache: SlotCache, q: Tensor, attended: ops.Attended, scaling: float) -> None:
        how = {"logits": cache.logits(scaling), "offset": cache.used - q.shape[2]}
        ops.column_mass(q, ops.KV(cache.keys), attended.lse, out=cache.channel("mass"), **how)

    def note(self, cache: SlotCache, mass: Tensor) -> None:
        cache.channel("mass").add_(mass)

    def scores(self, cache: SlotCache, scaling: float) -> Tensor:
        return cache.channel("mass")
