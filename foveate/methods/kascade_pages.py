"""Kascade whose anchors score summaries of pages first, and then the keys of the best pages alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from foveate import ops
from foveate.methods._page_summaries import KeepsSummaries, LowRankPages, check_records
from foveate.methods.base import About, Fetches, Method, register, setting
from foveate.methods.budgets import Number, clamp
from foveate.methods.kascade import Kascade
from foveate.state import Geometry, SlotCache

ONE_PAGE_IN = 3
"""Anchors score the keys of one page in this many, or of more pages where top_k needs them."""


@register
class KascadePages(KeepsSummaries, Kascade):
    """Kascade whose anchors choose keys in two steps for a decoded token, which is approximate and reads less.

    Anchors keep low-rank summaries of pages. By these summaries they first choose the third of the pages that holds
    most of the attention; the newest page is always one of them. Then they choose keys by their exact attention within
    these pages.

    With ``first_layer=pages`` layer 0 does the same for its readers. Its own decoded tokens attend to all keys of that
    third of the pages instead of to all keys. Prompts are read as in :class:`~foveate.methods.kascade.Kascade`. Both
    methods use the same anchors, so a calibration serves both.
    """

    name: ClassVar[str] = "kascade_pages"
    about: ClassVar[About] = About(
        "foveate; Kascade, arXiv:2512.16391, whose anchors score low-rank summaries of pages first",
        small_budget={"top_k": 9, "tile": 1, "anchors": 1, "first_layer": "pages", "page_size": 4},
        estimates=True,
    )
    rank: ClassVar[int] = 2
    """Directions of a page's summary."""
    every: ClassVar[int] = 1  # type: ignore[misc]

    first_layer: str = setting(
        "dense",
        "what a decoded token reads in layer 0: all keys (dense); or, approximate, the keys of the best third of the "
        "pages (pages)",
    )
    page_size: int = setting(8, "tokens of a page")
    weighted: bool = setting(
        True, "weigh the channels of keys, before they are rounded, by the last queries of the prompt"
    )

    def __post_init__(self):
        super().__post_init__()
        self._check_choice("first_layer", "dense", "pages")
        check_records(self)
        self._check("weighted", isinstance(self.weighted, bool), "true or false")

    def __hash__(self):
        return hash(self.spec)

    def for_layer(self, layer: int, num_layers: int, among: Sequence[int] | None = None) -> Method:
        own = super().for_layer(layer, num_layers, among)
        if own.reads_pages:
            name = "pages, choosing" if own.role.has_readers else "pages"
            own.__dict__["role"] = own.role._replace(name=name, chooses=True, reads_all=False)
        return own

    # What the layer does

    @property
    def reads_pages(self) -> bool:
        """Whether a decoded token reads all keys of the best pages: in layer 0, whether it is an anchor or not."""
        return self.first_layer == "pages" and self.role.layer == 0

    @property
    def scores_summaries(self) -> bool:
        """Whether this layer keeps summaries of pages, by which it chooses the pages whose keys it scores or reads."""
        return self.reads_pages or (self.role.chooses and not self.role.reads_all)

    @property
    def scores_keys_of_pages(self) -> bool:
        """Whether this layer scores the keys of the best pages: to read the best of them, or in layer 0 for its
        readers."""
        return self.role.has_readers if self.reads_pages else self.scores_summaries

    @property
    def reads_prompt_whole(self) -> bool:
        return self.reads_pages or super().reads_prompt_whole

    @property
    def needs_prompt_end(self) -> bool:  # type: ignore[override]
        return self.reads_pages or super().needs_prompt_end

    @property
    def counters(self) -> tuple[str, ...]:  # type: ignore[override]
        """If layer 0 reads pages, it also counts the share of the attention that they hold by their summaries, 0 to
        1."""
        return (*super().counters, "mass_read") if self.reads_pages else super().counters

    # Decode

    @functools.cached_property
    def summaries(self) -> LowRankPages:
        """The summaries of pages that an anchor keeps."""
        return LowRankPages(self.page_size, self.rank, self.weighted)

    @property
    def kept(self) -> LowRankPages | None:
        return self.summaries if self.scores_summaries else None

    def note_newest(self, cache: SlotCache, q: Tensor) -> None:
        if self.scores_summaries:
            self.summaries.write_newest(cache)

    def learn(self, cache: SlotCache, choice: ops.Choice, attended: ops.Attended) -> None:
        if choice.reads_all and self.reads_pages:
            cache.count("mass_read", 1.0)

    def choose(self, cache: SlotCache, q: Tensor, scaling: float) -> ops.Choice | None:
        """In layer 0, if it reads pages, all keys of the best pages; if it has readers, it chooses among these keys for
        them. Other layers choose as in Kascade."""
        if not self.reads_pages:
            return super().choose(cache, q, scaling)
        pages, plan = self._best_pages(cache, q, scaling), cache.plan
        chosen = None
        if self.scores_keys_of_pages:
            chosen = self._choice(cache, self._best_keys(cache, q, pages, scaling))
        return ops.Choice(
            pages=pages.expand(-1, cache.geometry.num_kv_heads, -1),
            page_size=self.page_size,
            counts=plan.for_sparse_rows(self.scored_pages),
            read=plan.per_row(self.page_keys)[:, None],
            readers=chosen,
            fetched=self.scores_keys_of_pages,
        )

    def _selected(self, cache: SlotCache, q: Tensor, scaling: float) -> ops.Choice:
        return super()._selected(cache, q, scaling)._replace(fetched=True)

    def select(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        """The keys with the largest share of the attention to the best pages, int ``[B, Hkv, K]``."""
        return self._best_keys(cache, q, self._best_pages(cache, q, scaling), scaling)

    def _best_pages(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        """The pages that hold most of the attention to full pages, by their summaries, and the newest page.

        Returns int32 ``[B, Hkv, P]``, or ``[B, 1, P]`` if all heads of the layer share their pages.
        """
        mass = self.summaries.mass(cache, q, scaling, self.pooling, self.pool)
        mass, plan = cache.mean_over_ranks(mass) if self.pools_layer else mass, cache.plan
        ends = plan.for_sparse_rows(self.summaries.pages)
        scores = ops.with_always_read(mass, 0, plan.per_row(self.summaries.newest), ends)
        counts, most = plan.per_row(self.scored_pages), self.scored_pages(cache.used)
        pages = ops.topk_rows(scores, counts, most, lengths=ends, dtype=torch.int32)
        if self.reads_pages:
            if self.pooling == "sqrt":  # its scores are not shares of the attention
                mass = self.summaries.mass(cache, q, scaling, "post_softmax", self.pool)
            cache.count("mass_read", ops.mass_of_pages(mass, pages))
        return pages

    def _best_keys(self, cache: SlotCache, q: Tensor, pages: Tensor, scaling: float) -> Tensor:
        """The slots of the keys that hold most of the attention to some ``pages``: ``[B, Hkv, K]``."""
        kv, scored = cache.view_of_pages(pages, self.page_keys)
        counts = cache.plan.for_sparse_rows(self.scored_pages)
        how = self._pooling(cache, scaling)
        mass = ops.pooled_mass_of_pages(q, kv, scored, self.page_size, counts=counts, **how)
        places = self._chosen(cache, mass, cache.plan.for_sparse_rows(self.places))[:, : pages.shape[1]]
        return ops.keys_at_places(places, pages, self.page_size).expand(-1, cache.geometry.num_kv_heads, -1)

    # Numbers of pages and keys

    @property
    def fetches(self) -> Fetches | None:  # type: ignore[override]
        """An anchor fetches the pages whose keys it scores; another layer fetches the pages that hold a key it
        reads."""
        return None if self.role.reads_all else Fetches(self.page_size, self.scored_pages)

    def scored_pages(self, length: Number) -> Number:
        """The number of pages of a row whose keys an anchor scores, or layer 0 reads: enough for ``top_k`` keys."""
        pages, least = self.summaries.pages(length), (self.count(length) + self.page_size - 2) // self.page_size + 1
        return clamp(-(-pages // ONE_PAGE_IN), least, pages)

    def places(self, length: Number) -> Number:
        """The number of places for keys in the scored pages."""
        return self.page_size * self.scored_pages(length)

    def page_keys(self, length: Number) -> Number:
        """The number of keys in the scored pages; the newest page may be partly filled."""
        return self.places(length) - self.page_size * self.summaries.pages(length) + length

    def attended_keys(self, tokens: int) -> int | None:
        return self.page_keys(tokens) if self.reads_pages else super().attended_keys(tokens)

    def scored(self, tokens: Number, geometry: Geometry, dtype: torch.dtype) -> float | Tensor:
        """A scoring layer reads the summaries of all pages, and perhaps the keys of the best pages."""
        if not self.scores_summaries:
            return super().scored(tokens, geometry, dtype)
        keys = self.page_keys(tokens) if self.scores_keys_of_pages else 0
        return self.summaries.scored(tokens, geometry, dtype) + geometry.key_share * keys
