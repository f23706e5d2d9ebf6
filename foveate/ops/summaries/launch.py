"""The host side of :func:`attend_summaries`' kernels: the launches that a call makes, and their arguments."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from foveate.ops._math import fold_group
from foveate.ops.compress.records import Records
from foveate.ops.dispatch import UnsupportedError
from foveate.ops.gpu.block_table import FLOATS
from foveate.ops.gpu.softcap import constant
from foveate.ops.gpu.tiles import capability, multiprocessors, padded
from foveate.ops.kv import KV
from foveate.ops.logits import Logits
from foveate.ops.score import page_lse
from foveate.ops.summaries.attend_kernel import attend_nodes
from foveate.ops.summaries.masses_kernel import note
from foveate.ops.summaries.plan import chunks_of, merge_last, scoring_options, stages, tile_for
from foveate.ops.summaries.score_kernel import score_nodes
from foveate.ops.summaries.select_kernel import select_nodes
from foveate.ops.summaries.tree import Level, Tree
from foveate.ops.summaries.types import Covered, Refinement, Sums
from foveate.ops.summaries.workspace import Visit, make_workspace

_LARGEST = 256
"""The largest head dim of keys and values."""
_OF_KERNELS = {"pool": ("kv_head",), "score": ("summary", "spread", "lowrank"), "bias": ("log",), "mass": ("exact",)}
"""The rules that kernels support; the reference alone supports the other options of the paper."""
_RANKED = 64
"""Number of ranks that a thread of ``select_nodes`` reads at once."""


def attend_summaries(q, kv, tree, how, *, logits, need_lse=False, sums=None):
    """See :func:`foveate.ops.summaries.reference.attend_summaries`.

    On each level ``score_nodes`` scores the visited nodes; the launch of the top level also attends to sinks and tail.
    ``select_nodes`` selects the nodes to refine. ``attend_nodes`` reads the values of the other nodes and, on the last
    level, the keys of refined pages; the last program to finish merges all parts (FlashDecoding, Dao et al. 2023). With
    low-rank summaries a launch before these ranks the nodes. Running averages take one more launch a level.

    The kernels read ``tree.rows.numbers`` on the device; ``places``, ``width`` and ``most`` are capacities, so a
    captured step can be replayed with larger numbers. Results are deterministic, and fp32 is multiplied in full
    precision. Keys and summaries that are not read may hold anything.

    Raises:
        UnsupportedError: for calls that only the reference supports, to which the dispatcher then falls back.
    """
    _check_supported(q, kv, tree, how, sums)
    return SummariesLaunch(q, kv, tree, how, logits, sums).run(need_lse)


class SummariesLaunch:
    """The launches of one call of :func:`attend_summaries`, with the arguments of that call."""

    def __init__(self, q: Tensor, kv: KV, tree: Tree, how: Refinement, logits: Logits, sums: Sums | None):
        self.q, self.k, self.v, self.tree, self.how, self.logits, self.sums = q, kv.k, kv.v, tree, how, logits, sums
        (batch, num_heads, _, dim), (_, self.num_kv_heads, _, value_dim) = q.shape, self.v.shape
        self.group = num_heads // self.num_kv_heads
        self.capability = capability(q.device)
        self.tile = tile_for(q.dtype, max(dim, value_dim), self.group, self.capability)
        self.programs = batch * self.num_kv_heads * triton.cdiv(self.group, self.tile.block_m)
        self.stages = stages(tree, self.tile, self.programs, multiprocessors(q.device))
        chunks, ranked, keeps = chunks_of(tree.width, self.tile), how.score != "summary", sums is not None
        self.space = make_workspace(q, self.v, tree, self.stages, self.programs, chunks, ranked, keeps)
        self.sizes = {
            **{"GROUP": self.group, "SOFTCAP": constant(logits.softcap), "DIM": dim, "VALUE_DIM": value_dim},
            **{"BLOCK_M": self.tile.block_m, "BLOCK_N": self.tile.block_n},
        }
        """Constants of the kernels that read keys."""

    def run(self, need_lse: bool) -> Covered:
        """Make the launches and return the results."""
        space = self.space
        for visit in space.visits:
            self._select(visit, self._score(visit))
            self._attend(visit)
        if self.sums is not None:
            note(space, self.tree, self.sums)
        return Covered(space.out, space.lse, space.read, space.refined).beside(self.logits.sinks, need_lse)

    def _score(self, visit: Visit) -> Tensor:
        """Score the nodes of a level; returns the log-sum-exps of each program's ranks, fp32 ``[B, Hq, splits]``."""
        stage, space, q = visit.stage, self.space, self.q
        level, raw_splits = self.tree.levels[stage.level], 0 if visit.branch else stage.before
        rank_lse = q.new_empty(*q.shape[:2], stage.scoring, dtype=torch.float32)
        estimate = self._low_rank_ranks(level, visit) if self.how.score == "lowrank" else None
        nodes = level.nodes
        of_node = padded(q.shape[3]) * (1 + (nodes.spread is not None))
        score_nodes[self.programs, stage.scoring + raw_splits](
            q, self.k, self.v, nodes.k, nodes.spread, estimate, self.tree.rows.numbers, visit.count, visit.listed,
            visit.weights, visit.ranks, rank_lse, space.of_raw, space.part_out, space.part_lse, space.arrived,
            space.read,
            self._q_strides, self.k.stride(), self.v.stride(), nodes.k.stride(),
            (0, 0, 0, 0) if nodes.spread is None else nodes.spread.stride(),
            *self._places(visit),
            0 if estimate is None else estimate.stride(1),
            raw_splits, self.tree.sinks, self.logits.scaling, math.log(level.size), level.reads,
            BRANCH=visit.branch, **self.sizes, **scoring_options(self.tile, q.dtype, of_node, self.capability),
        )  # fmt: skip
        return rank_lse

    def _low_rank_ranks(self, level: Level, visit: Visit) -> Tensor:
        """The log-sum-exp of each visited node's keys by its low-rank summary; see :func:`foveate.ops.score.page_lse`.

        Returns fp32 ``[B, Hq, C]`` with equal strides between rows of C places. Entries at unused places are undefined.
        """
        rows, how = fold_group(self.q, self.num_kv_heads), {"logits": self.logits}
        if visit.above is None:
            records = Records(level.records[:, :, : visit.stage.width], level.record, lengths=visit.count)
        else:  # read where they are
            records = Records(level.records, level.record, lengths=visit.count * visit.branch)
            how |= {"pages": visit.listed, "branch": visit.branch}
        return page_lse(rows, records, **how).flatten(1, 2)

    def _select(self, visit: Visit, rank_lse: Tensor) -> None:
        """Select the nodes to refine."""
        stage, space, how = visit.stage, self.space, self.how
        recent = self.tree.levels[stage.level].recent if how.prior else None
        held = max(256, triton.next_power_of_2(stage.padded))
        warps = 4 if held <= 1024 else 8 if held <= 4096 else 16
        select_nodes[(len(self.q) * self.num_kv_heads,)](
            visit.ranks, rank_lse, space.part_lse, recent, visit.count, self.tree.rows.numbers[2 + stage.level],
            visit.listed, *visit.selection,
            (0, 0, 0) if recent is None else recent.stride(),
            *self._places(visit), space.gone.shape[2], stage.scoring, stage.before, stage.width, stage.k, how.prior,
            BRANCH=visit.branch, GROUP=self.group, SPLITS=triton.next_power_of_2(stage.scoring),
            OTHERS=triton.next_power_of_2(stage.before), HELD=held, AT_ONCE=warps * 32 * _RANKED, num_warps=warps,
        )  # fmt: skip

    def _attend(self, visit: Visit) -> None:
        """Attend to nodes that are not refined. The last level also attends to the keys of refined pages, and
        merges."""
        stage, space, selection = visit.stage, self.space, visit.selection
        values = self.tree.levels[stage.level].nodes.v
        attend_nodes[self.programs, stage.attending](
            self.q, self.k, self.v, values, visit.count, visit.listed, *selection[1:], visit.weights, space.of_chunks,
            space.part_out, space.part_lse, space.arrived, space.out, space.lse, space.read, space.refined,
            self._q_strides, self.k.stride(), self.v.stride(), values.stride(),
            *self._places(visit), space.gone.shape[2], stage.k, stage.before, self.tree.sinks, self.logits.scaling,
            WIDTH=self.tree.width, BRANCH=visit.branch, LAST=stage is self.stages[-1],
            AT_ONCE=merge_last(self.tile, padded(self.v.shape[3]), stage.before + stage.attending), **self.sizes,
            **self.tile.options,
        )  # fmt: skip

    @property
    def _q_strides(self) -> tuple[int, int, int]:
        """Strides of q by row, head and dim."""
        return self.q.stride(0), self.q.stride(1), self.q.stride(3)

    def _places(self, visit: Visit) -> tuple[int, int, int]:
        """``(num_kv_heads, places, list_places)``, see ``score_kernel``."""
        return self.num_kv_heads, self.space.weights.shape[2], 0 if visit.above is None else visit.listed.shape[2]


def _check_supported(q: Tensor, kv: KV, tree: Tree, how: Refinement, sums: Sums | None) -> None:
    """Raise unless the kernels support this call.

    Raises:
        UnsupportedError: for calls that only the reference supports.
    """
    dim, value_dim = q.shape[3], kv.v.shape[3]
    for name, known in _OF_KERNELS.items():
        if getattr(how, name) not in known:
            raise UnsupportedError(f"{name}={getattr(how, name)} of summaries")
    vectors = [x for of in tree.levels for x in of.nodes[:3] if x is not None]
    if q.dtype not in FLOATS or not q.dtype == kv.k.dtype == kv.v.dtype:
        raise UnsupportedError(f"queries in {q.dtype} with keys in {kv.k.dtype} and values in {kv.v.dtype}")
    if any(x.dtype != q.dtype for x in vectors):
        raise UnsupportedError(f"summaries in other dtypes than {q.dtype}")
    if max(dim, value_dim) > _LARGEST:
        raise UnsupportedError(f"head dims above {_LARGEST}")
    if sums is not None and (sums.total is not None or sums.recent is None):
        raise UnsupportedError("running totals of the attention to tokens")
    if sums is not None and (sums.recent.dtype != torch.float32 or sums.recent.stride(2) != 1 < sums.recent.shape[2]):
        raise UnsupportedError("running averages that are not fp32 and contiguous along the slots")
