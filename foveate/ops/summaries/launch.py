"""The host side of :func:`attend_summaries`' kernels: which launches a call makes, and with what arguments."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from foveate.ops._dispatch import UnsupportedError
from foveate.ops.attend.gather import page_slots
from foveate.ops.gpu.softcap import constant
from foveate.ops.gpu.tiles import multiprocessors, padded
from foveate.ops.summaries.attend_kernel import attend_nodes
from foveate.ops.summaries.estimate import low_rank_ranks
from foveate.ops.summaries.masses_kernel import note, pooled
from foveate.ops.summaries.plan import (
    FEW_HEADS,
    Work,
    merge_last,
    page_block,
    scoring_options,
    tile_for,
)
from foveate.ops.summaries.score_kernel import score_nodes
from foveate.ops.summaries.select_kernel import select_nodes
from foveate.ops.summaries.support import BIASES, SCORES, check_supported
from foveate.ops.summaries.tree import Level, Tree
from foveate.ops.summaries.types import Covered, Refinement, Sums, VisitedLevel
from foveate.ops.summaries.workspace import Visit, make_workspace, strides_by_head

_RANKED = 64
"""Ranks that a thread of ``select_nodes`` reads at once."""


def attend_summaries(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tree: Tree,
    how: Refinement,
    *,
    scaling: float,
    softcap: float | None = None,
    need_lse: bool = False,
    need_masses: bool = False,
    sums: Sums | None = None,
) -> Covered:
    """See :func:`foveate.ops.summaries.reference.attend_summaries`.

    On each level ``score_nodes`` scores the visited nodes, at the top level beside attending to sinks and tail;
    ``select_nodes`` selects the nodes to refine; ``attend_nodes`` reads the values of the others and, on the last
    level, the keys of refined pages, and the last program to finish merges all parts (FlashDecoding, Dao et al. 2023).
    A launch before them ranks nodes by low-rank summaries, and running sums take one launch more a level.

    The kernels read ``tree.rows.numbers`` on the device; ``places``, ``width`` and ``most`` are capacities, so a
    captured step can be replayed with larger numbers. Results are deterministic, and fp32 is multiplied in full
    precision. Keys and summaries that are not read may hold anything.

    Raises:
        UnsupportedError: for calls that only the reference supports, to which the dispatcher then falls back.
        ValueError: for inconsistent shapes.
    """
    check_supported(q, k, v, tree, how, sums)
    return SummariesLaunch(q, k, v, tree, how, scaling, softcap, need_masses, sums).run(need_lse)


class SummariesLaunch:
    """The launches of one call of :func:`attend_summaries`, whose arguments it takes."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tree: Tree,
        how: Refinement,
        scaling: float,
        softcap: float | None,
        need_masses: bool,
        sums: Sums | None,
    ):
        self.q, self.k, self.v, self.tree, self.how, self.scaling = q, k, v, tree, how, scaling
        self.softcap = constant(softcap)
        self.need_masses, self.sums, self.keeps_raw = need_masses, sums, need_masses or sums is not None
        self.batch, self.num_heads, _, self.dim = q.shape
        self.num_kv_heads, self.value_dim = v.shape[1], v.shape[3]
        self.group = self.num_heads // self.num_kv_heads
        self.sets = 1 if how.pool == "layer" else self.num_kv_heads
        self.capability = torch.cuda.get_device_capability(q.device)[0] if q.is_cuda else 8
        self.tile = tile_for(q.dtype, max(self.dim, self.value_dim), self.group, self.capability)
        self.block_w = page_block(tree.width, self.tile)
        self.head_tiles = triton.cdiv(self.group, self.tile.block_m)
        """Programs that share the query heads of a KV head: the kernels' ``head_tiles``."""
        self.programs = self.batch * self.num_kv_heads * self.head_tiles
        self.chunks = triton.cdiv(tree.width, self.block_w)
        """Chunks of ``block_w`` tokens in a page."""
        self.keeps = 1 if need_masses else 2 if sums is not None and sums.recent is not None else 0
        """Which log-weights of refined pages are stored, see :func:`refined_tokens`: 0 none, 1 of tokens, 2 of
        chunks."""
        self.block_dv = padded(self.value_dim)
        if how.mass == "preserve" and tree.width > self.tile.block_n:
            raise UnsupportedError(f"pages of more than {self.tile.block_n} tokens under mass=preserve")
        work = Work(self.tile, self.programs, multiprocessors(q.device))
        self.raw_splits, self.stages = work.raw_splits(tree), work.stages(tree, how)
        kept, keeps = tree.width if need_masses else self.chunks, "raw" if self.keeps_raw else "nodes"
        keeps = "all" if self.keeps else keeps
        self.space = make_workspace(q, v, tree, self.stages, self.programs, self.sets, kept, keeps)

    def run(self, need_lse: bool) -> Covered:
        """Make the launches and return the results."""
        space, visited = self.space, []
        for visit in space.visits:
            self._select(visit, *self._score(visit))
            self._attend(visit)
            if self.need_masses:
                visited.append(self._visited(visit))
        masses = pooled(space, self.tree) if self.need_masses else ()
        if self.sums is not None:
            note(space, self.tree, self.sums)
        lse = space.lse if need_lse else None
        return Covered(space.out, lse, masses, tuple(visited), space.read, space.refined)

    def _visited(self, visit: Visit) -> VisitedLevel:
        index, complete = None, self.tree.rows.start is not None
        if visit.above is not None:
            index = page_slots(visit.above.pages, visit.branch, complete=complete).flatten(-2)
            index = index.expand(-1, self.num_kv_heads, -1)
        chosen = visit.selection.chosen.expand(-1, self.num_kv_heads, -1)
        return VisitedLevel(visit.stage.level, index, complete, chosen)

    @property
    def _dims(self) -> dict[str, int]:
        return self.tile.sizes(self.dim, self.value_dim)

    @property
    def _heads(self) -> tuple[int, int, int, int]:
        """``(batches, num_kv_heads, group, head_tiles)``."""
        return self.batch, self.num_kv_heads, self.group, self.head_tiles

    @property
    def _scores(self) -> dict[str, Any]:
        """Arguments of the launch that scores, the same on every level."""
        how = self.how
        return self._dims | {
            "scaling": self.scaling,
            "raw_splits": self.raw_splits,
            "sinks": self.tree.sinks,
            "PRESERVE": how.mass == "preserve",
            "BIAS": BIASES[how.bias],
            "SCORE": SCORES[how.score],
            "LARGEST": torch.finfo(self.q.dtype).max,
            "SOFTCAP": self.softcap,
        }

    def _score(self, visit: Visit) -> tuple[Tensor, Tensor]:
        """Score the nodes of a level; returns ``(rank, rank_lse)``, see :func:`score_nodes`."""
        stage, above, space = visit.stage, visit.above, self.space
        level, how, q, raw = self.tree.levels[stage.level], self.how, self.q, above is None
        rank = visit.weights
        if how.score != "summary":
            rank = q.new_empty(self.batch, self.num_heads, stage.padded, dtype=torch.float32)
        rank_lse = q.new_empty(self.batch, self.num_heads, stage.scoring, dtype=torch.float32)
        by_records = how.score == "lowrank"
        estimate = low_rank_ranks(q, level, visit, self.scaling, self.softcap or None) if by_records else None
        of_node = padded(self.dim) * (1 + (level.nodes.spread is not None))
        score_nodes[self.programs, stage.scoring + (self.raw_splits if raw else 0)](
            *self._vectors(level)[:3],
            *_fields(level),
            estimate,
            self.tree.rows.numbers,
            *visit.nodes,
            rank,
            rank_lse,
            space.of_raw if self.keeps_raw else None,
            *space.parts,
            space.arrived,
            space.read,
            *self._strides_of_vectors(level)[:3],
            *_strides_of_fields(level),
            *visit.strides,
            *self._heads,
            stage.scoring,
            space.places,
            rank.stride(1),
            0 if estimate is None else estimate.stride(1),
            log_size=math.log(level.size),
            reads=level.reads,
            BRANCH=visit.branch,
            **self._scores,
            **scoring_options(self.tile, q.dtype, of_node, self.capability),
        )
        return rank, rank_lse

    def _recent(self, level: Level) -> tuple[Tensor | None, tuple[int, int, int]]:
        """The recent attention to a level's nodes and its strides, if the rule uses it."""
        return (None, (0, 0, 0)) if not self.how.prior else (level.recent, level.recent.stride())

    def _select(self, visit: Visit, rank: Tensor, rank_lse: Tensor) -> None:
        """Select the nodes to refine."""
        stage, space, how = visit.stage, self.space, self.how
        recent, recent_strides = self._recent(self.tree.levels[stage.level])
        held = max(256, triton.next_power_of_2(stage.padded))
        warps = 4 if held <= 1024 else 8 if held <= 4096 else 16
        select_nodes[(self.batch * self.sets,)](
            rank,
            rank_lse,
            space.part_lse,
            recent,
            visit.count,
            self.tree.rows.numbers[2 + stage.level],
            visit.pages_above,
            *visit.selection,
            recent_strides,
            *visit.strides,
            self.batch * self.num_heads,
            self.num_kv_heads,
            self.group,
            stage.scoring,
            stage.before,
            rank.stride(1),
            space.raw,
            stage.padded,
            stage.width,
            k=stage.k,
            LAYER=how.pool == "layer",
            SPLITS=triton.next_power_of_2(stage.scoring),
            OTHERS=triton.next_power_of_2(stage.before),
            HELD=held,
            GROUP=self.group if self.group <= FEW_HEADS and how.pool == "kv_head" else 0,
            AT_ONCE=warps * 32 * _RANKED,
            num_warps=warps,
            prior=how.prior,
            BRANCH=visit.branch,
            PRIOR=how.prior > 0,
        )

    def _attend(self, visit: Visit) -> None:
        """Attend to nodes that are not refined; at the last level also to the keys of refined pages, and merge."""
        stage, space, level = visit.stage, self.space, self.tree.levels[visit.stage.level]
        attend_nodes[self.programs, stage.attending](
            *self._vectors(level),
            visit.count,
            visit.pages_above,
            *visit.selection,
            *self._parts(visit),
            space.arrived,
            *self._output,
            *self._strides_of_vectors(level),
            *self._strides_of_selection(visit),
            *self._heads,
            stage.attending,
            stage.before,
            space.places,
            BRANCH=visit.branch,
            LAST=stage is self.stages[-1],
            AT_ONCE=merge_last(self.tile, self.block_dv, stage.before + stage.attending),
            **self._pages_read(),
            **self._dims,
            **self.tile.options,
        )

    def _parts(self, visit: Visit) -> tuple[Tensor | None, ...]:
        """``(weights, tokens, part_out, part_lse)`` for a launch that attends."""
        tokens = self.space.of_tokens if self.keeps else None
        return visit.weights, tokens, *self.space.parts

    @property
    def _output(self) -> tuple[Tensor, ...]:
        """``(out, lse, read, refined)``."""
        return self.space.out, self.space.lse, self.space.read, self.space.refined

    def _vectors(self, level: Level) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values and the values of summaries."""
        return self.q, self.k, self.v, level.nodes.v

    def _strides_of_vectors(self, level: Level) -> tuple[tuple[int, ...], ...]:
        """Strides of :meth:`_vectors`."""
        q = self.q
        return (q.stride(0), q.stride(1), q.stride(3)), self.k.stride(), self.v.stride(), level.nodes.v.stride()

    def _strides_of_selection(self, visit: Visit) -> tuple[int | tuple[int, ...], ...]:
        """:attr:`Visit.strides`, and those of the tensors of a selection."""
        mine = visit.selection
        return *visit.strides, *strides_by_head(mine.chosen, mine.picked, mine.gone)

    def _pages_read(self) -> dict[str, Any]:
        """Arguments of a launch that attends to refined pages, the same on every level."""
        tree = self.tree
        return {
            "scaling": self.scaling,
            "sinks": tree.sinks,
            "WIDTH": tree.width,
            "PRESERVE": self.how.mass == "preserve",
            "KEEPS": self.keeps,
            "SOFTCAP": self.softcap,
            "BLOCK_W": self.block_w,
            "CHUNKS": self.chunks,
        }


def _fields(level: Level) -> tuple[Tensor | None, ...]:
    """Keys of summaries, the spread of the keys under them, and entropy."""
    return level.nodes.k, level.nodes.spread, level.nodes.entropy


def _strides_of_fields(level: Level) -> list[tuple[int, ...]]:
    """Strides of :func:`_fields`."""
    return [(0,) * axes if x is None else x.stride() for x, axes in zip(_fields(level), (4, 4, 3))]
