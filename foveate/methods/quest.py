"""Quest: pages by the largest logit that any of their keys can have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveate import ops
from foveate.methods._paged import SelectPages
from foveate.methods.base import setting
from foveate.methods.budgets import Number
from foveate.state import Channel, Geometry, SlotCache


@dataclass(frozen=True)
class Quest(SelectPages):
    """Each query head reads the pages whose keys could answer it best, by the corners of the box around their keys.

    The first layers are dense, and so is the prefill. The page that is still being filled competes with the others, by
    the box around the keys that it has.
    """

    name: ClassVar[str] = "quest"
    source: ClassVar[str] = "Quest, Tang et al. 2024, arXiv:2406.10774"
    full_budget: ClassVar[dict] = {"top_k": 1.0}
    small_budget: ClassVar[dict] = {"top_k": 6, "page_size": 3, "min_pages": 1, "dense_layers": 0}

    min_pages: int = setting(3, "least number of pages")
    pool: str = setting(
        "head", "who chooses pages: each query head, or the heads of a kv_head together (by the largest)"
    )
    dense_layers: int = setting(2, "first layers that read all keys")

    def __post_init__(self):
        super().__post_init__()
        self._check_count("min_pages", 1)
        self._check_choice("pool", "head", "kv_head")

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

    def summarise_newest(self, cache: SlotCache) -> None:
        corners = cache.channel("low"), cache.channel("high")
        ops.bound_newest(cache.keys, *corners, cache.row_tensor("lengths"), self.page_size)

    def choose(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        pages = self._best(cache, self._bounds(cache, q, scaling))
        cache.count_read(self._keys_of(cache, pages))
        return pages

    def scored_share(self, geometry: Geometry, dtype: torch.dtype) -> float:
        """A page has two corners, each of a key's size."""
        return 0.0 if self.dense else 2 / self.page_size * geometry.key_share

    def scored(self, tokens: Number, geometry: Geometry, dtype: torch.dtype) -> float | Tensor:
        """Full pages count by their corners, the page that is being filled by the keys around which its box is made."""
        if self.dense:
            return super().scored(tokens, geometry, dtype)
        return geometry.key_share * (2 * (tokens // self.page_size) + tokens % self.page_size)

    def least(self, length: Number) -> Number:
        return self.min_pages

    def most_of_least(self) -> int:
        return self.min_pages

    def _bounds(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        """Largest logits in each page, fp32 ``[B, H, P]``, H the heads that choose; -inf where a row has no page.

        They are not capped where a model caps its logits: the order of pages is the same.
        """
        rows, most = ops.fold_group(q, cache.geometry.num_kv_heads), cache.most(self.pages)
        low, high = (cache.channel(name)[:, :, :most] for name in ("low", "high"))
        how = {"lengths": cache.each_row(self.pages), "pool": self.pool}
        bounds = ops.largest_logit(rows, low, high, scaling, **how)
        return bounds.flatten(1, 2) if self.pool == "head" else bounds
