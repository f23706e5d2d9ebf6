"""How the work of :func:`attend_summaries`' kernels is cut into programs, and what these are compiled with."""

from __future__ import annotations

import functools

import torch
import triton

from foveate.ops._tile import Tile, split

_HEADS = 64
"""The most heads of a program."""
_HEADS_DIMS = 2048
"""The most dims of all heads of a group together that a program makes."""
_LONGEST_PART = 16
"""Blocks of nodes of a part at most."""
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
    """How many parts a program merges at once, so many dims of each."""
    numbers = tile.num_warps * 32 * (16 if tile.block_m >= 16 else 32)
    return max(1, min(32, numbers // (tile.block_m * dims)))


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
