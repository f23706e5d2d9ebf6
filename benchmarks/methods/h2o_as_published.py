"""Lined attention as the LuKA paper's code ran it, fault included, as a user's file with a method of its own.

    foveate compare --import benchmarks/methods/h2o_as_published.py --method h2o_as_published ...

The correct method is `h2o`.
"""

from typing import ClassVar

import torch
from torch import Tensor

from foveate import ops
from foveate.methods import About, Channel, Method, Observation, Replay, register, setting
from foveate.methods._common import recent
from foveate.methods.budgets import Number, budget
from foveate.state import Geometry, SlotCache


@register
class H2OAsPublished(Method):
    """H2O with the published prefill, to show what its fault costs; not for use.

    During the prompt no heavy hitters exist yet, so every query is shown the last ``window`` tokens only. A query
    before them has all its keys masked, and its softmax becomes uniform over those tokens, all in its future. The
    mass accumulated in this way picks the heavy hitters of the decode steps. The prompt must come in one piece.

    The published code keeps one grid of heavy hitters for all heads of a layer: ``pool=layer``. The default, with
    which the recorded results were measured, keeps one for each KV head, as H2O does.
    """

    name: ClassVar[str] = "h2o_as_published"
    about: ClassVar[About] = About(
        "LuKA, Fei et al. 2025, section 3.1, as its published code computes it",
        full_budget={"top_k": 1.0, "window": 1 << 20},
        small_budget={"top_k": 0.15, "window": 8},
    )
    needs_prompt_end: ClassVar[bool] = True
    replay: ClassVar[Replay] = Replay()

    top_k: int | float = setting(0.125, "heavy hitters: a number, or a share of the tokens so far")
    window: int = setting(128, "recent tokens that are always read")
    pool: str = setting(
        "kv_head", "whose mass picks heavy hitters: each kv_head's own, or the whole layer's, as published"
    )

    def __post_init__(self):
        self._check_budget("top_k")
        self._check_count("window", 1)
        self._check_choice("pool", "kv_head", "layer")

    def channels(self, geometry: Geometry) -> dict[str, Channel]:
        return {"mass": Channel(least=0.0)}

    @property
    def observation(self) -> Observation:
        return Observation(self, needs_lse=True)

    def prompt_tile(self, group: int) -> None:
        return None

    def prompt(self, cache: SlotCache, q: Tensor, scaling: float) -> ops.Attended:
        if q.shape[2] != cache.used:
            raise ValueError(f"{self.name}: the prompt must come in one piece, and only once")
        blind = max(0, cache.used - self.window)
        keys, values = cache.keys[:, :, blind:], cache.values[:, :, blind:]
        seeing = ops.attend_causal(q[:, :, blind:], ops.KV(keys, values), logits=cache.logits(scaling), need_lse=True)
        average = values.mean(2, keepdim=True, dtype=torch.float32).to(values.dtype)
        average = average.repeat_interleave(cache.geometry.group, 1).expand(-1, -1, blind, -1)
        return ops.Attended(torch.cat([average, seeing.out], 2), seeing.lse)

    def observe(self, cache: SlotCache, q: Tensor, attended: ops.Attended, scaling: float) -> None:
        blind = max(0, cache.used - self.window)
        mass = cache.channel("mass")[:, :, blind:]
        keys, logits = ops.KV(cache.keys[:, :, blind:]), cache.logits(scaling)
        ops.column_mass(q[:, :, blind:], keys, attended.lse, logits=logits, out=mass)
        mass += blind * cache.geometry.group / mass.shape[2]

    def choose(self, cache: SlotCache, q: Tensor, scaling: float) -> ops.Choice:
        indices = self._selected(cache)
        return ops.Choice(keys=indices, read=(indices >= 0).sum(-1), need_mass=True)

    def learn(self, cache: SlotCache, choice: ops.Choice, attended: ops.Attended) -> None:
        mass = attended.mass.masked_fill(choice.keys < 0, 0.0)
        cache.channel("mass").scatter_add_(2, choice.keys.clamp_min(0), mass.float())

    def _selected(self, cache: SlotCache) -> Tensor:
        """Slots of the heavy hitters and of the recent tokens, int64 ``[B, Hkv, K]``, -1 for none."""
        mass = cache.channel("mass")
        mass = mass.sum(1, keepdim=True) if self.pool == "layer" else mass
        others = mass.masked_fill((mass <= 0) | recent(cache, self.window), float("-inf"))
        heavy = ops.topk_rows(others, cache.plan.per_row(self._heavy), self._heavy(cache.used))
        heavy = heavy.expand(-1, cache.geometry.num_kv_heads, -1)
        width = min(self.window, cache.used)
        last = cache.plan["lengths"][:, None] - width + torch.arange(width, device=cache.device)
        last = last.clamp_min(-1)[:, None].expand(-1, cache.geometry.num_kv_heads, -1)
        return torch.cat([heavy, last], -1)

    def _heavy(self, length: Number) -> int | Number:
        return budget(self.top_k, length)
