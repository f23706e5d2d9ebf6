"""RocketKV: SnapKV's eviction when the prompt ends, and the best pages of the kept keys for each decoded token."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from foveate import ops
from foveate.methods._common import eviction_setting, window_votes
from foveate.methods._page_summaries import PageBoxes
from foveate.methods._settings import MOST_KEPT
from foveate.methods.base import About, register, setting
from foveate.methods.budgets import Number, budget
from foveate.methods.composed import Composition
from foveate.methods.pages import PageMethod
from foveate.methods.snapkv import SnapKV
from foveate.state import SlotCache


@dataclass(frozen=True)
class VotesOfGroup(SnapKV):
    """Keeps the prompt tokens for which the heads of a group vote together; the window counts towards ``top_k``."""

    def allowed(self, length: Number) -> Number:
        return max(budget(self.top_k, length), self.window)

    def scores(self, cache: SlotCache, scaling: float) -> Tensor | None:
        votes = window_votes(cache, self.window, scaling)
        if votes is None:
            return None
        votes = votes.unflatten(1, (cache.geometry.num_kv_heads, -1)).sum(2)
        votes = F.max_pool1d(votes, self.kernel_size, 1, self.kernel_size // 2)
        return F.pad(votes, (0, self.window))


@dataclass(frozen=True)
class GroupBoxes(PageBoxes):
    """Boxes around pages' keys. The heads of a group choose pages together by these boxes."""

    def scores(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        """For each KV head, the mean over its group of each query head's softmax of page scores.

        A query head's page score is the largest logit that a key in the page's box can have. fp32 ``[B, Hkv, P]``; 0
        where a row has no page.
        """
        bounds = super().scores(cache, q, scaling)
        there = ops.first_keys(cache.plan.per_row(self.pages, of="counts"), bounds.shape[-1])
        bounds = bounds.masked_fill(~there, float("-inf"))
        return bounds.softmax(-1).unflatten(1, (cache.geometry.num_kv_heads, -1)).mean(2)


@dataclass(frozen=True)
class PagesOfGroup(PageMethod):
    """The heads of a group read the pages that they choose together by boxes around the pages' keys."""

    @functools.cached_property
    def summaries(self) -> PageBoxes:
        return GroupBoxes(self.page_size)


@register
class RocketKV(Composition):
    """Keeps the prompt tokens that its last tokens attend to; a decoded token reads the best pages of the kept tokens.

    Pages are runs of kept tokens in their order, and tokens decoded later follow them. The heads of a group vote and
    choose together. The page that is being filled competes with the others, by the keys that it has. The prefill is
    dense. Every prompt of a conversation evicts, also tokens of those before it.
    """

    name: ClassVar[str] = "rocketkv"
    about: ClassVar[About] = About(
        "RocketKV, Behnam et al. 2025, arXiv:2502.14051",
        full_budget={"keep": 1.0, "top_k": 1.0},
        small_budget={"keep": 25, "top_k": 9, "page_size": 3, "window": 8, "kernel_size": 3},
    )

    top_k: int | float = setting(256, "keys read: a number, or a share of those kept, at least 128; in whole pages")
    page_size: int = setting(4, "tokens of a page")
    keep: int | float = setting(2048, "tokens kept at the end of a prompt: a number, or a share of the tokens so far")
    window: int = setting(32, "observation window: the last tokens of the prompt, which vote and are kept")
    kernel_size: int = setting(63, "neighbourhood over which votes are pooled by their maximum, odd")
    evict_every: int = eviction_setting()  # type: ignore[misc]

    def __post_init__(self):
        self._check_budget("top_k")
        self._check_count("page_size", 1, MOST_KEPT)
        self._check_budget("keep")
        self._check_count("window", 1, MOST_KEPT)
        self._check_odd("kernel_size")
        self._check_count("evict_every")

    @functools.cached_property
    def evicting(self) -> VotesOfGroup:  # type: ignore[override]
        how = {"window": self.window, "kernel_size": self.kernel_size, "evict_every": self.evict_every}
        return VotesOfGroup(top_k=self.keep, **how)

    @functools.cached_property
    def selecting(self) -> PagesOfGroup:  # type: ignore[override]
        return PagesOfGroup(self.top_k, self.page_size)
