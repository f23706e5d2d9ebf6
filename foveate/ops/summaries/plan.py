"""How the work of :func:`attend_summaries`' kernels is cut into programs, and what these are compiled with."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor

from foveate.ops._dispatch import UnsupportedError
from foveate.ops._tile import Tile, split
from foveate.ops.summaries.reference import Refinement
from foveate.ops.summaries.tree import Tree

_HEADS = 64
"""The most heads of a program."""
_HEADS_DIMS = 2048
"""The most dims of all heads of a group together that a program makes."""
_LONGEST_PART = 16
"""Blocks of nodes of a part at most."""
_WEIGHING, _ATTENDING = 3, 2
"""Programs that a multiprocessor runs at a time, of those that weigh nodes and of those that attend to them."""
_MERGING = 1 / 4
"""What it costs to merge a part of what was attended to, in blocks."""
_SLICES = 2
"""Programs to a multiprocessor into which the dims of the output are cut at most where this is mended."""
_FEW = 8
"""Where so many pages or fewer are refined, all summaries are attended to as they are weighed, and that is mended."""
_FEW_OF = 16384
"""With so many bounds of masses, one a block and head, every program that mends finds out for itself what is refined,
which saves a launch."""
_HELD = 32768
"""The most nodes that a launch of its own chooses from."""
FEW_HEADS = 16
"""In groups of so many heads masses are computed for all of them at once."""
_AT_ONCE, _AT_ONCE_OF = 16, 64
"""Blocks of nodes whose masses are looked at together by programs that find out what is refined by bounds, at most, and
those times heads; """
_NO_BOUNDS = 8192
"""of so many masses of heads or fewer there are none: all are looked at."""
_SHARED = 96 << 10
"""Bytes of blocks that a program has under way at most: a multiprocessor has room for two, or three of which each takes
three quarters of this."""


def tile_for(dtype: torch.dtype, dim: int, group: int, capability: int) -> Tile:
    """Heads and nodes of a program for head dims of which ``dim`` is the larger: blocks of 16 KB of half precision."""
    heads = min(_HEADS, triton.next_power_of_2(group))
    if dtype == torch.float32:  # multiplied without tensor cores
        return Tile(min(heads, 16), 16, num_warps=8 if dim > 128 else 4, num_stages=1)
    nodes = (128 if dim <= 64 else 64 if dim <= 128 else 32) // (1 if capability >= 9 else 2)
    return Tile(heads, nodes, num_warps=4 if heads < 64 else 8, num_stages=2 if heads == 64 else 3)


def weighing_options(tile: Tile, dtype: torch.dtype, of_node: int, capability: int) -> dict[str, int | None]:
    """Options of programs that weigh nodes: how far ahead these are read, of which ``of_node`` numbers are."""
    if dtype == torch.float32:
        return tile.options | {"num_warps": 8}
    blocks = _SHARED // (1 if capability >= 9 else 2) // (tile.block_n * of_node * dtype.itemsize)
    return tile.options | {"num_stages": max(2, min(tile.num_stages, blocks))}


def mending_options(tile: Tile, bounds: int, waits: bool) -> dict[str, int | None]:
    """Options of programs that mend what was attended to, and choose by so many bounds of masses; ``waits``: started
    while the launch before still runs."""
    many = tile.num_stages == 1 or tile.block_m >= 16 or bounds > 4096  # numbers to a thread: of fp32 the values, too
    early = {"launch_pdl": True} if waits else {}
    return {"num_warps": max(tile.num_warps, 8 if many else 4), "num_stages": 1} | early


def merge_at_once(tile: Tile, dims: int) -> int:
    """How many parts a program that mends merges at once, so many dims of each."""
    numbers = tile.num_warps * 32 * (16 if tile.block_m >= 16 else 32)
    return max(1, min(32, numbers // (tile.block_m * dims)))


def merge_last(tile: Tile, dims: int, parts: int) -> int:
    """How many of so many ``parts`` a program merges at once that has nothing else left to do."""
    numbers = tile.num_warps * 32 * (32 if tile.block_m >= 16 else 128)
    return max(1, min(32, triton.next_power_of_2(parts), numbers // (tile.block_m * dims)))


@functools.lru_cache(maxsize=1024)
def plan_parts(programs: int, blocks: int, cost: float, room: int) -> tuple[int, int]:
    """How what is attended to as it is weighed is cut: ``(per, splits)``, blocks of nodes of a part, programs of a row.

    Each part costs something, a share ``cost`` of reading a block of values: being written and being read. Programs of
    whole parts take as long as the longest of them (see :func:`split`).
    """

    def time(per: int) -> float:
        parts = -(-blocks // per)
        splits, each = split(programs, parts, room)
        return -(-programs * splits // room) * (each * per + 1) + parts * cost * programs / room

    per = min(range(1, min(blocks, _LONGEST_PART) + 1), key=time, default=1)
    return per, split(programs, -(-blocks // per), room)[0]


def slice_dims(value_dim: int, programs: int, heads: int, room: int) -> int:
    """How many dims of the output a program makes where what was attended to is mended: a power of two that divides
    them, or holds them all.

    Few where few rows would leave the GPU idle, and so few that registers hold what is merged for all heads.
    """
    whole = dims = max(16, triton.next_power_of_2(value_dim))
    for fewer in (whole >> shift for shift in range(whole.bit_length() - 4)):
        if value_dim % fewer:
            continue
        if programs * (value_dim // fewer) > room and heads * dims <= _HEADS_DIMS:
            break
        dims = fewer
    return dims


@dataclass(eq=False)
class Stage:
    """What is done at one level, and the room for what comes of it, which who runs it makes."""

    level: int
    width: int
    """Nodes of a row that may be looked at."""
    k: int
    """How many of them may be refined."""
    begin: int
    padded: int
    """Where their log-weights begin, and how many places they have."""
    scoring: int
    attending: int
    """Programs of a row that weigh nodes, and that attend to them or mend."""
    before: int
    """Parts of the output that are there by then."""
    parts: int
    """Parts that this adds."""
    mends: bool
    """Whether everything is attended to as it is weighed, and that is mended by the programs that attend."""
    few: bool
    """Whether these choose for themselves, """
    at_once: int
    """and of how many blocks, or all, they look at the masses together."""
    per: int
    """Blocks of nodes of a part of what is attended to as it is weighed."""
    chosen: Tensor = field(init=False, repr=False)
    pages: Tensor = field(init=False, repr=False)
    picked: Tensor = field(init=False, repr=False)
    gone: Tensor = field(init=False, repr=False)
    """See :func:`choose_nodes`."""


@dataclass(frozen=True)
class Work:
    """What the kernels work on, as far as it says how they cut it."""

    tile: Tile
    programs: int
    """Programs of which each has all keys of some heads: of those of a KV head, or fewer."""
    group: int
    """Query heads of a KV head."""
    value_dim: int
    itemsize: int
    """Bytes of a number of the keys."""
    multiprocessors: int

    def raw_splits(self, tree: Tree) -> int:
        """Programs into which sinks and tail are cut, where the topmost nodes are weighed."""
        blocks = triton.cdiv(tree.rows.width, self.tile.block_n)
        return max(1, min(blocks, _WEIGHING * self.multiprocessors // (2 * self.programs)))

    def stages(self, tree: Tree, how: Refinement) -> list[Stage]:
        """The levels that are looked at, from the top down."""
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
        weighing = _WEIGHING * self.multiprocessors
        room = max(weighing - beside, weighing // 2)
        mends = last and k <= _FEW
        few = mends and self.group <= FEW_HEADS and how.pool == "kv_head" and how.rule == "top_k"
        at_once = triton.next_power_of_2(max(1, blocks))
        few = few and heads * at_once <= _FEW_OF
        if heads * at_once * block > _NO_BOUNDS:
            at_once = min(at_once, _AT_ONCE, max(1, _AT_ONCE_OF // heads))
        if not few and width > _HELD:
            raise UnsupportedError(f"more than {_HELD} nodes of a level")
        if mends:
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
        return Stage(level, width, k, begin, padded, scoring, attending, before, parts, mends, few, at_once, per)


def page_block(width: int, tile: Tile) -> int:
    """Places of a page, or of a piece of it, that a program reads at once: a power of two."""
    return min(triton.next_power_of_2(width), tile.block_n)
