"""LOCKS: pages by the attention that their keys will hold, as summaries of eight directions estimate it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from foveate.methods._low_rank import LowRankPages
from foveate.methods._summarised import SummarisedPages
from foveate.methods.base import setting
from foveate.methods.budgets import Number, clamp
from foveate.state import SlotCache

_BITS = 8
"""Of the coefficients."""


@dataclass(frozen=True)
class Locks(SummarisedPages):
    """The heads of a group read the pages that hold most of their attention, by a summary of eight directions a page.

    A summary is the page's mean key in eight bits, eight directions in four and their coefficients in eight: 816 bytes
    of a page of 16 keys of 128 numbers, where locks-kv has 818. A page's score is the sum over the heads of its mass,
    by the log-sum-exp of the logits that the summary gives its keys, over the largest of any page. Always read, and
    part of ``top_k`` as in the paper's budgets, are the first page and the newest one. The prefill is dense.

    Differs from locks-kv 0.1.4, where directions are eigenvectors of the page's Gram matrix, each rounded apart: here
    each is found after the ones before it were rounded, and takes up what they lost. locks-kv rounds queries to eight
    bits, and reads at least one page besides the two.
    """

    name: ClassVar[str] = "locks"
    source: ClassVar[str] = "LOCKS, Hwang, Python package locks-kv, release 0.1.4"
    full_budget: ClassVar[dict] = {"top_k": 1.0}
    small_budget: ClassVar[dict] = {"top_k": 16, "page_size": 4, "rank": 2}

    top_k: int | float = setting(2048, "keys read: a number, or a share of the tokens so far; in whole pages")
    page_size: int = setting(16, "tokens of a page")
    rank: int = setting(8, "directions of a page's summary, 1 to 8")
    sink_pages: int = setting(1, "first pages that are always read")
    window_pages: int = setting(1, "newest pages that are always read, the one that is being filled included")
    dense_layers: int = setting(0, "first layers that read all keys")

    def __post_init__(self):
        super().__post_init__()
        self._check_count("rank", 1)
        self._check_records()
        self._check_count("sink_pages")
        self._check_count("window_pages", 1)

    @functools.cached_property
    def summaries(self) -> LowRankPages:
        """What is kept of pages."""
        return LowRankPages(self.page_size, self.rank, weighted=False, coefficient_bits=_BITS)

    @property
    def first_pages(self) -> int:
        return self.sink_pages

    def first_newest(self, length: Number) -> Number:
        pages = self.pages(length)
        return clamp(pages - self.window_pages, 0, pages)

    @property
    def most_newest(self) -> int:
        return self.window_pages

    def score_pages(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        return self.summaries.mass(cache, q, scaling, pooling="of_largest", counts=cache.each_row(self.first_newest))
