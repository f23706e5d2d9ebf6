"""How the launches of :func:`attend_summaries` are cut into programs, and their compile options."""

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
"""The most output values of a program that replaces nodes: query heads times dims."""
_LONGEST_PART = 16
"""The most blocks of nodes in a part of the output."""
_SCORING, _ATTENDING = 3, 2
"""Programs that run at a time on a multiprocessor: those that score nodes, and those that attend to them."""
_MERGING = 1 / 4
"""Cost of merging a part of the output, in blocks of nodes."""
_SLICES = 2
"""The most programs to a multiprocessor into which output dims are cut where nodes are replaced."""
_FEW = 8
"""With at most so many refined pages, all nodes are attended to as they are scored, and the refined ones replaced."""
_FEW_OF = 16384
"""With at most so many bounds of masses, one a block and head, every program that replaces nodes selects for itself,
which saves a launch."""
_HELD = 32768
"""The most nodes that a launch of its own selects from."""
FEW_HEADS = 16
"""Groups of at most so many query heads have the masses of all heads computed together."""
_AT_ONCE, _AT_ONCE_OF = 16, 64
"""Programs that select by bounds compare at most ``_AT_ONCE`` blocks of nodes at a time, and at most ``_AT_ONCE_OF``
blocks times heads."""
_NO_BOUNDS = 8192
"""With at most so many masses, heads times nodes, all are compared at once and no bounds are written."""
_SHARED = 96 << 10
"""Shared memory of a program's blocks in flight, bytes: two programs fit on a multiprocessor, or three that use three
quarters of it."""


def tile_for(dtype: torch.dtype, dim: int, group: int, capability: int) -> Tile:
    """Heads and nodes of a program for head dims of which ``dim`` is the larger, see :func:`group_tile`."""
    return group_tile(dtype, dim, group, capability, least_heads=1, wide_warps=8)


def scoring_options(tile: Tile, dtype: torch.dtype, of_node: int, capability: int) -> dict[str, int | None]:
    """Options of programs that score nodes and read ``of_node`` numbers of each: how many stages are in flight."""
    if dtype == torch.float32:
        return tile.options | {"num_warps": 8}
    blocks = _SHARED // (1 if capability >= 9 else 2) // (tile.block_n * of_node * dtype.itemsize)
    return tile.options | {"num_stages": max(2, min(tile.num_stages, blocks))}


def replacing_options(tile: Tile, bounds: int, waits: bool) -> dict[str, int | None]:
    """Options of programs that replace refined nodes and select by so many bounds of masses.

    Args:
        waits: whether they are started while the launch before still runs (programmatic dependent launch).
    """
    many = tile.num_stages == 1 or tile.block_m >= 16 or bounds > 4096  # numbers to a thread: of fp32 the values, too
    early = {"launch_pdl": True} if waits else {}
    return {"num_warps": max(tile.num_warps, 8 if many else 4), "num_stages": 1} | early


def merge_at_once(tile: Tile, dims: int) -> int:
    """How many parts a program that replaces nodes merges at a time, ``dims`` dims of each."""
    numbers = tile.num_warps * 32 * (16 if tile.block_m >= 16 else 32)
    return max(1, min(32, numbers // (tile.block_m * dims)))


def merge_last(tile: Tile, dims: int, parts: int) -> int:
    """How many of ``parts`` parts a program merges at a time that has nothing else left to do."""
    numbers = tile.num_warps * 32 * (32 if tile.block_m >= 16 else 128)
    return max(1, min(32, triton.next_power_of_2(parts), numbers // (tile.block_m * dims)))


@functools.lru_cache(maxsize=1024)
def plan_parts(programs: int, blocks: int, cost: float, room: int) -> tuple[int, int]:
    """How scored nodes are cut into parts of the output: ``(per, splits)``, blocks in a part and programs of a row.

    Writing and reading a part costs ``cost`` times the time to read a block of values. A program makes whole parts, and
    the longest program decides (see :func:`split`).
    """

    def time(per: int) -> float:
        parts = -(-blocks // per)
        splits, each = split(programs, parts, room)
        return -(-programs * splits // room) * (each * per + 1) + parts * cost * programs / room

    per = min(range(1, min(blocks, _LONGEST_PART) + 1), key=time, default=1)
    return per, split(programs, -(-blocks // per), room)[0]


def slice_dims(value_dim: int, programs: int, heads: int, room: int) -> int:
    """Output dims of a program that replaces nodes: a power of two that divides ``value_dim``, or holds all of it.

    Few dims where few rows would leave the GPU idle, and few enough for the merged output of all heads to stay in
    registers.
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
    """The launches at one level of the tree: how many nodes they read and how their work is cut."""

    level: int
    width: int
    """Nodes of a row that may be visited."""
    k: int
    """How many of them may be refined."""
    begin: int
    """Where the level's log-weights begin in a row of :attr:`Workspace.weights`."""
    padded: int
    """Places that they have."""
    scoring: int
    """Programs of a row that score nodes."""
    attending: int
    """Programs of a row that attend to nodes, or that replace the refined ones."""
    before: int
    """Parts of the output that earlier launches have written."""
    parts: int
    """Parts that this stage adds."""
    replaces: bool
    """Whether all nodes are attended to as they are scored, and a later launch replaces the refined ones."""
    few: bool
    """Whether the programs that replace also select, each for itself."""
    at_once: int
    """How many blocks of nodes these programs compare at a time, if not all."""
    per: int
    """Blocks of nodes in a part that is written while nodes are scored."""


@dataclass(frozen=True)
class Work:
    """The sizes by which launches are cut into programs."""

    tile: Tile
    programs: int
    """Programs if none were split along the keys: one for each row, KV head and tile of the group."""
    group: int
    """Query heads of a KV head."""
    value_dim: int
    itemsize: int
    """Bytes of a number of the keys."""
    multiprocessors: int

    def raw_splits(self, tree: Tree) -> int:
        """Programs of a row that attend to sinks and tail, in the launch that scores the top level."""
        blocks = triton.cdiv(tree.rows.width, self.tile.block_n)
        return max(1, min(blocks, _SCORING * self.multiprocessors // (2 * self.programs)))

    def stages(self, tree: Tree, how: Refinement) -> list[Stage]:
        """The levels that are visited, from the top down."""
        found: list[Stage] = []
        width, begin, before = tree.rows.places, 0, self.raw_splits(tree)
        for level in reversed(range(len(tree.levels))):
            k = min(tree.rows.most[level], width)
            last = not k or not level
            one = self._stage(tree, how, level, width, k, begin, before, last)
            found.append(one)
            begin, before = begin + one.padded, before + one.parts
            if last:
                break
            branch = tree.branch(level)
            if how.mass == "preserve" and (branch & (branch - 1) or branch > self.tile.block_n):
                raise UnsupportedError(f"{branch} children of a node under mass=preserve")
            width = k * branch
        return found

    def _stage(
        self, tree: Tree, how: Refinement, level: int, width: int, k: int, begin: int, before: int, last: bool
    ) -> Stage:
        block, heads = self.tile.block_n, triton.next_power_of_2(self.group)
        blocks, padded = triton.cdiv(width, block), triton.cdiv(width, 16) * 16
        topmost = not begin
        beside = self.programs * before if topmost else 0  # programs that attend to sinks and tail
        scoring_room = _SCORING * self.multiprocessors
        room = max(scoring_room - beside, scoring_room // 2)
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
    """Places of a page, or of a piece of it, that a program reads at once: a power of two."""
    return min(triton.next_power_of_2(width), tile.block_n)
