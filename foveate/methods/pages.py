"""Pages by the attention that their keys will hold, as low-rank summaries estimate it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveate import ops
from foveate.methods._boxes import PageBoxes
from foveate.methods._low_rank import LowRankPages
from foveate.methods._paged import SelectPages
from foveate.methods.base import Observation, setting
from foveate.methods.budgets import Number, clamp
from foveate.state import Channel, Geometry, SlotCache


@dataclass(frozen=True)
class Pages(SelectPages):
    """The heads of a group read the pages that hold most of their attention, by a low-rank summary of each page.

    A summary is the page's mean key in eight bits and ``rank`` directions in four (:class:`foveate.ops.PageRecord`): of
    a page of 8 keys 7 % of their bytes and their values', of one of 16 3.5 % (head dim 128, bf16). It is made when the
    page is full. A page's score is its share of the attention to all full pages, by the log-sum-exp of the logits that
    its summary gives its keys, averaged over the heads that choose together. Sinks and the newest tokens are always
    read, in whole pages, and count towards ``top_k``. The prefill is dense. With ``score=bound`` the same is done by
    Quest's boxes, which are larger.

    LOCKS (locks-kv 0.1.4) estimates a page's mass in the same way, from larger summaries: of 16 keys, eight directions
    in four bits with coefficients in eight, 9 to 10 % of the KV. It sums the heads' masses, each over its largest, and
    reads one page of sinks and one of new tokens beside its budget. Budgets, always-read pages, weighted channels and
    pooling are this method's own.
    """

    name: ClassVar[str] = "pages"
    source: ClassVar[str] = "foveate; of the kind of Quest, arXiv:2406.10774, and LOCKS, pypi.org/project/locks-kv"
    full_budget: ClassVar[dict] = {"top_k": 1.0}
    small_budget: ClassVar[dict] = {"top_k": 16, "page_size": 4, "window": 3, "sinks": 2}

    page_size: int = setting(8, "tokens of a page")
    score: str = setting(
        "lowrank", "mass of a page: by a low-rank summary of its keys (lowrank), or as if all had Quest's bound (bound)"
    )
    rank: int = setting(2, "directions of a page's summary, 1 to 4")
    weighted: bool = setting(
        True, "weigh the channels of keys, before they are rounded, by the last queries of the prompt"
    )
    sinks: int = setting(4, "first tokens that are always read")
    window: int = setting(16, "newest tokens that are always read, this one included")
    pool: str = setting("kv_head", "who chooses pages: the heads of a kv_head together, or the whole layer")
    dense_layers: int = setting(0, "first layers that read all keys")

    def __post_init__(self):
        super().__post_init__()
        self._check_choice("score", "lowrank", "bound")
        record = ops.PageRecord
        fits = self.score != "lowrank" or 2 <= self.page_size <= record.largest_page
        self._check("page_size", fits, f"2 to {record.largest_page} with score=lowrank")
        self._check_count("rank", 1)
        largest = min(record.largest_rank, self.page_size)
        self._check(
            "rank", self.score != "lowrank" or self.rank <= largest, f"at most {largest} with pages of {self.page_size}"
        )
        self._check("weighted", isinstance(self.weighted, bool), "true or false")
        self._check_count("sinks")
        self._check_count("window", 1)
        self._check_choice("pool", "kv_head", "layer")

    @functools.cached_property
    def summaries(self) -> LowRankPages | PageBoxes:
        """What is kept of pages."""
        if self.score == "bound":
            return PageBoxes(self.page_size)
        return LowRankPages(self.page_size, self.rank, self.weighted)

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
        """Pages that are read; and the share of the attention that they hold by their summaries, 0 to 1."""
        return () if self.dense else ("pages_refined", "mass_read")

    def first_newest(self, length: Number) -> Number:
        """The first of the newest pages, which are always read."""
        return clamp(length - self.window, 0, length) // self.page_size

    def least(self, length: Number) -> Number:
        """The pages of the sinks and the newest ones."""
        pages = self.pages(length)
        return pages - clamp(self.first_newest(length) - self.pages(self.sinks), 0, pages)

    def most_of_least(self) -> int:
        return self.pages(self.sinks) + (self.window + self.page_size - 2) // self.page_size + 1

    def choose(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        heads, mass = cache.geometry.num_kv_heads, self.summaries.mass(cache, q, scaling, pool=self.pool)
        newest, ends = cache.each_row(self.first_newest), cache.each_row(self.pages)
        pages = self._best(cache, ops.with_always_read(mass, self.pages(self.sinks), newest, ends))
        cache.count("mass_read", ops.mass_of_pages(mass, pages))
        pages = pages.expand(-1, heads, -1)
        cache.count_read(self._keys_of(cache, pages))
        cache.count("pages_refined", cache.each_row(self.count)[:, None])
        return pages

    def decode_dense(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        if self.dense:
            return super().decode_dense(cache, q, scaling)
        cache.count("mass_read", 1.0)
        return super().decode_dense(cache, q, scaling)
