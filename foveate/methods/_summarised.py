"""Methods that read the pages whose low-rank summaries score best: what ``pages`` and ``locks`` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foveate import ops
from foveate.methods._boxes import PageBoxes
from foveate.methods._low_rank import LowRankPages
from foveate.methods._paged import SelectPages
from foveate.methods.base import Observation
from foveate.methods.budgets import Number, clamp
from foveate.state import Channel, Geometry, SlotCache


@dataclass(frozen=True)
class SummarisedPages(SelectPages):
    """A method that keeps a summary of each full page, and always reads the first and the newest pages.

    Pages that are always read count towards ``top_k``.
    """

    if TYPE_CHECKING:  # a setting of subclasses
        rank: int

    def _check_records(self, where: str = "") -> None:
        """Raise unless low-rank summaries may have such pages and directions; ``where``: what the rule depends on."""
        record = ops.PageRecord
        fits = 2 <= self.page_size <= record.largest_page
        self._check("page_size", fits, f"2 to {record.largest_page}{where}")
        largest = min(record.largest_rank, self.page_size)
        self._check("rank", self.rank <= largest, f"at most {largest} with pages of {self.page_size}")

    # Defined by subclasses

    @property
    def summaries(self) -> LowRankPages | PageBoxes:
        """What is kept of pages."""
        raise NotImplementedError

    @property
    def first_pages(self) -> int:
        """So many first pages are always read."""
        raise NotImplementedError

    def first_newest(self, length: Number) -> Number:
        """The first of the newest pages, which are always read; the page that is being filled is one of them."""
        raise NotImplementedError

    @property
    def most_newest(self) -> int:
        """The most newest pages that a row has."""
        raise NotImplementedError

    def score_pages(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        """Scores of pages, fp32 ``[B, Hkv or 1, P]``, of those at least that are not always read."""
        raise NotImplementedError

    # Summaries

    def channels(self, geometry: Geometry) -> dict[str, Channel]:
        return {} if self.dense else self.summaries.channels(geometry)

    @property
    def observation(self) -> Observation | None:
        return None if self.dense else self.summaries.observation

    def observe(self, cache: SlotCache, q: Tensor, attended: ops.Attended, scaling: float) -> None:
        if not self.dense:
            self.summaries.observe(cache, q)

    def prompt_end(self, cache: SlotCache, scaling: float) -> None:
        if not self.dense:
            self.summaries.prompt_end(cache)

    def summarise_newest(self, cache: SlotCache) -> None:
        self.summaries.write_newest(cache)

    def scored(self, tokens: Number, geometry: Geometry, dtype: torch.dtype) -> float | Tensor:
        """A page has one summary; the page that is being filled counts like the others."""
        return tokens * (0.0 if self.dense else self.summaries.share(geometry, dtype))

    # Choice

    @property
    def counters(self) -> tuple[str, ...]:  # type: ignore[override]
        """Pages that are read."""
        return () if self.dense else ("pages_refined",)

    def least(self, length: Number) -> Number:
        """The first and the newest pages."""
        pages = self.pages(length)
        return pages - clamp(self.first_newest(length) - self.first_pages, 0, pages)

    def most_of_least(self) -> int:
        return self.first_pages + self.most_newest

    def choose(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        scores, heads = self.score_pages(cache, q, scaling), cache.geometry.num_kv_heads
        newest, ends = cache.each_row(self.first_newest), cache.each_row(self.pages)
        pages = self._best(cache, ops.with_always_read(scores, self.first_pages, newest, ends))
        self.count_choice(cache, scores, pages)
        pages = pages.expand(-1, heads, -1)
        cache.count_read(self._keys_of(cache, pages))
        return pages

    def count_choice(self, cache: SlotCache, scores: Tensor, pages: Tensor) -> None:
        """Count what is chosen: ``pages [B, Hkv or 1, P]`` by their scores."""
        cache.count("pages_refined", cache.each_row(self.count)[:, None])
