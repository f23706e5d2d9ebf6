"""Pages chosen for each decoded token by their summaries: the base class, and the method with low-rank summaries."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from foveate import ops
from foveate.methods._kept_scores import AT, KeptScores, check_every, every_setting, kept_from_token_to_token
from foveate.methods._page_summaries import KeepsSummaries, LowRankPages, PageSummaries, check_records
from foveate.methods._settings import MOST_KEPT
from foveate.methods.base import SPARSE_FROM_TOKENS, About, Fetches, Replay, redefined, register, setting
from foveate.methods.budgets import Number, budget, clamp
from foveate.state import Channel, Evicts, Geometry, SlotCache
from foveate.state.step_plan import StepPlan

LEAST_KEYS = 128
"""Least number of keys when top_k is a share."""


class PagesOfStep(NamedTuple):
    """The numbers of pages that a step reads, computed once for all layers with the same settings."""

    ends: Tensor
    """int64 ``[B]``: number of pages of each row that are scored."""
    counts: Tensor
    """int64 ``[B]``: number of pages that each row reads."""
    most: int
    """An upper bound of ``counts``."""
    sinks: int
    """Number of first pages that are always read."""
    newest: Tensor | None
    """int64 ``[B]``: index of the first of each row's newest pages, which are always read; None: all pages compete."""


@dataclass(frozen=True)
class PageMethod(KeepsSummaries):
    """For each decoded token, reads the pages whose summaries score best; the prefill is dense.

    A subclass is a preset: it defines the summaries, and the pages that are always read. The always-read pages count
    towards ``top_k``.
    """

    stateful: ClassVar[bool] = False
    sparse_from_tokens: ClassVar[int] = 2 * SPARSE_FROM_TOKENS  # choosing takes more small launches
    needs_prompt_end: ClassVar[bool] = True
    """A decoded token reads chosen pages; a prompt token reads all earlier tokens."""
    replay: ClassVar[Replay] = Replay()
    allows_eviction: ClassVar[Evicts] = Evicts.AT_PROMPT_END
    sinks: ClassVar[int] = 0
    """Number of first tokens whose pages are always read."""
    tail: ClassVar[int] = 0
    """Number of newest tokens whose pages are always read. 0: all pages compete, and the page that is being filled
    competes by the keys that it has."""
    fewest: ClassVar[int] = 0
    """The least number of pages that a row reads, if it has them."""

    top_k: int | float = setting(
        0.1, f"keys read: a number, or a share of the tokens so far, at least {LEAST_KEYS}; in whole pages"
    )
    page_size: int = setting(16, "tokens of a page")

    def __post_init__(self):
        self._check_budget("top_k")
        self._check_count("page_size", 1, MOST_KEPT)

    @property
    def summaries(self) -> PageSummaries:
        """The summaries that are kept of pages."""
        raise NotImplementedError

    @property
    def kept(self) -> PageSummaries:
        return self.summaries

    def attended_keys(self, tokens: int) -> int | None:
        """None if each query head chooses its own pages: a group then reads the union of its heads' pages."""
        if not isinstance(self.summaries, LowRankPages):
            return None
        return self.page_size * (self.count(tokens) - self.summaries.pages(tokens)) + tokens

    def scored(self, tokens: Number, geometry: Geometry, dtype: torch.dtype) -> float | Tensor:
        return self.summaries.scored(tokens, geometry, dtype)

    def rebuild(self, cache: SlotCache) -> None:
        self.summaries.rebuild(cache)

    # Decode

    def note_newest(self, cache: SlotCache, q: Tensor) -> None:
        self.summaries.write_newest(cache)

    def learn(self, cache: SlotCache, choice: ops.Choice, attended: ops.Attended) -> None:
        if choice.reads_all and "mass_read" in self.counters:
            cache.count("mass_read", 1.0)

    def choose(self, cache: SlotCache, q: Tensor, scaling: float) -> ops.Choice:
        """The chosen pages, int32 ``[B, H, P]``, ascending and then -1.

        H is the number of KV heads or of query heads, whichever the summaries score. A key that several heads of a
        group read counts once.
        """
        scores, plan = self.scores(cache, q, scaling), cache.plan
        step = plan.cached(("pages", type(self), self.spec), lambda: self._step(plan, cache.used))
        ranked = scores
        if step.newest is not None:
            ranked = ops.with_always_read(scores, step.sinks, step.newest, step.ends)
        pages = ops.topk_rows(ranked, step.counts, step.most, lengths=step.ends, dtype=torch.int32)
        if "pages_refined" in self.counters:
            cache.count("pages_refined", step.counts[:, None])
        if "mass_read" in self.counters:
            cache.count("mass_read", ops.mass_of_pages(scores, pages))
        read = ops.keys_of_pages(pages, cache.geometry.num_kv_heads, self.page_size, plan["counts"])
        return ops.Choice(pages=pages, page_size=self.page_size, counts=step.counts, read=read)

    def _step(self, plan: StepPlan, used: int) -> PagesOfStep:
        newest = plan.per_row(self.first_newest, of="counts") if self.tail else None
        ends, counts = plan.for_sparse_rows(self.summaries.pages, of="counts"), plan.per_row(self.count, of="counts")
        return PagesOfStep(ends, counts, self.most_pages(used), self.summaries.pages(self.sinks), newest)

    def scores(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        """The scores of pages, see :meth:`PageSummaries.scores`."""
        return self.summaries.scores(cache, q, scaling)

    # Budgets

    def first_newest(self, length: Number) -> Number:
        """The index of the page that holds the first of the ``tail`` newest tokens."""
        return clamp(length - self.tail, 0, length) // self.page_size

    def least(self, length: Number) -> Number:
        """The least number of pages that a row reads, if it has them: its always-read pages, or :attr:`fewest`."""
        if not self.tail:
            return self.fewest
        pages = self.summaries.pages(length)
        return pages - clamp(self.first_newest(length) - self.summaries.pages(self.sinks), 0, pages)

    def count(self, length: Number) -> Number:
        """The number of pages that a row of ``length`` tokens may read."""
        allowed, pages = budget(self.top_k, length, LEAST_KEYS), self.summaries.pages(length)
        whole = clamp(clamp(allowed, 0, length) // self.page_size, self.least(length), pages)
        return whole + (length <= allowed) * (pages - whole)

    def most_pages(self, length: int) -> int:
        """An upper bound of :meth:`count` for all rows of at most ``length`` tokens."""
        pages, allowed = self.summaries.pages, clamp(budget(self.top_k, length, LEAST_KEYS), 0, length)
        newest = (self.tail + self.page_size - 2) // self.page_size + 1 if self.tail else 0
        return clamp(pages(allowed), max(self.fewest, pages(self.sinks) + newest), pages(length))


@register
class Pages(PageMethod):
    """The heads of a group read the pages that hold most of their attention, by a low-rank summary of each page.

    A summary is the page's mean key in eight bits and ``rank`` directions in four (:class:`foveate.ops.PageRecord`). Of
    a page's keys and values it takes 7 % of the bytes with pages of 8 keys, and 3.5 % with pages of 16 (head dim 128,
    bf16). It is made when the page is full. A page's score is its share of the attention to all full pages, by the
    log-sum-exp of the logits that its summary gives its keys, averaged over the heads of the group. The 4 first tokens
    (sinks) and the 16 newest tokens are always read, in whole pages, and count towards ``top_k``. The prefill is dense.

    :class:`~foveate.methods.locks.Locks` estimates a page's mass in the same way, from larger summaries. Weighted
    channels, budgets, always-read pages and pooling are this method's own.
    """

    name: ClassVar[str] = "pages"
    about: ClassVar[About] = About(
        "foveate; of the kind of Quest, arXiv:2406.10774, and LOCKS",
        full_budget={"top_k": 1.0},
        small_budget={"top_k": 32, "page_size": 4},
        estimates=True,
    )
    counters: ClassVar[tuple[str, ...]] = ("pages_refined", "mass_read")
    """Counts the pages that are read, and the share of the attention that they hold by their summaries, 0 to 1."""
    sinks: ClassVar[int] = 4
    tail: ClassVar[int] = 16

    top_k: int | float = redefined(PageMethod, "top_k", 0.25)
    page_size: int = setting(8, "tokens of a page")
    rank: int = setting(2, "directions of a page's summary, 1 to 8")
    weighted: bool = setting(
        True, "weigh the channels of keys, before they are rounded, by the last queries of the prompt"
    )
    every: int = every_setting("pages")

    def __post_init__(self):
        super().__post_init__()
        check_records(self)
        self._check("weighted", isinstance(self.weighted, bool), "true or false")
        check_every(self)

    @functools.cached_property
    def summaries(self) -> LowRankPages:
        return LowRankPages(self.page_size, self.rank, self.weighted)

    def for_shared_blocks(self) -> Pages:
        return dataclasses.replace(self, weighted=False)

    @property
    def per_request(self) -> str:  # type: ignore[override]
        return kept_from_token_to_token(self.every) or super().per_request

    @property
    def allows_eviction(self) -> Evicts:  # type: ignore[override]
        return Evicts.AT_PROMPT_END if self.every == 1 else Evicts.NEVER  # kept scores are of pages as they were

    @property
    def scored_at(self) -> str:  # type: ignore[override]
        return AT if self.every > 1 else ""

    def channels(self, geometry: Geometry) -> dict[str, Channel]:
        kept = KeptScores(self.every, self.page_size).channels() if self.every > 1 else {}
        return super().channels(geometry) | kept

    def scores(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        if self.every == 1:
            return super().scores(cache, q, scaling)

        def mass(due: Tensor) -> Tensor:
            return self.summaries.mass(cache, q, scaling, self.summaries.pooling, due=due)

        number = self.summaries.pages(cache.used)
        return KeptScores(self.every, self.page_size).renew(cache, cache.geometry.num_kv_heads, number, mass)[0]

    @property
    def fetches(self) -> Fetches:  # type: ignore[override]
        return Fetches(self.page_size, self.most_pages)
