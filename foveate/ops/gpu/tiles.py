"""Tiles of Triton kernels, and how work is split among programs."""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

_START = tl.constexpr(2)
"""Cost of starting a program, in blocks."""
_MOST = 256
"""The most programs that share a row."""
_HEADS = 64
"""The most query heads of a program."""


class Tile(NamedTuple):
    """Queries and keys of a program's block, and its compile options."""

    block_m: int
    """Queries."""
    block_n: int
    """Keys."""
    num_warps: int
    num_stages: int
    maxnreg: int | None = None

    @property
    def options(self) -> dict[str, int | None]:
        """Options of the launch."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.maxnreg}

    def sizes(self, dim: int, value_dim: int | None = None) -> dict[str, int]:
        """A kernel's constants: the block's queries and keys, and the head dims of keys and values, also as the powers
        of two that hold them."""
        sizes = {"DIM": dim, "BLOCK_D": padded(dim), "BLOCK_M": self.block_m, "BLOCK_N": self.block_n}
        return sizes if value_dim is None else sizes | {"VALUE_DIM": value_dim, "BLOCK_DV": padded(value_dim)}

    def shape(self, dim: int, value_dim: int) -> tuple[int, ...]:
        """The same as one constant: head dims, the powers of two that hold them, queries and keys."""
        return dim, value_dim, padded(dim), padded(value_dim), self.block_m, self.block_n


def cdiv(number: int, size: int) -> int:
    """How many parts of a size hold a number. On the host ``triton.cdiv`` takes several times as long."""
    return -(-number // size)


next_power_of_2 = functools.lru_cache(maxsize=1024)(triton.next_power_of_2)
"""Triton's function with a cache: without one, calling it for every layer takes as long as a small launch."""


@functools.cache
def padded(dim: int) -> int:
    """The power of two that holds a head dim in a block, at least 16."""
    return max(16, next_power_of_2(dim))


@functools.cache
def group_tile(
    dtype: torch.dtype, dim: int, group: int, capability: int, *, least_heads: int = 16, wide_warps: int = 4
) -> Tile:
    """Heads and keys of a program in which the heads of a group share one query's keys.

    Blocks of keys take 16 KB in half precision on Hopper, where three programs of a multiprocessor have two blocks each
    of keys and of values in flight, several times latency times bandwidth; and 8 KB elsewhere, where 99 KB of shared
    memory hold two programs.

    Args:
        dim: the larger of the head dims.
        capability: major compute capability.
        least_heads: rows that a block has at least.
        wide_warps: warps of a program of 64 heads.
    """
    heads = min(_HEADS, max(least_heads, next_power_of_2(group)))
    if dtype == torch.float32:  # multiplied without tensor cores
        return Tile(min(heads, 16), 16, num_warps=8 if dim > 128 else 4, num_stages=1)
    keys = (128 if dim <= 64 else 64 if dim <= 128 else 32) // (1 if capability >= 9 else 2)
    wide = heads == _HEADS
    return Tile(heads, keys, num_warps=wide_warps if wide else 4, num_stages=2 if wide else 3)


@functools.cache
def decode_tile(
    dtype: torch.dtype, dim: int, group: int, capability: int, in_blocks: bool, narrow: bool
) -> tuple[Tile, int]:
    """A decode step's tile, see :func:`group_tile`, and how many of its programs a multiprocessor runs at a time.

    In an engine's blocks on Hopper a program looks up twice the number of keys at once, so the number of keys in flight
    is the same: 4 to 15 % faster than three smaller programs on an H200.

    Args:
        narrow: keys are in eight bits, and the program keeps logits or reads chosen keys. Then a third block fits
            without spills: 3 to 12 % faster on an H200 with head dim 128.
    """
    tile = group_tile(dtype, dim, group, capability)
    if in_blocks and capability == 9 and tile.num_stages == 3:
        return tile._replace(block_n=2 * tile.block_n, num_stages=3 if narrow and 64 < dim <= 128 else 2), 2
    return tile, 3


@functools.cache
def newest_tile(dtype: torch.dtype, dim: int, rows: int, capability: int, in_blocks: bool) -> tuple[Tile, int]:
    """The tile of a pass that verifies drafts, in which the newest tokens of a group's heads share a program.

    A pass over 8 x 32K or 4 x 128K keys of head dim 128 takes 1.00 to 1.04 times one query's with 32 rows and 1.06 to
    1.14 with 64 on an H200. With the tiles that :func:`decode_tile` has for 32 and 64 heads, it takes 1.05 to 1.20 and
    1.18 to 1.39 times one query's.

    Args:
        rows: heads of a group times tokens; see :func:`decode_tile` for the others and the result.
    """
    tile, resident = decode_tile(dtype, dim, rows, capability, in_blocks, False)
    if dtype == torch.float32 or capability != 9 or not 64 < dim <= 128 or tile.block_m < 32:
        return tile, resident
    if tile.block_m == 32:
        return tile._replace(block_n=128, num_stages=2), 2
    return tile._replace(block_n=64, num_stages=3), 2


def tile_of_width(tiles: dict[int, Tile], dim: int) -> Tile:
    """The tile of the smallest width that holds ``dim``, of a table by width, ascending."""
    return next(tile for width, tile in tiles.items() if dim <= width)


@functools.lru_cache(maxsize=1024)
def split(rows: int, blocks: int, room: int, merging: float = 1 / 64) -> tuple[int, int]:
    """Split the ``blocks`` of each of ``rows`` among programs, where the GPU runs ``room`` programs at a time.

    The estimate favours full rounds of programs and short programs, so that the last round ends early; each program
    costs time to start and, in blocks, ``merging`` to merge.

    Returns:
        ``(splits, each)``: programs of a row, and blocks of a program.
    """

    def time(each: int) -> float:
        splits = -(-blocks // each)
        return (-(-rows * splits // room) + 0.5) * (each + _START.value) + splits * merging

    sizes = {-(-blocks // splits) for splits in range(1, min(blocks, _MOST) + 1)}
    each = min(sorted(sizes), key=time, default=1)
    return max(1, -(-blocks // each)), each


@triton.jit
def split_of_row(here, rows, splits, room):
    """:func:`split` on the device: how many of the ``splits`` programs of each row share the row's ``here`` blocks.

    A captured step has a grid for the longest row that there may be. A row uses the part of the grid that would be best
    if all rows had its length. The candidates are all programs of the row, and the numbers of programs with which all
    rows together fill one to several rounds of the GPU. Three numbers of rounds are tried, beginning with the number
    whose estimate without rounding is least. All values are scalars.

    Returns:
        ``(used, each)``: programs of the row, at least 1, and blocks of a program.
    """
    # 1. Start with all programs of the row.
    each = tl.maximum(tl.cdiv(here, splits), 1)
    used = tl.cdiv(here, each)
    least = _time(used, each, rows, room)
    # 2. Try three numbers of rounds. Without rounding up, the estimate is least where (rounds + 1/2) * (each + start)
    # is, with each = here * rows / (rounds * room): at rounds = sqrt(here * rows / (room * 2 * start)), start being 2.
    first = tl.maximum((tl.sqrt(here.to(tl.float32) * rows / room) * 0.5).to(tl.int32), 1)
    for more in tl.static_range(3):
        programs = tl.maximum(tl.minimum((first + more) * room // rows, splits), 1)
        blocks = tl.maximum(tl.cdiv(here, programs), 1)
        some = tl.cdiv(here, blocks)
        time = _time(some, blocks, rows, room)
        better = time < least
        used, each = tl.where(better, some, used), tl.where(better, blocks, each)
        least = tl.where(better, time, least)
    return tl.maximum(used, 1), each


@triton.jit
def _time(splits, each, rows, room):
    """The estimate of :func:`split`, in 64ths of a block's time, so that all numbers are integers."""
    return (2 * tl.cdiv(rows * splits, room) + 1) * (each + _START) * 32 + splits


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 elsewhere."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def capability(device: torch.device) -> int:
    """Major compute capability of a GPU; 8 elsewhere."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 8
