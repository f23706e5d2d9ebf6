"""Memory that the launches of one :func:`attend_summaries` call share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from foveate.ops.summaries.plan import Stage
from foveate.ops.summaries.tree import Tree


class Selection(NamedTuple):
    """Which nodes of one level are refined, of each KV head, or (``sets`` 1) of the whole layer."""

    chosen: Tensor
    """int64 ``[B, sets, k]``, ascending: their places among the visited nodes, then -1."""
    pages: Tensor
    """int64 ``[B, sets, k]``: their numbers in the level; the same tensor at the top level."""
    picked: Tensor
    """int32 ``[B, sets]``: how many."""
    gone: Tensor
    """int32 ``[B, sets, padded]``: 1 at places that are refined or hold no node."""


class Visit(NamedTuple):
    """One level of a call: its nodes, and what is decided about them."""

    stage: Stage
    weights: Tensor
    """fp32 ``[B, Hq, ..]``: :attr:`Workspace.weights` from the level's first node on."""
    selection: Selection
    """Which of the nodes are refined."""
    count: Tensor
    """How many nodes there are or, below the top level, how many nodes of the level above they are children of."""
    count_strides: tuple[int, int]
    """Its strides by row and by KV head."""
    branch: int = 0
    """Children of a node of the level above; 0 at the top level, where the two fields below are None."""
    above: Selection | None = None
    """The selection whose children the nodes are."""
    parents: Tensor | None = None
    """``weights`` of the level above."""


@dataclass(frozen=True)
class Workspace:
    """Results and intermediates of a call. Log-weights and log-sum-exps are to the base 2, but for ``lse``.

    A row of ``weights`` holds the nodes of each level from the top down (:attr:`Stage.begin`), raw tokens from ``raw``
    on and, from ``tokens`` on, the tokens of refined pages.
    """

    weights: Tensor
    """fp32 ``[B, Hq, places]``, places a multiple of 16: log-weights."""
    raw: int
    tokens: int
    kept: int
    """Log-weights that are kept of a refined page: of each token, or of each piece that is read at once."""
    gone: Tensor
    """int32 ``[B, sets, raw]``: :attr:`Selection.gone` of all levels."""
    visits: tuple[Visit, ...]
    """The levels, from the top down."""
    found: Tensor
    """fp32 ``[parts, B, Hq, Dv]``: parts of the output, each normalised by itself."""
    found_lse: Tensor
    """fp32 ``[parts, B, Hq]``: their log-sum-exps."""
    arrived: Tensor
    """int32 ``[programs]``: programs of a row that have written their part."""
    read: Tensor
    """fp32 ``[B, Hkv]``: see :attr:`Covered.read`."""
    refined: Tensor
    """fp32 ``[B, Hkv]``: see :attr:`Covered.refined`."""
    out: Tensor
    """``[B, Hq, 1, Dv]``."""
    lse: Tensor
    """fp32 ``[B, Hq, 1]``: natural log-sum-exp."""

    @property
    def places(self) -> int:
        """Log-weights of a row."""
        return self.weights.shape[2]

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.weights.shape[1] // self.read.shape[1]


def make_workspace(
    q: Tensor, v: Tensor, tree: Tree, stages: Sequence[Stage], programs: int, sets: int, kept: int, keeps: str
) -> Workspace:
    """Uninitialised memory for a call.

    Args:
        q: ``[B, Hq, 1, D]``.
        v: ``[B, Hkv, Lk, Dv]``.
        programs: rows times KV heads times tiles of the group.
        sets: selections of a row: KV heads, or 1.
        kept: log-weights to keep of a refined page.
        keeps: which log-weights outlive the launches that compute them: those of ``nodes``, of nodes and ``raw``
            tokens, or of ``all``, the tokens of refined pages among them.
    """
    (batch, heads, _, _), (_, num_kv_heads, _, value_dim), last = q.shape, v.shape, stages[-1]
    raw = last.begin + last.padded
    tokens = raw + triton.cdiv(tree.rows.width, 16) * 16
    places = {"nodes": raw, "raw": tokens, "all": tokens + last.k * kept}[keeps]
    new, number = {"device": q.device}, {"dtype": torch.float32, "device": q.device}
    weights = torch.empty(batch, heads, triton.cdiv(places, 16) * 16, **number)
    gone, visits = torch.empty(batch, sets, raw, dtype=torch.int32, **new), []
    for stage in stages:
        chosen = torch.empty(batch, sets, stage.k, dtype=torch.int64, **new)
        pages = torch.empty_like(chosen) if visits else chosen
        picked = torch.empty(batch, sets, dtype=torch.int32, **new)
        selection = Selection(chosen, pages, picked, gone[:, :, stage.begin : stage.begin + stage.padded])
        its_weights = weights[:, :, stage.begin :]
        if not visits:
            nodes = tree.rows.numbers[2 + len(tree.levels) + stage.level]
            visits.append(Visit(stage, its_weights, selection, nodes, (1, 0)))
            continue
        above, branch = visits[-1], tree.branch(stage.level + 1)
        count = above.selection.picked
        of_above = (branch, above.selection, above.weights)
        visits.append(Visit(stage, its_weights, selection, count, strides_by_head(count), *of_above))
    parts = last.before + last.parts
    return Workspace(
        weights=weights,
        raw=raw,
        tokens=tokens,
        kept=kept,
        gone=gone,
        visits=tuple(visits),
        found=torch.empty(parts, batch, heads, value_dim, **number),
        found_lse=torch.empty(parts, batch, heads, **number),
        arrived=torch.empty(programs, dtype=torch.int32, **new),
        read=torch.empty(batch, num_kv_heads, **number),
        refined=torch.empty(batch, num_kv_heads, **number),
        out=q.new_empty(batch, heads, 1, value_dim),
        lse=torch.empty(batch, heads, 1, **number),
    )


def strides_by_head(x: Tensor) -> tuple[int, int]:
    """Strides of a selection by row and by KV head; 0 by head where the layer selects for all of them."""
    return x.stride(0), x.stride(1) if x.shape[1] > 1 else 0
