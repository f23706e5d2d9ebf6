"""LOCKS: pages by the attention that their keys will hold, as summaries of eight directions estimate it."""

from __future__ import annotations

import functools
from typing import ClassVar

from foveate.methods._page_summaries import LowRankPages, check_records
from foveate.methods.base import About, register, setting
from foveate.methods.pages import LEAST_KEYS, PageMethod


@register
class Locks(PageMethod):
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
    about: ClassVar[About] = About(
        "LOCKS, Hwang, Python package locks-kv, release 0.1.4",
        full_budget={"top_k": 1.0},
        small_budget={"top_k": 16, "page_size": 4, "rank": 2},
        estimates=True,
    )
    counters: ClassVar[tuple[str, ...]] = ("pages_refined",)
    """Counts the pages that are read."""
    sinks: ClassVar[int] = 1
    tail: ClassVar[int] = 1

    top_k: int | float = setting(
        2048, f"keys read: a number, or a share of the tokens so far, at least {LEAST_KEYS}; in whole pages"
    )
    rank: int = setting(8, "directions of a page's summary, 1 to 8")

    def __post_init__(self):
        super().__post_init__()
        check_records(self)

    @functools.cached_property
    def summaries(self) -> LowRankPages:
        return LowRankPages(self.page_size, self.rank, weighted=False, coefficient_bits=8, pooling="of_largest")
