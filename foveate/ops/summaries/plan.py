"""How the launches of :func:`attend_summaries` are cut into programs, and their compile options.

The grid's first axis is rows times KV heads times tiles of query heads; its second splits the nodes (or, when refined
nodes are replaced, the output dims) of each among programs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

from foveate.ops._dispatch import UnsupportedError
from foveate.ops.gpu.tiles import Tile, group_tile, split
from foveate.ops.summaries.tree import Tree
from foveate.ops.summaries.types import Refinement

_HEADS_DIMS = 2048
"""The most output values of a program of ``replace_refined``: query heads times dims."""
_LONGEST_PART = 16
"""The most blocks of nodes in one part of the output."""
_SCORING, _ATTENDING = 3, 2
"""Resident programs per multiprocessor of ``score_nodes`` and of ``attend_nodes``."""
_MERGING = 1 / 4
"""Cost of merging a part of the output, in units of reading a block of nodes."""
_SLICES = 2
"""The most programs per multiprocessor into which ``replace_refined`` splits the output dims."""
_FEW = 8
"""Up to this many refined pages, ``score_nodes`` attends to all nodes, and ``replace_refined`` replaces the refined."""
_FEW_OF = 16384
"""Up to this many blocks of nodes times heads, each program of ``replace_refined`` makes the selection by itself, by
bounds on the masses in each block, which saves a launch."""
_HELD = 32768
"""The most nodes from which ``select_nodes`` selects."""
FEW_HEADS = 16
"""In groups of at most this many query heads, a program computes the masses of all heads together."""
_AT_ONCE, _AT_ONCE_OF = 16, 64
"""A selection by bounds reads at most ``_AT_ONCE`` blocks of nodes at a time, and at most ``_AT_ONCE_OF`` blocks times
heads."""
_NO_BOUNDS = 8192
"""Up to this many nodes times heads, all masses are compared at once and no bounds are written."""
_SHARED = 96 << 10
"""Bytes of shared memory for a program's loads in flight: two programs fit on a multiprocessor, or three that use three
quarters of it."""


def tile_for(dtype: torch.dtype, dim: int, group: int, capability: int) -> Tile:
    """Query heads and nodes of a program, see :func:`group_tile`; ``dim`` is the larger of the head dims."""
    return group_tile(dtype, dim, group, capability, least_heads=1, wide_warps=8)


def scoring_options(tile: Tile, dtype: torch.dtype, of_node: int, capability: int) -> dict[str, int | None]:
    """Compile options of ``score_nodes``, with the pipeline stages that fit if it loads ``of_node`` numbers per
    node."""
    if dtype == torch.float32:
        return tile.options | {"num_warps": 8}
    blocks = _SHARED // (1 if capability >= 9 else 2) // (tile.block_n * of_node * dtype.itemsize)
    return tile.options | {"num_stages": max(2, min(tile.num_stages, blocks))}


def replacing_options(tile: Tile, bounds: int) -> dict[str, int | None]:
    """Compile options of ``replace_refined``.

    Args:
        bounds: bounds of masses by which it selects, blocks times heads; 0: it does not select.
    """
    many = tile.num_stages == 1 or tile.block_m >= 16 or bounds > 4096  # registers per thread; one stage means fp32
    return {"num_warps": max(tile.num_warps, 8 if many else 4), "num_stages": 1}


def merge_at_once(tile: Tile, dims: int) -> int:
    """How many parts a program of ``replace_refined`` merges at a time, ``dims`` output dims of each."""
    numbers = tile.num_warps * 32 * (16 if tile.block_m >= 16 else 32)
    return max(1, min(32, numbers // (tile.block_m * dims)))


def merge_last(tile: Tile, dims: int, parts: int) -> int:
    """How many of ``parts`` parts the last program of ``attend_nodes`` merges at a time, with all registers free."""
    numbers = tile.num_warps * 32 * (32 if tile.block_m >= 16 else 128)
    return max(1, min(32, triton.next_power_of_2(parts), numbers // (tile.block_m * dims)))


@functools.lru_cache(maxsize=1024)
def plan_parts(programs: int, blocks: int, cost: float, room: int) -> tuple[int, int]:
    """How ``score_nodes`` cuts nodes into parts of the output, by an estimate of its time, see :func:`split`.

    Args:
        programs: programs if the nodes were not split.
        blocks: blocks of nodes.
        cost: writing and reading a part, in units of reading a block of values.
        room: programs that run at a time.

    Returns:
        ``(per, splits)``: blocks in a part, and programs that share the nodes; each makes whole parts.
    """

    def time(per: int) -> float:
        parts = -(-blocks // per)
        splits, each = split(programs, parts, room)
        return -(-programs * splits // room) * (each * per + 1) + parts * cost * programs / room

    per = min(range(1, min(blocks, _LONGEST_PART) + 1), key=time, default=1)
    return per, split(programs, -(-blocks // per), room)[0]


def slice_dims(value_dim: int, programs: int, heads: int, room: int) -> int:
    """Output dims of a program of ``replace_refined``: a power of two that divides ``value_dim``, or holds all of it.

    Fewer dims where there are too few programs to fill the GPU, or where the merged output of ``heads`` query heads
    would not fit into registers.
    """
    whole = dims = max(16, triton.next_power_of_2(value_dim))
    for fewer in (whole >> shift for shift in range(whole.bit_length() - 4)):
        if value_dim % fewer:
            continue
        if programs * (value_dim // fewer) > room and heads * dims <= _HEADS_DIMS:
            break
        dims = fewer
    return dims


@dataclass(frozen=True)
class Stage:
    """Sizes of the launches at one level of the tree: capacities, and how the work is split."""

    level: int
    width: int
    """Capacity for visited nodes."""
    k: int
    """Capacity for refined nodes."""
    begin: int
    """Offset of the level's places in the last dimension of :attr:`Workspace.weights`."""
    padded: int
    """``width``, rounded up to a multiple of 16."""
    scoring: int
    """Programs of ``score_nodes`` that share the nodes of a row and KV head."""
    attending: int
    """Programs of ``attend_nodes`` that share them, or of ``replace_refined`` that share the output dims."""
    before: int
    """Parts of the output that earlier launches have written."""
    parts: int
    """Parts that this stage adds."""
    replaces: bool
    """Whether ``score_nodes`` attends to all nodes and ``replace_refined`` then replaces the refined ones; otherwise
    ``attend_nodes`` attends to the others after the selection."""
    few: bool
    """Whether the programs of ``replace_refined`` also make the selection."""
    at_once: int
    """Blocks of nodes that they compare at a time in doing so."""
    per: int
    """Blocks of nodes in a part that ``score_nodes`` writes."""


@dataclass(frozen=True)
class Work:
    """The sizes of a call, from which its :class:`Stage` objects follow."""

    tile: Tile
    programs: int
    """Programs if nothing were split: rows times KV heads times tiles of query heads."""
    group: int
    """Query heads of a KV head."""
    value_dim: int
    itemsize: int
    """Bytes of an element of the keys."""
    multiprocessors: int

    def raw_splits(self, tree: Tree) -> int:
        """Programs that share sinks and tail of a row and KV head, in the launch that scores the top level."""
        blocks = triton.cdiv(tree.rows.width, self.tile.block_n)
        return max(1, min(blocks, _SCORING * self.multiprocessors // (2 * self.programs)))

    def stages(self, tree: Tree, how: Refinement) -> list[Stage]:
        """The stages of a call, from the top level down.

        Raises:
            UnsupportedError: for more than 32,768 nodes in a selection, or children of ``mass="preserve"`` whose number
                is not a power of two that fits into a block.
        """
        stages: list[Stage] = []
        width, begin, before = tree.rows.places, 0, self.raw_splits(tree)
        for level in reversed(range(len(tree.levels))):
            k = min(tree.rows.most[level], width)
            last = not k or not level
            stage = self._stage(tree, how, level, width, k, begin, before, last)
            stages.append(stage)
            begin, before = begin + stage.padded, before + stage.parts
            if last:
                break
            branch = tree.branch(level)
            if how.mass == "preserve" and (branch & (branch - 1) or branch > self.tile.block_n):
                raise UnsupportedError(f"{branch} children of a node under mass=preserve")
            width = k * branch
        return stages

    def _stage(
        self, tree: Tree, how: Refinement, level: int, width: int, k: int, begin: int, before: int, last: bool
    ) -> Stage:
        block, heads = self.tile.block_n, triton.next_power_of_2(self.group)
        blocks, padded = triton.cdiv(width, block), triton.cdiv(width, 16) * 16
        topmost = not begin
        raw_programs = self.programs * before if topmost else 0  # those that attend to sinks and tail
        scoring_room = _SCORING * self.multiprocessors
        room = max(scoring_room - raw_programs, scoring_room // 2)
        replaces = last and k <= _FEW
        few = replaces and self.group <= FEW_HEADS and how.pool == "kv_head" and how.rule == "top_k"
        at_once = triton.next_power_of_2(max(1, blocks))
        few = few and heads * at_once <= _FEW_OF
        if heads * at_once * block > _NO_BOUNDS:
            at_once = min(at_once, _AT_ONCE, max(1, _AT_ONCE_OF // heads))
        if not few and width > _HELD:
            raise UnsupportedError(f"more than {_HELD} nodes of a level")
        if replaces:
            cost = 8 * self.tile.block_m / (block * self.itemsize)
            per, scoring = plan_parts(self.programs, blocks, cost, room)
            parts, cut = triton.cdiv(blocks, per), _SLICES * self.multiprocessors
            attending = triton.cdiv(self.value_dim, slice_dims(self.value_dim, self.programs, self.tile.block_m, cut))
        else:
            block_w = page_block(tree.width, self.tile)
            tiles = triton.cdiv(k * triton.cdiv(tree.width, block_w) * block_w, block) if last else 0
            scoring, _ = split(self.programs, blocks, room)
            attending, _ = split(self.programs, blocks + tiles, _ATTENDING * self.multiprocessors, _MERGING)
            per, parts = 1, attending
        return Stage(level, width, k, begin, padded, scoring, attending, before, parts, replaces, few, at_once, per)


def page_block(width: int, tile: Tile) -> int:
    """Tokens of a page that a program reads at once, a power of two: the page, or a chunk of it."""
    return min(triton.next_power_of_2(width), tile.block_n)
