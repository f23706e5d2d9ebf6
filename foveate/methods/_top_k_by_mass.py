"""Exact attention mass, by which Kascade's anchors and its oracle choose keys: in decode, and for tiles of a prompt."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from foveate import ops
from foveate.methods._anchored import SharedSelection
from foveate.methods._common import scored_lengths
from foveate.methods._settings import MOST_KEPT
from foveate.methods.base import setting
from foveate.methods.handed_on import hand_on, left_for
from foveate.state import SlotCache
from foveate.state.step_plan import on_device


@dataclass(frozen=True)
class TopKByMass(SharedSelection):
    """Keys by their attention mass, which is computed exactly, pooled over the queries that share them.

    A mean of the attention favours queries that attend to few keys. A mean of its square root gives every query keys of
    its own, in proportion to the number of keys that it attends to.
    """

    dense_prompts_by: ClassVar[str] = "decode_only=true"
    pools_layer_by: ClassVar[str] = "pool=layer"
    dense_anchor_prefill: ClassVar[bool] = False
    """Whether layers that choose read all keys in prompts."""

    top_k: int | float = setting(0.1, "keys read: a number, or a share of the tokens so far")
    min_k: int = setting(128, "least number of keys when top_k is a share")
    pool: str = setting("kv_head", "whose attention is averaged: the heads of each kv_head, or of the whole layer")
    pooling: str = setting("post_softmax", "what is averaged: attention (post_softmax) or its square root (sqrt)")
    decode_only: bool = setting(False, "read prompts densely")
    tile: int = setting(128, "queries of a prompt that share their keys, the heads of a group counted")
    rest: str = setting(
        "none",
        "what stands for the keys before a prompt's tile that are not chosen for it: none, or their mean, counted as "
        "often as there are keys",
    )

    def __post_init__(self):
        self._check_budget("top_k")
        self._check_count("min_k")
        self._check_choice("pool", "kv_head", "layer")
        self._check_choice("pooling", "post_softmax", "sqrt")
        self._check("decode_only", isinstance(self.decode_only, bool), "true or false")
        self._check_count("tile", 1, MOST_KEPT)
        self._check_choice("rest", "none", "mean")
        dense = "none with decode_only=true, under which prompts are read densely"
        self._check("rest", self.rest == "none" or not self.decode_only, dense)

    def _settings(self) -> dict[str, Any]:
        """See :meth:`Method._settings`; leaves out `rest` under `decode_only`, where it has no effect."""
        return {key: x for key, x in super()._settings().items() if not (self.decode_only and key == "rest")}

    @property
    def pools_layer(self) -> bool:  # type: ignore[override]
        return self.pool == "layer"

    # Decode

    def select(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        lengths = scored_lengths(cache)
        mass = ops.pooled_mass(q, cache.view(lengths), **self._pooling(cache, scaling))
        return self._chosen(cache, mass, lengths)

    def choose_for_readers(self, cache: SlotCache, q: Tensor, scaling: float) -> ops.Choice:
        return ops.Choice(scores=ops.Pooling(self.pooling, self.pool))

    def choose_by(self, cache: SlotCache, scores: Tensor) -> ops.Choice:
        return self._choice(cache, self._chosen(cache, scores, scored_lengths(cache)))

    def _pooling(self, cache: SlotCache, scaling: float) -> dict[str, Any]:
        """How keys are pooled, as arguments of :func:`~foveate.ops.pooled_mass`."""
        return {"logits": cache.logits(scaling), "pooling": self.pooling, "pool": self.pool}

    def _chosen(self, cache: SlotCache, scores: Tensor, lengths: Tensor | None = None) -> Tensor:
        """The keys of each row by their scores ``[B, Hkv or 1, N]``: ``[B, Hkv, K]``, as :meth:`_best`."""
        if self.pools_layer:
            scores = cache.mean_over_ranks(scores)
        best = self._best(scores, cache.plan.per_row(self.count), self.count(cache.used), cache.plan.alike, lengths)
        return best.expand(-1, cache.geometry.num_kv_heads, -1)

    def _best(self, scores: Tensor, counts: Tensor, most: int, alike: bool, lengths: Tensor | None = None) -> Tensor:
        """The keys of the highest scores ``[B, Hkv, N]``: ``[B, Hkv or 1, K]``.

        Args:
            counts: int64 ``[B]``: the number of keys to choose in each row.
            most: the largest of these numbers, or a bound of them.
            alike: whether the number is the same in all rows.
            lengths: int64 ``[B]``: the number of scores of each row; None: every row has ``N`` scores.
        """
        if self.pools_layer and scores.shape[1] > 1:
            scores = scores.mean(1, keepdim=True)
        if scores.is_cuda or not (alike and most):
            return ops.topk_rows(scores, counts, most, lengths=lengths, dtype=torch.int32)
        return ops.topk(scores, most)

    # Prompt

    @property
    def reads_prompt_whole(self) -> bool:
        """Whether a layer reads all keys of a prompt, although it may choose some keys for other layers."""
        role = self.role
        return role.reads_all or (role.chooses and self.dense_anchor_prefill)

    def prompt_tile(self, group: int) -> int:
        """0 in a layer that reads all keys of a prompt and chooses none of them for other layers."""
        alone = self.reads_prompt_whole and not self.role.has_readers
        return 0 if self.decode_only or alone else max(1, self.tile // group)

    def prompt(self, cache: SlotCache, q: Tensor, scaling: float) -> ops.Attended:
        tile = self.prompt_tile(cache.geometry.group)
        if not tile:
            return super().prompt(cache, q, scaling)
        role, offset, heads = self.role, cache.used - q.shape[2], None
        how = {"logits": cache.logits(scaling), "offset": offset}
        if role.chooses:
            attended = ops.attend_causal(q, cache.view(), need_lse=True, **how)
            lse, exact = attended.lse, self.reads_prompt_whole
            attended = attended if exact else None  # the dense output is freed before scores are computed
            with torch.no_grad():
                chosen = self.select_tiles(cache, q, lse, tile, scaling, offset)
            if role.has_readers:
                hand_on(cache, self, chosen)
            if attended is not None:
                return attended
        else:
            chosen, heads = left_for(cache, self)
        return ops.attend_tile_keys(
            q, cache.view(), chosen, tile=tile, heads=heads, with_means=self.rest == "mean", **how
        )

    def select_tiles(
        self, cache: SlotCache, q: Tensor, lse: Tensor, tile: int, scaling: float, offset: int
    ) -> ops.TileKeys:
        """The keys that each tile of a prompt chooses among the keys before it. Scores of only a few tiles exist at a
        time."""
        power = 0.5 if self.pooling == "sqrt" else 1.0  # exp(power (logit - lse)): attention to that power
        logits = ops.Logits(power * scaling, softcap=None if cache.softcap is None else power * cache.softcap)
        blocks = ops.tile_mass(q, ops.KV(cache.keys), power * lse, logits=logits, tile=tile, offset=offset)
        start, end = offset // tile, -(-(offset + q.shape[2]) // tile)
        counts = [self.count(tile * t) for t in range(start, end)]
        places = tuple(itertools.accumulate(counts, initial=0))
        ends = tuple(itertools.accumulate((-(-tile * t // ops.select.WORD_KEYS) for t in range(start, end)), initial=0))
        heads = 1 if self.pools_layer else cache.geometry.num_kv_heads
        words = torch.zeros(len(q), heads, ends[-1], dtype=torch.int32, device=q.device)
        chosen = ops.TileKeys(words, on_device(ends, q.device), on_device(places, q.device), places)
        for first, scores in blocks:
            some = slice(first - start, first - start + scores.shape[2])
            own, begins = counts[some], chosen.begins[some.start : some.stop + 1]
            how = (on_device(tuple(own), q.device), max(own), len(set(own)) == 1)
            for row in range(len(q)):
                best = self._best(scores[row].transpose(0, 1), *how)
                ops.set_bits(words[row, None], best.transpose(0, 1)[None], begins)
            del scores, best  # before the scores of the next tiles are computed
        return chosen
