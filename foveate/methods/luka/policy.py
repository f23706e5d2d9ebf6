"""The LuKA method: its settings, its prefill, its decode step, and when pages are made.

:mod:`~foveate.methods.luka.pages` makes the summaries. :mod:`~foveate.methods.luka.cover` describes a cache's summaries
to :func:`foveate.ops.summaries.attend_summaries`, which a decode step runs. :mod:`foveate.methods.luka` defines the
terms.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from foveate import ops
from foveate.methods._common import note_queries, observed_mass
from foveate.methods._settings import MOST_KEPT
from foveate.methods.base import SPARSE_FROM_TOKENS, About, Fetches, Method, Observation, Replay, register, setting
from foveate.methods.budgets import Number, budget, clamp
from foveate.methods.luka.cover import tree_of
from foveate.methods.luka.pages import MakesPages, PageLevels
from foveate.state import Channel, Geometry, RowNumber, SlotCache

_LITTLE = 0.12
"""The largest share of one level's pages that may be refined for attention to be faster than dense attention at 32,768
tokens, as measured."""


_LEAST_PIECE = 4
"""Least number of tokens of a page that are fetched from host memory in one piece."""


@register
class LuKA(Method):
    """Each query reads summaries of old pages, the raw tokens of the refined pages, raw sinks and a raw tail.

    The prefill is dense. When the prompt ends, and then every :attr:`PageLevels.every` tokens, pages are made of
    the oldest tokens without a summary that are not in the tail; nothing is evicted. With several page sizes, summaries
    are themselves summarised, and a decode step goes from the coarsest level down the nodes that it refines.

    ``mass="preserve"`` is the paper's equation 3: the children of a refined node share the mass of its summary. With
    ``mass="exact"`` they enter the softmax with their own logits.
    """

    name: ClassVar[str] = "luka"
    about: ClassVar[About] = About(
        "LuKA, Fei et al. 2025, section 3.2",
        full_budget={"top_k": 1.0, "expand": 1.0, "mass": "exact"},
        small_budget={"page_size": 4, "sinks": 2, "tail": 9, "top_k": 2},
        estimates=True,
    )
    needs_prompt_end: ClassVar[bool] = True
    counters: ClassVar[tuple[str, ...]] = ("pages_refined",)
    """Pages read raw: the mean over KV heads, summed over steps and rows."""

    page_size: Any = setting(
        (8, 32), "tokens of a page; several, each a multiple of the one before, for several levels"
    )
    sinks: int = setting(4, "first tokens that stay raw")
    tail: int = setting(128, "least number of recent tokens that stay raw")
    compressor: str = setting("mean", "what stands for a page: its mean, or an average weighted by attention")
    top_k: int | float = setting(0.11, "pages refined: a number (0: none), or a share of the pages")
    expand: int | float = setting(0.3, "nodes refined on each level above the pages")
    pool: str = setting("kv_head", "who chooses pages: each kv_head, or the whole layer (by the largest mass)")
    score: str = setting(
        "lowrank",
        "mass of a page: by a low-rank summary of its keys (lowrank), or as seen from its summary key, with the spread "
        "of its keys (spread) or without (summary)",
    )
    prior: float = setting(0.5, "share of recent attention in the mass by which pages are chosen, below 1")
    window: int = setting(16, "queries over which recent attention is averaged")
    mass: str = setting("exact", "mass of a refined page: exact (its children's own) or preserve (its summary's)")
    bias: str = setting("log", "added to a summary's logit: none, log (of its tokens) or entropy")

    def __post_init__(self):
        if isinstance(self.page_size, (list, tuple)):
            object.__setattr__(
                self, "page_size", self.page_size[0] if len(self.page_size) == 1 else tuple(self.page_size)
            )
        self._check(
            "page_size", self._nests(), "an integer of at least 2, or several, each a multiple of the one before"
        )
        self._check("page_size", self.sizes[-1] <= MOST_KEPT, f"at most {MOST_KEPT:,}")
        self._check_count("sinks")
        self._check_count("tail", 1)
        self._check_count("window", 1, MOST_KEPT)
        self._check_choice("compressor", "mean", "attention")
        self._check_choice("pool", "kv_head", "layer")
        self._check_choice("score", "summary", "spread", "lowrank")
        if self.score == "lowrank":
            rule = "with score=lowrank (score=spread takes others)"
            most = ops.PageRecord.largest_page
            self._check("page_size", self.sizes[-1] <= most, f"at most {most} on every level {rule}")
        self._check_choice("mass", "exact", "preserve")
        self._check_choice("bias", "none", "log", "entropy")
        share = isinstance(self.prior, (int, float)) and not isinstance(self.prior, bool)
        self._check("prior", share and 0 <= self.prior < 1, "at least 0 and below 1")
        self._check_budget("top_k", 0)
        self._check_budget("expand")

    def _nests(self) -> bool:
        sizes = self.page_size if isinstance(self.page_size, tuple) else (self.page_size,)
        if not sizes or any(isinstance(size, bool) or not isinstance(size, int) or size < 2 for size in sizes):
            return False
        return all(big > small and big % small == 0 for small, big in itertools.pairwise(sizes))

    # Derived from the settings

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens under a node of each level, level 0 (pages) first."""
        return self.page_size if isinstance(self.page_size, tuple) else (self.page_size,)

    @functools.cached_property
    def pages(self) -> PageLevels:
        """Makes pages and the levels above them."""
        return PageLevels(
            self.spec,
            self.sizes,
            self.sinks,
            self.tail,
            spread=self.score == "spread",
            records=self.score == "lowrank",
            entropy=self.bias == "entropy",
            mass=self.weighs_mass,
            recent=self.window if self.tracks_recent else 0,
        )

    @property
    def weighs_mass(self) -> bool:
        """Whether summaries are weighted by accumulated attention mass."""
        return self.compressor == "attention"

    @property
    def tracks_recent(self) -> bool:
        """Whether a running average of the attention to each token and node is kept, over ``window`` queries."""
        return self.prior > 0

    # Prompt

    def channels(self, geometry: Geometry) -> dict[str, Channel | RowNumber]:
        return self.pages.channels(geometry)

    @property
    def observation(self) -> Observation | None:
        keys = [("queries", self.window)] if self.tracks_recent else []
        keys += ["column_mass"] if self.weighs_mass else []
        return Observation(tuple(keys) if len(keys) > 1 else keys[0], self.weighs_mass) if keys else None

    def observe(self, cache: SlotCache, q: Tensor, attended: ops.Attended, scaling: float) -> None:
        offset = cache.used - q.shape[2]
        if self.tracks_recent:
            note_queries(cache, q, self.window)
        if self.weighs_mass:
            how = {"logits": cache.logits(scaling), "offset": offset}
            ops.column_mass(q, ops.KV(cache.keys), attended.lse, out=cache.channel("mass"), **how)

    def prompt_end(self, cache: SlotCache, scaling: float) -> None:
        if self.tracks_recent:
            mass, queries = observed_mass(cache, self.window, scaling)
            if queries:
                recent = mass.unflatten(1, (cache.geometry.num_kv_heads, -1)).mean(2) / queries
                self.pages.look_back(cache, recent, queries / self.window)
        self.pages.extend(cache)

    # Decode

    @property
    def needs_mass(self) -> bool:  # type: ignore[override]
        return self.weighs_mass

    def choose(self, cache: SlotCache, q: Tensor, scaling: float) -> ops.Choice:
        """A cover; or, while no row has a page, a choice of all keys."""
        tracks = self.weighs_mass or self.tracks_recent
        if not cache.plan.some("pages"):
            return ops.Choice(need_mass=tracks)
        total = cache.channel("mass") if self.weighs_mass else None
        recent = cache.channel("recent") if self.tracks_recent else None
        sums = ops.summaries.Sums(1 / self.window, total, recent) if tracks else None
        tree = tree_of(self.pages, self.top_k, self.expand, cache)
        return ops.Choice(cover=ops.Cover(tree, self.refinement, sums))

    def scored(self, tokens: Number, geometry: Geometry, dtype: torch.dtype) -> float | Tensor:
        """0: the cover itself counts the summaries that it reads."""
        return 0.0

    def learn(self, cache: SlotCache, choice: ops.Choice, attended: ops.Attended) -> None:
        """Update the running sums of attention after steps without a cover.

        Such dense steps measure the mass only for ``compressor="attention"``, whose summaries are means weighted by it.
        When they measure it, the running average of ``prior`` is updated, too.
        """
        if choice.cover is not None or attended.mass is None:
            return
        if self.weighs_mass:
            cache.channel("mass").add_(attended.mass)
        if self.tracks_recent:
            recent = cache.channel("recent")
            recent.lerp_((attended.mass / cache.geometry.group).to(recent.dtype), 1 / self.window)

    @property
    def fetches(self) -> Fetches:  # type: ignore[override]
        """Pages are fetched in pieces. Every page begins with a piece, unless the sinks would make the pieces tiny."""
        piece = math.gcd(self.sizes[0], self.sinks)
        piece = piece if piece >= min(_LEAST_PIECE, self.sizes[0]) else self.sizes[0]
        return Fetches(piece, functools.partial(self._most_fetched, piece))

    def _most_fetched(self, piece: int, length: int) -> int:
        """The largest number of pieces of a step: for sinks and tail, or for the refined pages, whichever are more."""
        size, pages = self.sizes[0], self.pages.most(length)
        of_page = size // piece + (self.sinks % piece > 0)
        raw = min(length, self.pages.most_raw)
        return max(-(-raw // piece) + 3, clamp(budget(self.top_k, pages, 1), 0, pages) * of_page)

    @property
    def sparse_from_tokens(self) -> int:  # type: ignore[override]
        """More tokens are needed with several levels, with many refined pages, and with options of the paper that only
        the reference implements, because these steps take more launches."""
        few = isinstance(self.top_k, int) and self.top_k <= 8
        little = few or (isinstance(self.top_k, float) and self.top_k <= _LITTLE)
        kernels = (self.compressor, self.pool, self.mass, self.bias) == ("mean", "kv_head", "exact", "log")
        return (4 if len(self.sizes) > 1 or not little or not kernels else 1) * SPARSE_FROM_TOKENS

    @functools.cached_property
    def replay(self) -> Replay:  # type: ignore[override]
        return MakesPages(self.pages)

    @functools.cached_property
    def refinement(self) -> ops.summaries.Refinement:
        """The settings by which nodes are refined, as :func:`foveate.ops.summaries.attend_summaries` takes them."""
        return ops.summaries.Refinement(self.pool, self.score, self.bias, self.mass, self.prior)
