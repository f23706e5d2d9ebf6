"""LessIsMore: one set of keys for all heads, gathered from the best of each, and the recent ones."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from foveate import ops
from foveate.methods._anchored import SharedSelection, anchor_role, dense_role, layer_numbers, nearest, reader_role
from foveate.methods._common import occupied
from foveate.methods.base import About, Replay, Role, register, setting
from foveate.methods.budgets import Number, budget
from foveate.state import SlotCache


@register
class LessIsMore(SharedSelection):
    """Selection layers are dense; all heads of later layers read the union of the keys to which the heads of
    a selection layer attend.

    The union takes every query head's best key, then every head's second best, and so on, until the budget is full;
    sinks and recent tokens have a share of their own. If that share has no room beyond the sinks, it is all recent
    tokens. Layers before the first selection layer are dense, and so is the prefill.
    """

    name: ClassVar[str] = "lessismore"
    about: ClassVar[About] = About(
        "LessIsMore, Yang et al. 2025, arXiv:2508.07101",
        full_budget={"top_k": 1.0},
        small_budget={"top_k": 15, "selections": [0.0], "sinks": 2},
    )
    packed: ClassVar[bool] = False
    pools_layer: ClassVar[bool] = True
    replay: ClassVar[Replay] = Replay(copies_keys=True)

    top_k: int | float = setting(0.1, "keys read: a number, or a share of the tokens so far")
    min_k: int = setting(128, "least number of keys when top_k is a share")
    recent: float = setting(0.25, "share of the keys that are the first and the most recent tokens")
    sinks: int = setting(4, "first tokens, of the recent ones' share; none where it has no room for a recent one, too")
    selections: Any = setting(
        (2 / 32, 13 / 32), "selection layers, or their depths as shares (Llama 8B: 2 and 13 of 32)"
    )

    def __post_init__(self):
        self._check_budget("top_k")
        self._check_count("min_k")
        self._check_count("sinks")
        self._check("recent", isinstance(self.recent, float) and 0 <= self.recent < 1, "a float in [0, 1)")
        self._check_layers("selections")

    def role_of(self, layer: int, among: Sequence[int]) -> Role:
        selections = layer_numbers(self, "selections", among)
        chooser = nearest(selections, layer)
        if chooser is None:
            return dense_role(layer)
        return anchor_role(layer, dense=True) if layer == chooser else reader_role(layer, chooser)

    def select(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        scores = cache.of_all_heads(_scores(cache, q, scaling))  # [B, Hq, N]
        device, heads = cache.device, scores.shape[1]
        slots = torch.arange(scores.shape[-1], device=device)
        length, begin, last, most = (
            cache.plan.per_row(rule)[:, None]
            for rule in (operator.pos, self.first_tokens, self.last_tokens, self.best_keys)
        )
        end = length - last
        between = (slots >= begin) & (slots < end)
        scores = scores.masked_fill(~between[:, None], float("-inf"))
        best = ops.topk_rows(scores, most[:, 0], self.best_keys(cache.used))  # no rank after these is looked at
        values = scores.gather(2, best.clamp_min(0)).masked_fill(best < 0, float("-inf"))
        places = best.gather(2, values.sort(dim=-1, descending=True, stable=True).indices)
        turn = torch.arange(heads, device=device)[:, None] + heads * torch.arange(places.shape[2], device=device)
        none = scores.shape[2] * heads
        turn = turn.expand_as(places).masked_fill(places < 0, none)  # rank by rank, head by head
        first = torch.full_like(slots.expand(len(q), -1), none)
        first = first.scatter_reduce(1, places.clamp_min(0).flatten(1), turn.flatten(1), "amin")
        order = (-first).float() if none < 1 << 24 else (-first).double()
        order = order.masked_fill(first >= none, float("-inf"))[:, None]
        chosen = ops.topk_rows(order, most[:, 0], self.count(cache.used))
        ends = torch.arange(self.first_tokens(cache.used) + self.last_tokens(cache.used), device=device)
        ends = torch.where(ends < begin, ends, end + ends - begin)
        ends = ends.masked_fill(ends >= length, -1)
        chosen = torch.cat([chosen, ends[:, None]], -1)
        return chosen.expand(-1, cache.geometry.num_kv_heads, -1)

    def _read(self, cache: SlotCache, indices: Tensor) -> Tensor:
        return (indices >= 0).sum(-1)

    def best_keys(self, length: Number) -> Number:
        """The number of keys that the query heads choose in a row of ``length`` tokens."""
        return budget(1.0 - self.recent, self.count(length))

    def first_tokens(self, length: Number) -> Number:
        """The number of first tokens that are always read: all sinks, or 0 if they would leave no recent token."""
        others = self.count(length) - self.best_keys(length)
        return self.sinks * (others > self.sinks)

    def last_tokens(self, length: Number) -> Number:
        """The number of recent tokens that are always read."""
        return self.count(length) - self.best_keys(length) - self.first_tokens(length)


def _scores(cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
    """Logits of one token a row for every query head, fp32 ``[B, Hq, N]``; -inf in empty slots.

    The logits are not capped where a model caps them, because a cap does not change a head's order of keys, for which
    alone they are used.
    """
    logits = ops.key_logits(ops.fold_group(q, cache.geometry.num_kv_heads), cache.keys.to(q.dtype), ops.Logits(scaling))
    holes = occupied(cache)
    if holes is not None:
        logits.masked_fill_(~holes[:, :, None], float("-inf"))
    return logits.flatten(1, 2)
