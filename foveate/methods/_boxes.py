"""Boxes around the keys of pages, as methods keep them and score by them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from foveate import ops
from foveate.methods.budgets import PageCounts
from foveate.state import Channel, Geometry, SlotCache


@dataclass(frozen=True)
class PageBoxes(PageCounts):
    """The smallest and the largest of each page's keys in each dimension, also of the page that is being filled.

    Args:
        size: keys of a page.
    """

    observation = None
    """Nothing is learned from prompt queries, see :attr:`Method.observation`."""

    def channels(self, geometry: Geometry) -> dict[str, Channel]:
        """The state that is kept, see :meth:`Method.channels`."""
        corner = Channel((geometry.head_dim,), per=self.size, dtype=None, recomputed=True)
        return {"low": corner, "high": corner}

    def share(self, geometry: Geometry, dtype: torch.dtype) -> float:
        """Two corners over a page's keys and values; :meth:`Method.scored_share` of all keys."""
        return 2 / self.size * geometry.key_share

    def observe(self, cache: SlotCache, q: Tensor) -> None:
        """Nothing is learned."""

    def prompt_end(self, cache: SlotCache) -> None:
        """Put boxes around the keys of the pages that the prompt has filled."""
        length, read = cache.lengths[0], cache.rows["observed"][0]
        self.write(cache, (length - read) // self.size, length // self.size)

    def write(self, cache: SlotCache, first: int, last: int) -> None:
        """Write the boxes of the pages ``first .. last - 1``, of rows that all have them."""
        if first < last:
            keys = cache.keys[:, :, first * self.size : last * self.size].unflatten(2, (last - first, -1))
            cache.channel("low")[:, :, first:last] = keys.amin(3)
            cache.channel("high")[:, :, first:last] = keys.amax(3)

    def write_newest(self, cache: SlotCache) -> None:
        """Put the newest keys into the boxes of their pages."""
        corners = cache.channel("low"), cache.channel("high")
        how = {"block_table": cache.block_table}
        ops.bound_newest(cache.memory[0], *corners, cache.row_tensor("lengths"), self.size, **how)

    def bounds(self, cache: SlotCache, q: Tensor, scaling: float, pool: str = "head", full: bool = False) -> Tensor:
        """Largest logits in each page, fp32 ``[B, Hkv, G, P]``, or ``[B, Hkv, P]`` with ``pool="kv_head"``.

        -inf where a row has no page, or (``full``) no full one. They are not capped where a model caps its logits: the
        order of pages is the same.
        """
        rows, most = ops.fold_group(q, cache.geometry.num_kv_heads), cache.most(self.pages)
        low, high = (cache.channel(name)[:, :, :most] for name in ("low", "high"))
        lengths = cache.each_row(self.full if full else self.pages)
        return ops.largest_logit(rows, low, high, scaling, lengths=lengths, pool=pool)

    def mass(
        self, cache: SlotCache, q: Tensor, scaling: float, *, pooling: str = "post_softmax", pool: str = "kv_head"
    ) -> Tensor:
        """Share of the attention to full pages that each of them would hold if its keys had its largest logit.

        Returns:
            fp32 ``[B, Hkv or 1, P]``, as :meth:`LowRankPages.mass`.
        """
        bounds, softcap = self.bounds(cache, q, scaling, full=True), cache.softcap
        there = ~bounds[:, :, 0].isneginf()
        if softcap is not None:
            bounds = (softcap * (bounds / softcap).tanh()).masked_fill(~there[:, :, None], -math.inf)
        return ops.pool_logits(bounds, there, pooling, pool)
