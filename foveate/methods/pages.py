"""Pages by the attention that their keys will hold, as low-rank summaries estimate it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from foveate import ops
from foveate.methods._boxes import PageBoxes
from foveate.methods._low_rank import LowRankPages
from foveate.methods._summarised import SummarisedPages
from foveate.methods.base import setting
from foveate.methods.budgets import Number, clamp
from foveate.state import SlotCache


@dataclass(frozen=True)
class Pages(SummarisedPages):
    """The heads of a group read the pages that hold most of their attention, by a low-rank summary of each page.

    A summary is the page's mean key in eight bits and ``rank`` directions in four (:class:`foveate.ops.PageRecord`): of
    a page of 8 keys 7 % of their bytes and their values', of one of 16 3.5 % (head dim 128, bf16). It is made when the
    page is full. A page's score is its share of the attention to all full pages, by the log-sum-exp of the logits that
    its summary gives its keys, averaged over the heads that choose together. Sinks and the newest tokens are always
    read, in whole pages, and count towards ``top_k``. The prefill is dense. With ``score=bound`` the same is done by
    Quest's boxes, which are larger.

    :class:`~foveate.methods.locks.Locks` estimates a page's mass in the same way, from larger summaries. Weighted
    channels, budgets, always-read pages and pooling are this method's own.
    """

    name: ClassVar[str] = "pages"
    source: ClassVar[str] = "foveate; of the kind of Quest, arXiv:2406.10774, and LOCKS"
    full_budget: ClassVar[dict] = {"top_k": 1.0}
    small_budget: ClassVar[dict] = {"top_k": 16, "page_size": 4, "window": 3, "sinks": 2}

    page_size: int = setting(8, "tokens of a page")
    score: str = setting(
        "lowrank", "mass of a page: by a low-rank summary of its keys (lowrank), or as if all had Quest's bound (bound)"
    )
    rank: int = setting(2, "directions of a page's summary, 1 to 8")
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
        self._check_count("rank", 1)
        if self.score == "lowrank":
            self._check_records(" with score=lowrank")
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

    @property
    def first_pages(self) -> int:
        """Those of the sinks."""
        return self.pages(self.sinks)

    def first_newest(self, length: Number) -> Number:
        """The page of the first of the newest tokens."""
        return clamp(length - self.window, 0, length) // self.page_size

    @property
    def most_newest(self) -> int:
        return (self.window + self.page_size - 2) // self.page_size + 1

    def score_pages(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        return self.summaries.mass(cache, q, scaling, pool=self.pool)

    @property
    def counters(self) -> tuple[str, ...]:  # type: ignore[override]
        """Pages that are read; and the share of the attention that they hold by their summaries, 0 to 1."""
        return () if self.dense else (*super().counters, "mass_read")

    def count_choice(self, cache: SlotCache, scores: Tensor, pages: Tensor) -> None:
        super().count_choice(cache, scores, pages)
        cache.count("mass_read", ops.mass_of_pages(scores, pages))

    def decode_dense(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        if not self.dense:
            cache.count("mass_read", 1.0)
        return super().decode_dense(cache, q, scaling)
