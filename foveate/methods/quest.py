"""Quest: pages by the largest logit that any of their keys can have."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveate import ops
from foveate.methods._common import attend_all, count_scored
from foveate.methods.base import Method, Replay, setting
from foveate.methods.budgets import Number, budget, clamp
from foveate.state import Channel, Geometry, SlotCache


@dataclass(frozen=True)
class Quest(Method):
    """Each query head reads the pages whose keys could answer it best, by the corners of the box around their keys.

    The first layers are dense, and so is the prefill. The page that is still being filled competes with the others, by
    the box around the keys that it has.
    """

    name: ClassVar[str] = "quest"
    source: ClassVar[str] = "Quest, Tang et al. 2024, arXiv:2406.10774"
    stateful: ClassVar[bool] = False
    can_decode_dense: ClassVar[bool] = True
    replay: ClassVar[Replay] = Replay()
    dense: ClassVar[bool] = False
    """Whether this layer reads all keys; set by :meth:`for_layer`."""
    full_budget: ClassVar[dict] = {"top_k": 1.0}
    small_budget: ClassVar[dict] = {"top_k": 6, "page_size": 3, "min_pages": 1, "dense_layers": 0}

    top_k: int | float = setting(0.1, "keys read: a number, or a share of the tokens so far; in whole pages")
    min_k: int = setting(128, "least number of keys when top_k is a share")
    page_size: int = setting(16, "tokens of a page")
    min_pages: int = setting(3, "least number of pages")
    pool: str = setting(
        "head", "who chooses pages: each query head, or the heads of a kv_head together (by the largest)"
    )
    dense_layers: int = setting(2, "first layers that read all keys")

    def __post_init__(self):
        self._check_budget("top_k")
        for name in ("min_k", "dense_layers"):
            self._check_count(name)
        for name in ("page_size", "min_pages"):
            self._check_count(name, 1)
        self._check_choice("pool", "head", "kv_head")

    def for_layer(self, layer: int, num_layers: int, among: Sequence[int] | None = None) -> Quest:
        own = dataclasses.replace(self)
        own.__dict__["dense"] = layer < self.dense_layers
        return own

    @property
    def role(self) -> str:
        return "dense" if self.dense else self.name

    @property
    def needs_prompt_end(self) -> bool:  # type: ignore[override]
        """A decoded token reads pages, those of a prompt read everything."""
        return not self.dense

    def channels(self, geometry: Geometry) -> dict[str, Channel]:
        corner = Channel((geometry.head_dim,), per=self.page_size, dtype=None, recomputed=True)
        return {} if self.dense else {"low": corner, "high": corner}

    def prompt_end(self, cache: SlotCache, scaling: float) -> None:
        if not self.dense:
            length, read = cache.lengths[0], cache.rows["observed"][0]
            self._bound(cache, (length - read) // self.page_size, length // self.page_size)

    def _bound(self, cache: SlotCache, first: int, last: int) -> None:
        """Write the boxes of the pages ``first .. last - 1``, of rows that all have them."""
        if first < last:
            keys = cache.keys[:, :, first * self.page_size : last * self.page_size].unflatten(2, (last - first, -1))
            cache.channel("low")[:, :, first:last] = keys.amin(3)
            cache.channel("high")[:, :, first:last] = keys.amax(3)

    def decode(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        if self.dense:
            return attend_all(cache, q, scaling).out
        lengths = self._bound_newest(cache)
        counts, most = cache.each_row(self.count), cache.most(self._widest)
        pages = ops.topk_rows(self._bounds(cache, q, scaling), counts, most, dtype=torch.int32)
        self._count_read(cache, pages)
        how = {"lengths": lengths, "sink_logits": cache.sink_logits, "softcap": cache.softcap}
        how |= {"scaling": scaling, "block_table": cache.block_table}
        return ops.attend_pages(q, *cache.memory, pages, self.page_size, **how).out

    def scored_share(self, geometry: Geometry, dtype: torch.dtype) -> float:
        """A page has two corners, each of a key's size."""
        return 0.0 if self.dense else 2 / self.page_size * geometry.key_share

    def scored(self, tokens: Number, geometry: Geometry, dtype: torch.dtype) -> float | Tensor:
        """Full pages count by their corners, the page that is being filled by the keys around which its box is made."""
        if self.dense:
            return super().scored(tokens, geometry, dtype)
        return geometry.key_share * (2 * (tokens // self.page_size) + tokens % self.page_size)

    def decode_dense(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        if not self.dense:
            self._bound_newest(cache)
        return attend_all(cache, q, scaling).out

    def _bound_newest(self, cache: SlotCache) -> Tensor:
        """Put the newest keys into the boxes of their pages; returns the rows' lengths."""
        lengths = cache.row_tensor("lengths")
        corners = cache.channel("low"), cache.channel("high")
        ops.bound_newest(cache.memory[0], *corners, lengths, self.page_size, block_table=cache.block_table)
        return lengths

    def pages(self, length: Number) -> Number:
        """Pages of a row, the one that is being filled included."""
        return -(-length // self.page_size)

    def count(self, length: Number) -> Number:
        """Pages that a row of this length may read."""
        allowed, pages = budget(self.top_k, length, self.min_k), self.pages(length)
        whole = clamp(clamp(allowed, 0, length) // self.page_size, self.min_pages, pages)
        return whole + (length <= allowed) * (pages - whole)

    def _widest(self, length: int) -> int:
        """No row that is no longer may read more pages."""
        allowed = clamp(budget(self.top_k, length, self.min_k), 0, length)
        return clamp(self.pages(allowed), self.min_pages, self.pages(length))

    def _bounds(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        """Largest logits in each page, fp32 ``[B, H, P]``, H the heads that choose; -inf where a row has no page.

        They are not capped where a model caps its logits: the order of pages is the same.
        """
        rows, most = ops.fold_group(q, cache.geometry.num_kv_heads), cache.most(self.pages)
        low, high = (cache.channel(name)[:, :, :most] for name in ("low", "high"))
        how = {"lengths": cache.each_row(self.pages), "pool": self.pool}
        bounds = ops.largest_logit(rows, low, high, scaling, **how)
        return bounds.flatten(1, 2) if self.pool == "head" else bounds

    def _count_read(self, cache: SlotCache, pages: Tensor) -> None:
        """Count what heads read that choose the pages ``[B, H, P]``, -1 for none.

        A key counts once for all the heads of a group that read it.
        """
        lengths = cache.row_tensor("lengths")
        cache.count_read(ops.keys_of_pages(pages, cache.geometry.num_kv_heads, self.page_size, lengths))
        count_scored(self, cache)
