"""Summaries of pages that methods keep and score: low-rank records of a page's keys, or boxes around the keys."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foveate import ops
from foveate.methods._common import note_queries
from foveate.methods.base import Method, Observation
from foveate.methods.budgets import Number
from foveate.state import Channel, Geometry, SlotCache

_OBSERVED = 16
"""The number of a prompt's last queries by which the channels of keys are weighted."""


@dataclass(frozen=True)
class PageSummaries:
    """A summary of each page, which a method keeps in channels of its cache.

    A method calls the hooks of this class from its own hooks of the same name; see :class:`Method`.

    Args:
        size: keys of a page.
    """

    size: int

    # Pages of a row of some length, of ints and of tensors alike

    def pages(self, length: Number) -> Number:
        """The number of pages of a row, including the page that is being filled."""
        return -(-length // self.size)

    def newest(self, length: Number) -> Number:
        """The index of the page that holds the last token."""
        return self.pages(length) - 1

    def full(self, length: Number) -> Number:
        """The number of full pages."""
        return length // self.size

    @functools.cached_property
    def spec(self) -> str:
        """A string that distinguishes these rules, see :meth:`~foveate.state.step_plan.StepPlan.per_row`."""
        return f"pages of {self.size}"

    # Hooks

    @property
    def observation(self) -> Observation | None:
        """What the summaries learn from prompt queries; None: nothing."""
        return None

    @property
    def per_request(self) -> str:
        """See :attr:`Method.per_request`."""
        return ""

    def channels(self, geometry: Geometry) -> dict[str, Channel]:
        """The channels that hold the summaries, see :meth:`Method.channels`."""
        raise NotImplementedError

    def scored(self, tokens: Number, geometry: Geometry, dtype: torch.dtype) -> float | Tensor:
        """What a step reads to score the pages of ``tokens`` keys, in units of a key and its value."""
        raise NotImplementedError

    def observe(self, cache: SlotCache, q: Tensor) -> None:
        """Learn from prompt queries."""

    def prompt_end(self, cache: SlotCache) -> None:
        """Summarise the pages that the prompt has filled."""
        length, read = cache.lengths[0], cache.rows["observed"][0]
        self.write(cache, (length - read) // self.size, length // self.size)

    def rebuild(self, cache: SlotCache) -> None:
        """Summarise all full pages after another method has decided which tokens stay."""
        self.write(cache, 0, cache.used // self.size)

    def write(self, cache: SlotCache, first: int, last: int) -> None:
        """Write the summaries of the pages ``first .. last - 1``. All rows must have these pages."""
        raise NotImplementedError

    def write_newest(self, cache: SlotCache) -> None:
        """Update the summary of the page that holds each row's newest key."""
        raise NotImplementedError

    def scores(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        """The scores of pages for one token a row: fp32 ``[B, H, P]``, where H counts the KV heads or the query heads.

        A page without a summary has the score -inf. Scores after a row's last page may be anything.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class PageBoxes(PageSummaries):
    """The box around each page's keys: their minimum and maximum in each dimension. The page that is being filled has a
    box, too."""

    def channels(self, geometry: Geometry) -> dict[str, Channel]:
        corner = Channel((geometry.head_dim,), per=self.size, dtype=None, recomputed=True)
        return {"low": corner, "high": corner}

    def scored(self, tokens: Number, geometry: Geometry, dtype: torch.dtype) -> float | Tensor:
        """The corners of all full pages' boxes, each of a key's size, and the keys of the page that is being filled,
        around which a box is made."""
        return geometry.key_share * (2 * (tokens // self.size) + tokens % self.size)

    def write(self, cache: SlotCache, first: int, last: int) -> None:
        if first < last:
            keys = cache.keys[:, :, first * self.size : last * self.size].unflatten(2, (last - first, -1))
            cache.channel("low")[:, :, first:last] = keys.amin(3)
            cache.channel("high")[:, :, first:last] = keys.amax(3)

    def write_newest(self, cache: SlotCache) -> None:
        corners = cache.channel("low"), cache.channel("high")
        ops.bound_newest(cache.view(cache.plan["counts"]), *corners, self.size)

    def scores(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        """The largest logit that a key in the page's box can have, for each query head.

        Bounds are not capped where a model caps its logits: the order of pages is the same.
        """
        rows, most = ops.fold_group(q, cache.geometry.num_kv_heads), self.pages(cache.used)
        low, high = (cache.channel(name)[:, :, :most] for name in ("low", "high"))
        lengths = cache.plan.for_sparse_rows(self.pages, of="counts")
        return ops.largest_logit(rows, low, high, scaling, lengths=lengths).flatten(1, 2)


_record = functools.cache(ops.PageRecord)  # whose layout is computed once


@dataclass(frozen=True)
class LowRankPages(PageSummaries):
    """A record of each full page, see :class:`foveate.ops.PageRecord`.

    The records of a prompt are made when it ends. Later records are made when a decoded token fills their page. Where
    tokens were removed, the records are written again before they are read.

    Args:
        size: keys of a page.
        rank: directions of a record.
        coefficient_bits: bits of a key's coefficients, 4 or 8.
        weighted: whether a prompt's last queries weight the channels of keys before they are rounded. Each prompt
            renews the weights, and with them the records of all pages. A crop into an earlier turn leaves the weights
            as they are until the next prompt.
        pooling: how the heads of a group score a page. ``post_softmax``: the mean over the heads of the page's share of
            the attention to full pages. ``of_largest``: the mean over the heads of the page's mass divided by the
            largest mass of any page before the newest.
    """

    rank: int = 2
    weighted: bool = True
    coefficient_bits: int = 4
    pooling: str = "post_softmax"

    @property
    def observation(self) -> Observation | None:
        return Observation(("queries", _OBSERVED)) if self.weighted else None

    @property
    def per_request(self) -> str:
        reason = "weighs channels of keys by the queries of a request, and requests share blocks: add weighted=false"
        return reason if self.weighted else ""

    def form(self, geometry: Geometry) -> ops.PageRecord:
        """The format of a page's record."""
        return _record(geometry.head_dim, self.size, self.rank, self.coefficient_bits)

    def channels(self, geometry: Geometry) -> dict[str, Channel]:
        width, heads = geometry.head_dim, geometry.num_kv_heads
        how = {"per": self.size, "recomputed": True, "written": None if self.weighted else self._write_filled}
        found = {"records": Channel((self.form(geometry).bytes,), dtype=torch.uint8, **how)}
        if self.weighted:
            found["queries"] = Channel((geometry.num_heads, _OBSERVED, width), per=0, dtype=None)
            # 1 in a row without a prompt
            found["channel_weights"] = Channel((heads, width), per=0, recomputed=True, fill=1.0)
        return found

    def scored(self, tokens: Number, geometry: Geometry, dtype: torch.dtype) -> float | Tensor:
        """The bytes of a record divided by the bytes of its page's keys and values; a partly filled page counts its
        share of a record."""
        keys = self.size * (geometry.head_dim + geometry.value_dim) * dtype.itemsize
        return tokens * (self.form(geometry).bytes / keys)

    # Prompt

    def observe(self, cache: SlotCache, q: Tensor) -> None:
        if self.weighted:
            note_queries(cache, q, _OBSERVED)

    def prompt_end(self, cache: SlotCache) -> None:
        """Summarise the pages that the prompt has filled, or all pages when their weights are new."""
        if not self.weighted:
            super().prompt_end(cache)
        elif self._weigh(cache):
            self.write(cache, 0, cache.lengths[0] // self.size)

    def rebuild(self, cache: SlotCache) -> None:
        if self.weighted:
            self._weigh(cache)
        super().rebuild(cache)

    def _weigh(self, cache: SlotCache) -> bool:
        """Renew the weights of channels by the queries of a prompt. Returns False when the prompt has no queries."""
        if read := cache.rows["observed"][0]:
            queries = cache.channel("queries")[:, :, -min(_OBSERVED, read) :]
            cache.channel("channel_weights").copy_(ops.channel_weights(queries, cache.geometry.num_kv_heads))
        return read > 0

    def write(self, cache: SlotCache, first: int, last: int) -> None:
        if first < last:
            keys = cache.keys[:, :, first * self.size : last * self.size]
            records = ops.compress_pages(keys, self.form(cache.geometry), self._weights(cache))
            cache.channel("records")[:, :, first:last] = records

    # Decode

    def write_newest(self, cache: SlotCache) -> None:
        """Write the records of the pages that the rows' newest keys have filled, unless :meth:`_write_filled` wrote
        them already."""
        plan = cache.plan
        if cache.store.fills_channels or not plan.some("counts", self.size):
            return
        newest, records = cache.newest_page(plan["counts"]), cache.channel("records")
        ops.compress_newest(newest, records, self.form(cache.geometry), self._weights(cache))

    def _write_filled(self, cache: SlotCache, slots: Tensor) -> None:
        """Write the records of the pages that new tokens fill, see :class:`~foveate.state.Channel`."""
        ops.compress_written(cache.store.keys, cache.tensors["records"], slots, self.form(cache.geometry))

    def scores(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        return self.mass(cache, q, scaling, self.pooling)

    def mass(
        self,
        cache: SlotCache,
        q: Tensor,
        scaling: float,
        pooling: str,
        pool: str = "kv_head",
        due: Tensor | None = None,
    ) -> Tensor:
        """The share of the attention that each page holds, estimated by its record; see
        :func:`foveate.ops.pooled_mass_of_records`.

        Returns fp32 ``[B, Hkv or 1, P]``. A page that is not full has -inf, and so has the newest page under
        ``of_largest``. Learned sinks take no share. Rows that are not ``due``, bool ``[B]``, are not scored.
        """
        memory, table = cache.entries("records", self.pages(cache.used))
        rule = self.newest if pooling == "of_largest" else self.full
        lengths = cache.plan.for_sparse_rows(rule, of="counts")
        lengths = lengths if due is None else lengths.where(due, 0)
        records = ops.Records(memory, self.form(cache.geometry), self._weights(cache), table, lengths)
        return ops.pooled_mass_of_records(q, records, logits=cache.logits(scaling), pooling=pooling, pool=pool)

    def _weights(self, cache: SlotCache) -> Tensor | None:
        return cache.channel("channel_weights") if self.weighted else None


@dataclass(frozen=True)
class KeepsSummaries(Method):
    """A method whose layers may keep summaries of pages."""

    @property
    def kept(self) -> PageSummaries | None:
        """The summaries that the layer keeps; None: it keeps none."""
        raise NotImplementedError

    def channels(self, geometry: Geometry) -> dict[str, Channel]:
        return {} if self.kept is None else self.kept.channels(geometry)

    @property
    def per_request(self) -> str:  # type: ignore[override]
        return "" if self.kept is None else self.kept.per_request

    @property
    def observation(self) -> Observation | None:
        return None if self.kept is None else self.kept.observation

    def observe(self, cache: SlotCache, q: Tensor, attended: ops.Attended, scaling: float) -> None:
        if self.kept is not None:
            self.kept.observe(cache, q)

    def prompt_end(self, cache: SlotCache, scaling: float) -> Tensor | None:
        if self.kept is not None:
            self.kept.prompt_end(cache)


def check_records(method: Any) -> None:
    """Raise ValueError unless low-rank records support a method's ``page_size`` and ``rank``."""
    size, record = method.page_size, ops.PageRecord
    method._check_count("page_size", 1)
    method._check("page_size", 2 <= size <= record.largest_page, f"2 to {record.largest_page}")
    method._check_count("rank", 1)
    largest = min(record.largest_rank, size)
    method._check("rank", method.rank <= largest, f"at most {largest} with pages of {size}")
