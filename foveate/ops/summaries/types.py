"""What :func:`attend_summaries` takes beside a tree, and what it returns."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Refinement:
    """Which nodes are replaced by their children, and with what weight.

    ``Rows.numbers`` holds how many nodes may be refined: exactly so many under ``top_k``, at most under other rules.
    """

    rule: str = "top_k"
    """``top_k``: the heaviest; ``threshold``: those of more than ``limit`` mass; ``top_p``: the heaviest, until at most
    ``limit`` is left in the others of all levels."""
    limit: float = 0.0
    pool: str = "kv_head"
    """Who chooses: each ``kv_head``, by the mean over its group, or the whole ``layer``, by the largest mass in any
    head."""
    score: str = "summary"
    """Estimate of a node's mass: its weight (``summary``), or by the ``spread``, a ``box`` or Quest's ``bound``, or by
    the low-rank summary of the keys beneath (``lowrank``, see :func:`foveate.ops.page_lse`)."""
    bias: str = "log"
    """Added to a summary's logit: ``none``, ``log`` (of its tokens), ``entropy`` or ``spread``."""
    mass: str = "exact"
    """Children enter the softmax with their own logits (``exact``) or share their parent's mass (``preserve``, LuKA,
    equation 3)."""
    prior: float = 0.0
    """Share of recent attention in the mass by which nodes are chosen."""
    weight_spread: float = 1.0
    """Share of the deviation that enters a summary's own weight under ``bias="spread"``."""


class VisitedLevel(NamedTuple):
    """The nodes of one level that a query visited."""

    level: int
    index: Tensor | None
    """int64 ``[B, Hkv, C]``: their numbers, -1 for none; None: ``0 .. C - 1``."""
    complete: bool
    """Whether every place of ``index`` is used."""
    chosen: Tensor
    """int ``[B, Hkv, K]``, ascending: places among them that were refined, then -1."""
    all_chosen: bool
    """Whether every place of ``chosen`` is used."""


class Covered(NamedTuple):
    """What :func:`attend_summaries` returns."""

    out: Tensor
    """``[B, Hq, 1, Dv]``, in the dtype of the values."""
    lse: Tensor | None
    """fp32 ``[B, Hq, 1]``: log-sum-exp of the cover's log-weights, if asked for."""
    masses: tuple[Tensor, ...]
    """If asked for, fp32 ``[B, Hkv, places]``, the softmax summed over the group: of raw tokens, of the nodes of each
    visited level (0 where refined), and of the tokens of refined pages, page by page, if there are any."""
    visited: tuple[VisitedLevel, ...]
    """The levels that the masses belong to, from the top down; empty where no masses are asked for."""
    read: float | Tensor
    """Keys read, summaries among them (:attr:`Level.reads`): the mean over rows and KV heads, or ``[B, Hkv]``."""
    refined: float | Tensor
    """Pages refined, likewise."""
    capped: Tensor | int
    """Selections of a KV head that :attr:`Rows.numbers` cut short."""


class Sums(NamedTuple):
    """Running sums that :func:`attend_summaries` adds masses to, in place.

    The attention of raw tokens is added to ``total``. The mean over the group, of raw tokens and of all visited nodes,
    enters ``recent`` and :attr:`Level.recent`: averages in which the newest step counts ``share``. A refined node gets
    the attention of its children.
    """

    share: float
    total: Tensor | None = None
    """fp32 ``[B, Hkv, S]``, an entry per slot; None where it is not kept."""
    recent: Tensor | None = None
    """Likewise; None where no recent attention is kept, of tokens or of nodes."""
