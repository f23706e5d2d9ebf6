"""Attention over summaries, few launches a step: Triton kernels of :func:`attend_summaries`."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from foveate.ops._dispatch import UnsupportedError
from foveate.ops._softcap_kernel import constant
from foveate.ops._tile import multiprocessors
from foveate.ops.attend.reference import page_slots
from foveate.ops.summaries.attend_kernel import attend_nodes
from foveate.ops.summaries.masses import Sums
from foveate.ops.summaries.masses_kernel import note, pooled
from foveate.ops.summaries.plan import (
    FEW_HEADS,
    Stage,
    Work,
    mending_options,
    merge_at_once,
    merge_last,
    page_block,
    tile_for,
    weighing_options,
)
from foveate.ops.summaries.reference import WEIGHT_SPREAD, Covered, Looked, Refinement
from foveate.ops.summaries.replace_kernel import mend_nodes
from foveate.ops.summaries.score_kernel import score_nodes
from foveate.ops.summaries.select_kernel import choose_nodes
from foveate.ops.summaries.tree import Level, Tree

_LARGEST = 256
"""The largest head dim."""
_ANEW = 32
"""The most nodes that are attended to anew at a time."""
_RANKED = 64
"""Ranks of nodes that a thread reads at once."""
_RULES = {"top_k": 0, "threshold": 1, "top_p": 2}
_SCORES = {"summary": 0, "spread": 1, "box": 2}
_BIASES = {"none": 0, "log": 1, "entropy": 2, "spread": 3}


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

    Two launches for one level of which few pages are refined: the first weighs summaries and attends to them all, to
    sinks and to the tail, each part of them by itself, and leaves bounds of what blocks of them may weigh; in the
    second, which is started while the first still runs, every program makes some dims of the output: it merges the
    parts, finds out which pages are refined, takes their summaries out again and attends to their keys. Where many are
    refined, or there are very many, or the layer chooses, a launch between them chooses; if many, summaries' values are
    read behind it, and the last program of a row to be ready merges (FlashDecoding, Dao et al. 2023). Two or three
    launches more for each further level, and one for the running sums of each.

    What rows hold is read from ``tree.rows.numbers`` on the device; ``places``, ``width`` and ``most`` say how much
    room there is, so that a captured step can be replayed when there is more. Repeats are equal bit for bit, and fp32
    is multiplied in full precision. Keys and summaries that are not read may hold anything.
    """
    _check(q, k, v, tree, how)
    if sums is not None and any(x is not None and x.dtype != torch.float32 for x in sums[1:]):
        raise UnsupportedError("running sums in other dtypes than float32")
    if sums is not None and any(x is not None and x.stride(2) != 1 and x.shape[2] > 1 for x in sums[1:]):
        raise UnsupportedError("running sums that are not next to each other")
    return Step(q, k, v, tree, how, scaling, softcap, need_masses, sums).run(need_lse)


def _check(q: Tensor, k: Tensor, v: Tensor, tree: Tree, how: Refinement) -> None:
    (batch, num_heads, length, dim), (_, num_kv_heads, number, value_dim) = q.shape, v.shape
    if how.rule not in _RULES or how.score not in _SCORES:
        raise UnsupportedError(f"refinement by bounds ({how.rule}, {how.score})")
    vectors = [x for of in tree.levels for x in of.nodes[:3] if x is not None]
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32) or any(x.dtype != q.dtype for x in (k, v)):
        raise UnsupportedError(f"queries in {q.dtype} with keys in {k.dtype} and values in {v.dtype}")
    if any(x.dtype != q.dtype for x in vectors):
        raise UnsupportedError(f"summaries in other dtypes than {q.dtype}")
    if max(dim, value_dim) > _LARGEST:
        raise UnsupportedError(f"head dims above {_LARGEST}")
    if length != 1 or num_heads % num_kv_heads or k.shape != (batch, num_kv_heads, number, dim):
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip("qkv", (q, k, v)))
        raise ValueError(f"shapes do not fit one query a row: {shapes}")


class Step:
    """One call."""

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
        self.parts = triton.cdiv(self.group, self.tile.block_m)
        self.programs = self.batch * self.num_kv_heads * self.parts
        self.chunks = triton.cdiv(tree.width, self.block_w)
        self.keeps = 1 if need_masses else 2 if sums is not None and sums.recent is not None else 0
        self.kept = tree.width if need_masses else self.chunks
        """Which log-weights of tokens of refined pages are kept, see :func:`refined_tokens`, and how many of a page."""
        self.block_dv = max(16, triton.next_power_of_2(self.value_dim))
        if how.mass == "preserve" and tree.width > self.tile.block_n:
            raise UnsupportedError(f"pages of more than {self.tile.block_n} tokens under mass=preserve")
        size = q.element_size()
        work = Work(self.tile, self.programs, self.group, self.value_dim, size, multiprocessors(q.device))
        self.raw_splits, self.stages = work.raw_splits(tree), work.stages(tree, how)
        self._make_room()

    def _make_room(self) -> None:
        batch, heads, new, last = self.batch, self.num_heads, {"device": self.q.device}, self.stages[-1]
        self.raw = last.begin + last.padded
        self.tokens = self.raw + triton.cdiv(self.tree.rows.width, 16) * 16
        places = self.tokens + last.k * self.kept * (self.keeps > 0) if self.keeps_raw else self.raw
        self.places = triton.cdiv(places, 16) * 16
        self.weights = torch.empty(batch, heads, self.places, dtype=torch.float32, **new)
        gone = torch.empty(batch, self.sets, self.raw, dtype=torch.int32, **new)
        for stage in self.stages:
            stage.chosen = torch.empty(batch, self.sets, stage.k, dtype=torch.int64, **new)
            stage.pages = stage.chosen if stage is self.stages[0] else torch.empty_like(stage.chosen)
            stage.picked = torch.empty(batch, self.sets, dtype=torch.int32, **new)
            stage.gone = gone[:, :, stage.begin : stage.begin + stage.padded]
        self.gone = gone
        self.arrived = torch.empty(self.programs, dtype=torch.int32, **new)
        self.read = torch.empty(batch, self.num_kv_heads, dtype=torch.float32, **new)
        self.refined = torch.empty_like(self.read)
        parts = last.before + last.parts
        self.found = torch.empty(parts, batch, heads, self.value_dim, dtype=torch.float32, **new)
        self.found_lse = torch.empty(parts, batch, heads, dtype=torch.float32, **new)
        self.out = self.q.new_empty(batch, heads, 1, self.value_dim)
        self.lse = torch.empty(batch, heads, 1, dtype=torch.float32, **new)

    def run(self, need_lse: bool) -> Covered:
        """All launches."""
        above, looked, capped = None, [], 0
        for stage in self.stages:
            *ranks, bounds = self._score(stage, above)
            if not stage.few:
                capped = capped + self._choose(stage, above, *ranks)
            if stage.mends:
                self._mend(stage, above, *ranks, bounds)
            else:
                self._attend(stage, above)
            if self.need_masses:
                looked.append(self._looked(stage, above))
            above = stage
        masses = pooled(self) if self.need_masses else ()
        if self.sums is not None:
            note(self, self.sums)
        return Covered(self.out, self.lse if need_lse else None, masses, tuple(looked), self.read, self.refined, capped)

    def _looked(self, stage: Stage, above: Stage | None) -> Looked:
        index, all_chosen = None, self.tree.rows.start is not None and self.how.rule == "top_k"
        if above is not None:
            index = page_slots(above.pages, self.tree.branch(above.level), complete=all_chosen).flatten(-2)
            index = index.expand(-1, self.num_kv_heads, -1)
        complete = all_chosen or (above is None and self.tree.rows.start is not None)
        return Looked(stage.level, index, complete, stage.chosen.expand(-1, self.num_kv_heads, -1), all_chosen)

    def count(self, stage: Stage, above: Stage | None) -> tuple[Tensor, int, int]:
        """How many nodes there are, or of how many the children, with its strides by row and head."""
        if above is None:
            return self.tree.rows.numbers[2 + len(self.tree.levels) + stage.level], 1, 0
        return above.picked, *self.strides(above.picked)

    def strides(self, x: Tensor) -> tuple[int, int]:
        """Of a row and of a KV head, which are alike where the layer chooses."""
        return x.stride(0), x.stride(1) if self.sets > 1 else 0

    @property
    def _dims(self) -> dict[str, int]:
        return {
            "DIM": self.dim,
            "VALUE_DIM": self.value_dim,
            "BLOCK_D": max(16, triton.next_power_of_2(self.dim)),
            "BLOCK_DV": self.block_dv,
            "BLOCK_M": self.tile.block_m,
            "BLOCK_N": self.tile.block_n,
        }

    def _score(self, stage: Stage, above: Stage | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Weighs nodes; returns the ranks, the log-sum-exps of each program's, and bounds, where these are needed."""
        of, how, q, raw = self.tree.levels[stage.level], self.how, self.q, above is None
        weights = self.weights[:, :, stage.begin :]
        rank = weights
        if how.score != "summary":
            rank = q.new_empty(self.batch, self.num_heads, stage.padded, dtype=torch.float32)
        rank_lse = None
        if not stage.few or how.score != "summary":  # else it is that of what is attended to
            rank_lse = q.new_empty(self.batch, self.num_heads, stage.scoring, dtype=torch.float32)
        blocks, bounds, recent, recent_strides = triton.cdiv(stage.width, self.tile.block_n), None, None, (0, 0, 0)
        if stage.few and blocks > stage.at_once:
            bounds = torch.empty(self.programs, 2 * self.group + 2, blocks, dtype=torch.float32, device=q.device)
            recent, recent_strides = self._recent(of)
        count, *count_strides = self.count(stage, above)
        listed = (None, None, None) if raw else (above.pages, above.chosen, self.weights[:, :, above.begin :])
        nodes, spread, entropy = of.nodes.k, of.nodes.spread, of.nodes.entropy
        read = [self.dim] * (1 + (spread is not None)) + [self.value_dim] * stage.mends
        of_node = sum(max(16, triton.next_power_of_2(dim)) for dim in read)
        score_nodes[self.programs, stage.scoring + (self.raw_splits if raw else 0)](
            q,
            self.k,
            self.v,
            nodes,
            of.nodes.v,
            spread,
            of.tokens,
            entropy,
            self.tree.rows.numbers,
            count,
            *listed,
            weights,
            rank,
            rank_lse,
            recent,
            bounds,
            self.weights[:, :, self.raw :] if self.keeps_raw else None,
            self.found,
            self.found_lse,
            self.arrived,
            self.read,
            *(q.stride(axis) for axis in (0, 1, 3)),
            *self.k.stride(),
            *self.v.stride(),
            *nodes.stride(),
            *of.nodes.v.stride(),
            *((0,) * 4 if spread is None else spread.stride()),
            *((0,) * 3 if of.tokens is None else of.tokens.stride()),
            *((0,) * 3 if entropy is None else entropy.stride()),
            *count_strides,
            *((0, 0) if raw else self.strides(above.pages)),
            *recent_strides,
            self.batch,
            self.num_kv_heads,
            self.group,
            self.parts,
            stage.scoring,
            self.raw_splits,
            stage.before,
            stage.per,
            self.tree.sinks,
            self.places,
            rank.stride(1),
            self.places,
            0 if bounds is None else bounds.shape[2],
            self._first(stage),
            self.scaling,
            math.log(of.size),
            of.reads,
            WEIGHT_SPREAD,
            BRANCH=0 if raw else self.tree.branch(above.level),
            RAW=raw,
            ATTENDS=stage.mends,
            RANK_LSE=rank_lse is not None,
            BOUNDS=bounds is not None,
            RECENT=recent is not None,
            KEEPS_RAW=self.keeps_raw,
            PRESERVE=how.mass == "preserve",
            BIAS=_BIASES[how.bias],
            SCORE=_SCORES[how.score],
            SIZED=of.tokens is not None,
            LARGEST=torch.finfo(q.dtype).max,
            SOFTCAP=self.softcap,
            SIGNALS=self._started_early(stage),
            **self._dims,
            **weighing_options(self.tile, q.dtype, of_node, self.capability),
        )
        return rank, rank_lse, bounds

    def _started_early(self, stage: Stage) -> bool:
        """Whether what is behind the weighing may be started while that still runs (programmatic dependent launch)."""
        return stage.few and self.capability >= 9

    def _first(self, stage: Stage) -> int:
        """How many nodes of a level are always refined."""
        return -(-self.how.first * self.tree.levels[0].size // self.tree.levels[stage.level].size)

    def _chosen_by(self, stage: Stage, above: Stage | None) -> dict[str, Any]:
        """Arguments that say by what nodes of a level are chosen."""
        return {
            "first": self._first(stage),
            "prior": self.how.prior,
            "BRANCH": 0 if above is None else self.tree.branch(above.level),
            "PRIOR": self.how.prior > 0,
        }

    def _recent(self, of: Level) -> tuple[Tensor | None, tuple[int, int, int]]:
        return (None, (0, 0, 0)) if not self.how.prior else (of.recent, of.recent.stride())

    def _choose(self, stage: Stage, above: Stage | None, rank: Tensor, rank_lse: Tensor) -> Tensor | int:
        """Which nodes are refined; returns how many selections were cut short."""
        how, levels = self.how, self.tree.levels
        count, *count_strides = self.count(stage, above)
        recent, recent_strides = self._recent(levels[stage.level])
        capped = torch.empty_like(stage.picked) if how.rule == "top_p" else None
        held = max(256, triton.next_power_of_2(stage.padded))
        warps = 4 if held <= 1024 else 8 if held <= 4096 else 16
        choose_nodes[(self.batch * self.sets,)](
            rank,
            rank_lse,
            self.found_lse,
            recent,
            count,
            self.tree.rows.numbers[2 + stage.level],
            None if above is None else above.pages,
            stage.chosen,
            stage.pages,
            stage.picked,
            stage.gone,
            capped,
            *recent_strides,
            *count_strides,
            *((0, 0) if above is None else self.strides(above.pages)),
            self.batch * self.num_heads,
            self.num_kv_heads,
            self.group,
            stage.scoring,
            stage.before,
            rank.stride(1),
            self.raw,
            stage.padded,
            stage.width,
            k=stage.k,
            limit=how.limit / (len(levels) if how.rule == "top_p" else 1),
            RULE=_RULES[how.rule],
            LAYER=how.pool == "layer",
            SPLITS=triton.next_power_of_2(stage.scoring),
            OTHERS=triton.next_power_of_2(stage.before),
            HELD=held,
            GROUP=self.group if self.group <= FEW_HEADS and how.pool == "kv_head" else 0,
            AT_ONCE=warps * 32 * _RANKED,
            num_warps=warps,
            **self._chosen_by(stage, above),
        )
        return 0 if capped is None else capped.sum() * (self.num_kv_heads // self.sets)

    def _attend(self, stage: Stage, above: Stage | None) -> None:
        """Attends to what is not refined of a level and, of the last one, to the keys of what is; and merges."""
        tree, of = self.tree, self.tree.levels[stage.level]
        count, *count_strides = self.count(stage, above)
        attend_nodes[self.programs, stage.attending](
            self.q,
            self.k,
            self.v,
            of.nodes.v,
            count,
            None if above is None else above.pages,
            stage.chosen,
            stage.pages,
            stage.picked,
            stage.gone,
            *self._found(stage),
            self.arrived,
            *self._output,
            *self._strides_of_vectors(of),
            *count_strides,
            *((0, 0) if above is None else self.strides(above.pages)),
            *self._strides_of_chosen(stage),
            self.batch,
            self.num_kv_heads,
            self.group,
            self.parts,
            stage.attending,
            stage.before,
            tree.sinks,
            self.places,
            tree.width,
            scaling=self.scaling,
            BRANCH=0 if above is None else tree.branch(above.level),
            LAST=stage is self.stages[-1],
            AT_ONCE=merge_last(self.tile, self.block_dv, stage.before + stage.attending),
            **self._pages_read(),
            **self._dims,
            **self.tile.options,
        )

    def _mend(
        self, stage: Stage, above: Stage | None, rank: Tensor, rank_lse: Tensor | None, bounds: Tensor | None
    ) -> None:
        """Puts right what is refined in attention to everything, and merges."""
        tree, of = self.tree, self.tree.levels[stage.level]
        count, *count_strides = self.count(stage, above)
        recent, recent_strides = self._recent(of)
        blocks = triton.next_power_of_2(max(1, triton.cdiv(stage.width, self.tile.block_n)))
        block_s = max(16, triton.next_power_of_2(triton.cdiv(self.value_dim, stage.attending)))
        waits, ranked = self._started_early(stage), stage.few and self.how.score != "summary"
        mend_nodes[self.programs, stage.attending](
            self.q,
            self.k,
            self.v,
            of.nodes.v,
            count,
            None if above is None else above.pages,
            tree.rows.numbers[2 + stage.level],
            recent,
            rank,
            rank_lse,
            bounds,
            stage.chosen,
            stage.pages,
            stage.picked,
            stage.gone,
            *self._found(stage),
            *self._output,
            *self._strides_of_vectors(of),
            *count_strides,
            *((0, 0) if above is None else self.strides(above.pages)),
            *recent_strides,
            *self._strides_of_chosen(stage),
            self.batch,
            self.num_kv_heads,
            self.group,
            self.parts,
            stage.scoring,
            stage.before,
            stage.per,
            stage.k,
            tree.sinks,
            self.places,
            rank.stride(1),
            0 if bounds is None else bounds.shape[2],
            stage.padded,
            tree.width,
            scaling=self.scaling,
            FEW=max(1, stage.k) if stage.few else 0,
            RANKED=ranked,
            GROUP=self.group if stage.few else 1,
            ROOM=max(2, triton.next_power_of_2(stage.k)),
            BLOCKS=blocks if stage.few else 1,
            BLOCKS_AT_ONCE=stage.at_once if stage.few else 1,
            SPLITS=triton.next_power_of_2(stage.scoring) if ranked else 1,
            OTHERS=triton.next_power_of_2(stage.before) if ranked else 1,
            AT_ONCE=merge_at_once(self.tile, block_s),
            BLOCK_S=block_s,
            BLOCK_R=min(_ANEW, self.tile.block_n),
            **self._pages_read(),
            **self._chosen_by(stage, above),
            **{name: size for name, size in self._dims.items() if name != "BLOCK_DV"},
            WAITS=waits,
            **mending_options(self.tile, triton.next_power_of_2(self.group) * blocks if stage.few else 0, waits),
        )

    def _found(self, stage: Stage) -> tuple[Tensor | None, ...]:
        """What a launch that attends reads and writes: where pages end, log-weights, parts."""
        tokens = self.weights[:, :, self.tokens :] if self.keeps else None
        return self.tree.page_end, self.weights[:, :, stage.begin :], tokens, self.found, self.found_lse

    @property
    def _output(self) -> tuple[Tensor, ...]:
        """Results and counts."""
        return self.out, self.lse, self.read, self.refined

    def _strides_of_vectors(self, of: Level) -> tuple[int, ...]:
        """Of queries, keys, values and the values of summaries."""
        queries = (self.q.stride(axis) for axis in (0, 1, 3))
        return *queries, *self.k.stride(), *self.v.stride(), *of.nodes.v.stride()

    def _strides_of_chosen(self, stage: Stage) -> tuple[int, ...]:
        """Of what says which nodes are refined, and where pages end."""
        end = self.tree.page_end
        chosen = (x for one in (stage.chosen, stage.picked, stage.gone) for x in self.strides(one))
        return *chosen, *((0, 0, 0) if end is None else end.stride())

    def _pages_read(self) -> dict[str, Any]:
        """Constants of a launch that attends to refined pages."""
        tree = self.tree
        return {
            "WIDTH": tree.width if tree.page_end is None else 0,
            "PRESERVE": self.how.mass == "preserve",
            "KEEPS": self.keeps,
            "SOFTCAP": self.softcap,
            "BLOCK_W": self.block_w,
            "CHUNKS": self.chunks,
        }
