"""Low-rank summaries of the pages of a cache, as methods keep them and score by them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foveate import ops
from foveate.methods._common import note_queries
from foveate.methods.base import Observation
from foveate.methods.budgets import PageCounts
from foveate.state import Channel, Geometry, SlotCache

_OBSERVED = 16
"""Last queries of a prompt by which the channels of keys are weighted."""


@dataclass(frozen=True)
class LowRankPages(PageCounts):
    """A record of each full page, see :class:`foveate.ops.PageRecord`.

    Records of a prompt are made when it ends, others when a decoded token fills their page. They are written again
    before they are read where tokens were removed.

    Args:
        size: keys of a page.
        rank: directions of a record.
        coefficient_bits: of a key's coefficients, 4 or 8.
        weighted: whether the channels of keys are weighted by a prompt's last queries before they are rounded. Each
            prompt renews the weights, and with them the records of all pages.
    """

    rank: int = 2
    weighted: bool = True
    coefficient_bits: int = 4

    def form(self, geometry: Geometry) -> ops.PageRecord:
        """How a page's summary is stored."""
        return ops.PageRecord(geometry.head_dim, self.size, self.rank, self.coefficient_bits)

    def channels(self, geometry: Geometry) -> dict[str, Channel]:
        """The state that is kept, see :meth:`Method.channels`."""
        width, heads = geometry.head_dim, geometry.num_kv_heads
        found = {"records": Channel((self.form(geometry).bytes,), per=self.size, dtype=torch.uint8, recomputed=True)}
        if self.weighted:
            found["queries"] = Channel((geometry.num_heads, _OBSERVED, width), per=0, dtype=None)
            # 1 in a row without a prompt
            found["channel_weights"] = Channel((heads, width), per=0, recomputed=True, fill=1.0)
        return found

    def share(self, geometry: Geometry, dtype: torch.dtype) -> float:
        """Bytes of a record over those of its page's keys and values."""
        return self.form(geometry).bytes / (self.size * (geometry.head_dim + geometry.value_dim) * dtype.itemsize)

    # Prompt

    @property
    def observation(self) -> Observation | None:
        """What is learned from a prompt, see :attr:`Method.observation`."""
        return Observation(("queries", _OBSERVED)) if self.weighted else None

    def observe(self, cache: SlotCache, q: Tensor) -> None:
        """Learn from prompt queries."""
        if self.weighted:
            note_queries(cache, q, _OBSERVED)

    def prompt_end(self, cache: SlotCache) -> None:
        """Summarise the pages that the prompt has filled, or all of them where their weights are new."""
        length, read = cache.lengths[0], cache.rows["observed"][0]
        if not read:
            return
        first = (length - read) // self.size
        if self.weighted:
            queries = cache.channel("queries")[:, :, -min(_OBSERVED, read) :]
            cache.channel("channel_weights").copy_(ops.channel_weights(queries, cache.geometry.num_kv_heads))
            first = 0
        self.write(cache, first, length // self.size)

    def write(self, cache: SlotCache, first: int, last: int) -> None:
        """Write the records of the pages ``first .. last - 1``, of rows that all have them."""
        if first < last:
            keys = cache.keys[:, :, first * self.size : last * self.size]
            records = ops.compress_pages(keys, self.form(cache.geometry), self._weights(cache))
            cache.channel("records")[:, :, first:last] = records

    # Decode

    def write_newest(self, cache: SlotCache) -> None:
        """Write the records of the pages that the rows' newest keys have filled."""
        lengths, form = cache.row_tensor("lengths"), self.form(cache.geometry)
        how = {"weights": self._weights(cache), "block_table": cache.block_table}
        ops.compress_newest(cache.memory[0], cache.channel("records"), lengths, form, **how)

    def mass(
        self,
        cache: SlotCache,
        q: Tensor,
        scaling: float,
        *,
        pooling: str = "post_softmax",
        pool: str = "kv_head",
        counts: Tensor | None = None,
    ) -> Tensor:
        """Share of the attention to full pages that each of them holds, see :func:`foveate.ops.pooled_mass_of_records`.

        fp32 ``[B, Hkv or 1, P]``; -inf of a page that is not full, or not among a row's first ``counts [B]``. Learned
        sinks take no share.
        """
        records = cache.channel("records")[:, :, : cache.most(self.pages)]
        counts = cache.each_row(self.full) if counts is None else counts
        how = {"weights": self._weights(cache), "lengths": counts, "softcap": cache.softcap}
        how |= {"scaling": scaling, "pooling": pooling, "pool": pool}
        return ops.pooled_mass_of_records(q, records, self.form(cache.geometry), **how)

    def _weights(self, cache: SlotCache) -> Tensor | None:
        return cache.channel("channel_weights") if self.weighted else None
