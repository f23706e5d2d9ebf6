"""SparQ: keys by their attention in the dimensions in which the query is largest."""

from typing import ClassVar

import torch
from torch import Tensor

from foveate import ops
from foveate.methods._common import estimated_attention, recent
from foveate.methods.base import NEVER_FASTER, About, Method, Observation, Replay, register, setting
from foveate.methods.budgets import Number, budget, clamp
from foveate.state import Channel, Geometry, SlotCache


@register
class SparQ(Method):
    """A KV head reads the keys with most attention in its queries' largest dimensions, and a recent window; the mean of
    all values stands for the keys that are not read."""

    name: ClassVar[str] = "sparq"
    about: ClassVar[About] = About(
        "SparQ Attention, Ribar et al. 2024, arXiv:2312.04985",
        full_budget={"top_k": 1.0},
        small_budget={"top_k": 9, "rank": 4, "window": 3},
    )
    sparse_from_tokens: ClassVar[int] = NEVER_FASTER  # no kernel reads some dimensions of all keys
    needs_prompt_end: ClassVar[bool] = True
    observation: ClassVar[Observation] = Observation("value_sum")
    replay: ClassVar[Replay] = Replay()

    top_k: int | float = setting(0.1, "keys read, the window included: a number, or a share of the tokens so far")
    min_k: int = setting(128, "least number of keys when top_k is a share")
    rank: int = setting(32, "dimensions of each key that are scored, at most all")
    window: int = setting(32, "recent tokens that are read whatever their scores")

    def __post_init__(self):
        self._check_budget("top_k")
        for name, least in (("min_k", 0), ("rank", 1), ("window", 1)):
            self._check_count(name, least)

    def channels(self, geometry: Geometry) -> dict[str, Channel]:
        return {"value_sum": Channel((geometry.num_kv_heads, geometry.value_dim), per=0)}

    def observe(self, cache: SlotCache, q: Tensor, attended: ops.Attended, scaling: float) -> None:
        cache.channel("value_sum").add_(cache.values[:, :, -q.shape[2] :].sum(2, dtype=torch.float32))

    def choose(self, cache: SlotCache, q: Tensor, scaling: float) -> ops.Choice:
        mean = cache.channel("value_sum") / cache.plan["lengths"][:, None, None]
        mass = self._approximate(cache, q, scaling)
        empty = cache.positions < 0
        scores = mass.mean(2).masked_fill(recent(cache, self.window), torch.inf).masked_fill(empty, -torch.inf)
        indices = ops.topk_rows(scores, cache.plan.per_row(self.count), self.count(cache.used))
        read = torch.zeros_like(scores).scatter_add_(2, indices.clamp_min(0), (indices >= 0).float())
        left = (mass * (1 - read)[:, :, None]).sum(3).flatten(1)  # 1 - alpha of each query head
        rest = ops.Rest(mean.repeat_interleave(cache.geometry.group, 1)[:, :, None], left[..., None])
        return ops.Choice(keys=indices, read=cache.plan.per_row(self.count)[:, None], rest=rest)

    def _approximate(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        """Attention of each query head, estimated in its group's largest dimensions, fp32 ``[B, Hkv, G, used]``; 0 in
        empty slots."""
        rows = ops.fold_group(q, cache.geometry.num_kv_heads).float()
        dims = rows.abs().sum(2, keepdim=True).topk(min(self.rank, rows.shape[3])).indices
        part, keys = (x.gather(3, dims.expand(-1, -1, x.shape[2], -1)).float() for x in (rows, cache.keys))
        kept, whole = (x.abs().sum(3, keepdim=True).clamp_min(1e-20) for x in (part, rows))
        part = part * (whole / kept).sqrt()  # the paper's temperature
        return estimated_attention(cache, part, keys, scaling)

    def scored(self, tokens: Number, geometry: Geometry, dtype: torch.dtype) -> float | Tensor:
        return tokens * (min(self.rank, geometry.head_dim) / (geometry.head_dim + geometry.value_dim))

    def count(self, length: Number) -> Number:
        """The number of keys that a row of ``length`` tokens reads."""
        return clamp(budget(self.top_k, length, self.min_k), self.window, length)

    def note_newest(self, cache: SlotCache, q: Tensor) -> None:
        """Add the newest value of each row to the sum of its values, fp32 ``[B, Hkv, Dv]``."""
        newest = (cache.plan["lengths"] - 1)[:, None, None].expand(-1, cache.geometry.num_kv_heads, 1)
        cache.channel("value_sum").add_(ops.gather_slots(cache.values, newest)[:, :, 0])
