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
    """The refined nodes of one level."""

    chosen: Tensor
    """int64 ``[B, Hkv, k]``: places of the refined nodes, ascending, then -1."""
    pages: Tensor
    """int64 ``[B, Hkv, k]``: numbers of the refined nodes in the level, in the same order and then -1. At the top level
    it is the same tensor as ``chosen``."""
    picked: Tensor
    """int32 ``[B, Hkv]``: number of refined nodes."""
    gone: Tensor
    """int32 ``[B, Hkv, padded]``, a part of :attr:`Workspace.gone`: 1 at refined and unused places, else 0."""


class Visit(NamedTuple):
    """The visited nodes of one level in a call, and their selection."""

    stage: Stage
    weights: Tensor
    """fp32 ``[B, Hq, ..]``: :attr:`Workspace.weights` from the level's first place on."""
    ranks: Tensor
    """fp32 ``[B, Hq, ..]``: the logarithms by which nodes are chosen; ``weights`` itself if the log-weights choose."""
    selection: Selection
    count: Tensor
    """The number of visited nodes ``[B]`` at the top level; below it the number of refined nodes of the level above,
    ``[B, Hkv]``."""
    branch: int = 0
    """Children of a node of the level above; 0 at the top level."""
    above: Selection | None = None
    """Selection of the level above; None at the top level."""

    @property
    def listed(self) -> Tensor | None:
        """Numbers of the refined nodes of the level above, whose children are visited; None at the top level."""
        return None if self.above is None else self.above.pages


@dataclass(frozen=True)
class Workspace:
    """Results and intermediates of a call. Log-weights and log-sum-exps are to the base 2, except ``lse``.

    A head's ``weights`` hold the log-weights of the visited nodes of each level from the top down, each level beginning
    at :attr:`Stage.begin`. If running averages need them, the log-weights of sinks and tail and of the chunks of
    refined pages follow.
    """

    weights: Tensor
    """fp32 ``[B, Hq, places]``: log-weights; places is a multiple of 16."""
    of_raw: Tensor | None
    """The part of ``weights`` that begins with sinks and tail; None: their log-weights are not kept."""
    of_chunks: Tensor | None
    """The part of ``weights`` that begins with refined pages, with one entry for each chunk that a program reads at
    once; None: not kept."""
    chunks: int
    """Number of chunks of a page."""
    gone: Tensor
    """int32 ``[B, Hkv, ..]``: :attr:`Selection.gone` of all levels, from :attr:`Stage.begin` on."""
    visits: tuple[Visit, ...]
    """The levels, from the top down."""
    part_out: Tensor
    """fp32 ``[parts, B, Hq, Dv]``: parts of the output, each normalised by itself."""
    part_lse: Tensor
    """fp32 ``[parts, B, Hq]``: log-sum-exps of the parts."""
    arrived: Tensor
    """int32 ``[programs]``: for each row, KV head and tile of heads, the number of programs that have written a
    part."""
    read: Tensor
    """fp32 ``[B, Hkv]``: see :attr:`Covered.read`."""
    refined: Tensor
    """fp32 ``[B, Hkv]``: see :attr:`Covered.refined`."""
    out: Tensor
    """``[B, Hq, 1, Dv]``."""
    lse: Tensor
    """fp32 ``[B, Hq, 1]``: natural log-sum-exp."""


def make_workspace(
    q: Tensor, v: Tensor, tree: Tree, stages: Sequence[Stage], programs: int, chunks: int, ranked: bool, keeps: bool
) -> Workspace:
    """Uninitialised memory for a call.

    Args:
        q: ``[B, Hq, 1, D]``.
        v: ``[B, Hkv, Lk, Dv]``.
        stages: the launches' sizes, from the top level down.
        programs: rows times KV heads times tiles of query heads.
        chunks: number of chunks of a page.
        ranked: whether nodes are chosen by other numbers than the log-weights.
        keeps: whether to store log-weights of sinks, tail and refined pages.
    """
    (batch, heads, _, _), (_, num_kv_heads, _, value_dim), last = q.shape, v.shape, stages[-1]
    new, number = {"device": q.device}, {"dtype": torch.float32, "device": q.device}
    raw = last.begin + last.padded
    of_chunks = raw + triton.cdiv(tree.rows.width, 16) * 16
    places = triton.cdiv(of_chunks + last.k * chunks, 16) * 16 if keeps else raw
    weights = torch.empty(batch, heads, places, **number)
    ranks = torch.empty_like(weights) if ranked else weights
    gone, visits = torch.empty(batch, num_kv_heads, raw, dtype=torch.int32, **new), []
    for stage in stages:
        chosen = torch.empty(batch, num_kv_heads, stage.k, dtype=torch.int64, **new)
        picked = torch.empty(batch, num_kv_heads, dtype=torch.int32, **new)
        pages = torch.empty_like(chosen) if visits else chosen
        selection = Selection(chosen, pages, picked, gone[:, :, stage.begin : stage.begin + stage.padded])
        count, links = tree.rows.numbers[2 + len(tree.levels) + stage.level], ()
        if visits:
            above = visits[-1].selection
            count, links = above.picked, (tree.branch(stage.level + 1), above)
        visits.append(Visit(stage, weights[:, :, stage.begin :], ranks[:, :, stage.begin :], selection, count, *links))
    parts = last.before + last.attending
    return Workspace(
        weights=weights,
        of_raw=weights[:, :, raw:] if keeps else None,
        of_chunks=weights[:, :, of_chunks:] if keeps else None,
        chunks=chunks,
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
