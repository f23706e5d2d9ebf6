"""Tensors that the launches of one :func:`attend_summaries` call share: results and intermediates."""

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
    """The refined nodes of one level. ``sets``: Hkv, or 1 where the whole layer makes one selection."""

    chosen: Tensor
    """int64 ``[B, sets, k]``: places of the refined nodes, ascending, then -1."""
    pages: Tensor
    """int64 ``[B, sets, k]``: their numbers in the level, likewise; at the top level the same tensor as ``chosen``."""
    picked: Tensor
    """int32 ``[B, sets]``: how many nodes are refined."""
    gone: Tensor
    """int32 ``[B, sets, padded]``: 1 at places that are refined or unused, else 0."""


class Visit(NamedTuple):
    """The visited nodes of one level in a call, and their selection."""

    stage: Stage
    weights: Tensor
    """fp32 ``[B, Hq, ..]``: :attr:`Workspace.weights` from the level's first place on."""
    selection: Selection
    """Which of the nodes are refined."""
    count: Tensor
    """Visited nodes at the top level; below it the refined nodes of the level above, whose children are visited."""
    count_strides: tuple[int, int]
    """Strides of ``count`` by row and by KV head."""
    branch: int = 0
    """Children of a node of the level above; 0 at the top level."""
    above: Selection | None = None
    """Selection of the level above; None at the top level."""
    parents: Tensor | None = None
    """``weights`` of the level above; None at the top level."""

    @property
    def pages_above(self) -> Tensor | None:
        """Numbers of the refined nodes of the level above, whose children are visited; None at the top level."""
        return None if self.above is None else self.above.pages

    @property
    def nodes(self) -> tuple[Tensor | None, ...]:
        """``count``; of the level above the refined nodes' numbers and places, and its log-weights; and ``weights``."""
        places_above = None if self.above is None else self.above.chosen
        return self.count, self.pages_above, places_above, self.parents, self.weights

    @property
    def strides(self) -> tuple[tuple[int, int], int, int]:
        """Strides of ``count`` and, by row and by KV head, of :attr:`pages_above`."""
        return self.count_strides, *strides_by_head(self.pages_above)


@dataclass(frozen=True)
class Workspace:
    """Results and intermediates of a call. Log-weights and log-sum-exps are to the base 2, except ``lse``.

    A head's ``weights`` are those of the visited nodes of each level from the top down (from :attr:`Stage.begin` on),
    of sinks and tail (from ``raw`` on), and of the tokens of refined pages (from ``tokens`` on).
    """

    weights: Tensor
    """fp32 ``[B, Hq, places]``, places a multiple of 16: log-weights."""
    raw: int
    tokens: int
    kept: int
    """Log-weights stored for a refined page: one for each token, or one for each chunk that a program reads at once."""
    gone: Tensor
    """int32 ``[B, sets, raw]``: :attr:`Selection.gone` of all levels."""
    visits: tuple[Visit, ...]
    """The levels, from the top down."""
    part_out: Tensor
    """fp32 ``[parts, B, Hq, Dv]``: parts of the output, each normalised by itself."""
    part_lse: Tensor
    """fp32 ``[parts, B, Hq]``: log-sum-exps of the parts."""
    arrived: Tensor
    """int32 ``[programs]``: for each row, KV head and tile of heads, the programs that have written their part."""
    read: Tensor
    """fp32 ``[B, Hkv]``: see :attr:`Covered.read`."""
    refined: Tensor
    """fp32 ``[B, Hkv]``: see :attr:`Covered.refined`."""
    out: Tensor
    """``[B, Hq, 1, Dv]``."""
    lse: Tensor
    """fp32 ``[B, Hq, 1]``: natural log-sum-exp."""

    @property
    def of_raw(self) -> Tensor:
        """``weights`` from those of sinks and tail on."""
        return self.weights[:, :, self.raw :]

    @property
    def of_tokens(self) -> Tensor:
        """``weights`` from those of tokens of refined pages on."""
        return self.weights[:, :, self.tokens :]

    def log_weights(self, visit: Visit) -> tuple[Tensor, Tensor, Tensor]:
        """``weights`` from a level's first place on, :attr:`of_raw` and :attr:`of_tokens`."""
        return visit.weights, self.of_raw, self.of_tokens

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """``(part_out, part_lse)``."""
        return self.part_out, self.part_lse

    @property
    def places(self) -> int:
        """Log-weights of a head."""
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
        stages: the launches' sizes, from the top level down.
        programs: rows times KV heads times tiles of query heads.
        sets: selections of a row: Hkv, or 1 for one of the whole layer.
        kept: log-weights to store for a refined page.
        keeps: which log-weights to store: of ``nodes``; of nodes, sinks and tail (``raw``); or also of the tokens of
            refined pages (``all``).
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
        weights_of_level = weights[:, :, stage.begin :]
        if not visits:
            nodes = tree.rows.numbers[2 + len(tree.levels) + stage.level]
            visits.append(Visit(stage, weights_of_level, selection, nodes, (1, 0)))
            continue
        above, branch = visits[-1], tree.branch(stage.level + 1)
        count = above.selection.picked
        parents = (branch, above.selection, above.weights)
        visits.append(Visit(stage, weights_of_level, selection, count, strides_by_head(count), *parents))
    parts = last.before + last.attending
    return Workspace(
        weights=weights,
        raw=raw,
        tokens=tokens,
        kept=kept,
        gone=gone,
        visits=tuple(visits),
        part_out=torch.empty(parts, batch, heads, value_dim, **number),
        part_lse=torch.empty(parts, batch, heads, **number),
        arrived=torch.empty(programs, dtype=torch.int32, **new),
        read=torch.empty(batch, num_kv_heads, **number),
        refined=torch.empty(batch, num_kv_heads, **number),
        out=q.new_empty(batch, heads, 1, value_dim),
        lse=torch.empty(batch, heads, 1, **number),
    )


def strides_by_head(*tensors: Tensor | None) -> tuple[int, ...]:
    """Strides by row and by KV head of tensors ``[B, sets, ...]``, of one after the other; 0 by head where ``sets`` is
    1, and for None."""
    known = ((0, 0) if x is None else (x.stride(0), x.stride(1) if x.shape[1] > 1 else 0) for x in tensors)
    return tuple(stride for strides in known for stride in strides)
