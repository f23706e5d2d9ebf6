"""H2O, the heavy-hitter oracle; the LuKA paper's lined attention, with a correct causal prefill."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from foveate import ops
from foveate.methods._common import attend_all, evict_weakest, eviction_setting, keep_heavy
from foveate.methods.base import Method, Observation, Replay, setting
from foveate.methods.budgets import Number, budget
from foveate.state import Channel, Evicts, Geometry, SlotCache


@dataclass(frozen=True)
class H2O(Method):
    """The tokens that received the most attention so far, and the most recent ones.

    Mass is accumulated over prefill and decode without decay, per KV head (summed over its group). The prefill is dense
    and causal; what exceeds the budget is evicted when the prompt ends and, from then on, at every step.
    """

    name: ClassVar[str] = "h2o"
    source: ClassVar[str] = "H2O, Zhang et al. 2023, arXiv:2306.14048; LuKA, section 3.1"
    evicts: ClassVar[Evicts] = Evicts.IN_DECODE
    replay: ClassVar[Replay] = Replay()
    needs_prompt_end: ClassVar[bool] = True
    full_budget: ClassVar[dict] = {"top_k": 1.0}
    small_budget: ClassVar[dict] = {"top_k": 0.15, "min_k": 4, "window": 8}

    top_k: int | float = setting(0.125, "heavy hitters: a number, or a share of the tokens so far")
    min_k: int = setting(0, "least number of heavy hitters when top_k is a share")
    window: int = setting(128, "recent tokens that are always kept")
    evict_every: int = eviction_setting()  # type: ignore[misc]

    def __post_init__(self):
        self._check_budget("top_k")
        self._check_count("min_k")
        self._check_count("window", 1)
        self._check_count("evict_every")

    def channels(self, geometry: Geometry) -> dict[str, Channel]:
        return {"mass": Channel(least=0.0)}

    @property
    def observation(self) -> Observation:
        return Observation(ops.column_mass, needs_lse=True)

    def observe(self, cache: SlotCache, q: Tensor, attended: ops.Attended, scaling: float) -> None:
        how = {"logits": cache.logits(scaling), "offset": cache.used - q.shape[2]}
        ops.column_mass(q, cache.keys, attended.lse, out=cache.channel("mass"), **how)

    def prompt_end(self, cache: SlotCache, scaling: float) -> Tensor | None:
        return keep_heavy(cache, cache.channel("mass"), self.allowed(cache.lengths[0]), self.window)

    def decode(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        attended = attend_all(cache, q, scaling, need_mass=True)
        mass = cache.channel("mass")
        mass += attended.mass
        evict_weakest(cache, mass, self._over, self.window)
        return attended.out

    def _over(self, live: Number, length: Number) -> bool | Tensor:
        return live > self.allowed(length)

    def allowed(self, length: int | Number) -> int | Number:
        """Tokens kept of a row of this length."""
        return budget(self.top_k, length, self.min_k) + self.window
