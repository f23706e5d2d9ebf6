"""Attention mass of tiles of queries: Triton kernel of :func:`tile_block_mass`."""

import importlib

import torch
import triton
import triton.language as tl

from foveate.ops.dispatch import UnsupportedError
from foveate.ops.gpu.block_table import FLOATS
from foveate.ops.gpu.softcap import capped, constant
from foveate.ops.gpu.softmax import LOG2E
from foveate.ops.gpu.tiles import Tile, tile_of_width

_WALK = tl.constexpr(16)
"""Key blocks that a program walks over, so that the queries which it holds are loaded once for all of them."""

_TILES = {
    64: Tile(128, 128, num_warps=8, num_stages=3),
    128: Tile(128, 64, num_warps=8, num_stages=2),
    256: Tile(32, 64, num_warps=4, num_stages=2),
}
"""By head dim, padded; 64 keys are the fewest rows that Hopper's matrix units take. Every tile fits into 99 KB of
shared memory."""

_TILE_FP32 = Tile(32, 16, num_warps=4, num_stages=1)
"""For fp32, which is multiplied without tensor cores."""

_HOPPER = True
"""Whether Hopper gets the kernel written for it."""


def tile_for(dtype: torch.dtype, dim: int, rows: int) -> Tile:
    """The tile for a head dim of at most 256; ``rows`` counts the queries of a tile, which are pooled."""
    tile = _TILE_FP32 if dtype == torch.float32 else tile_of_width(_TILES, dim)
    return tile._replace(block_m=min(tile.block_m, max(16, triton.next_power_of_2(rows))))


def tile_block_mass(queries, k, lse, begins, *, logits):
    """See :func:`foveate.ops.score.reference.tile_block_mass`.

    A program owns some keys of one tile, so every sum has one owner and one order: repeats are equal bit for bit. Keys
    stand in the rows of the products, so that a key's sum over the queries is one thread's. fp32 is multiplied in full
    precision.
    """
    batch, heads, tiles, rows, dim = queries.shape
    number = k.shape[2]
    if queries.dtype != k.dtype or k.dtype not in FLOATS:
        raise UnsupportedError(f"queries in {queries.dtype} with keys in {k.dtype}")
    if dim > max(_TILES):
        raise UnsupportedError(f"head dims above {max(_TILES)}")
    cap = constant(logits.softcap)
    if _HOPPER and not cap and number and k.is_cuda and torch.cuda.get_device_capability(k.device) == (9, 0):
        hopper = importlib.import_module("foveate.ops.score.tiles_hopper_kernel")
        if hopper.fits(queries, k):
            return hopper.tile_block_mass(queries, k, lse, begins, scaling=logits.scaling)
    mass = queries.new_empty(batch, heads, tiles, number, dtype=torch.float32)
    if not number:
        return mass
    queries, lse = queries.contiguous(), lse.contiguous()
    inputs = (queries, k, lse, begins, mass, *k.stride(), heads, tiles, rows, number)
    tile = tile_for(k.dtype, dim, rows)
    sizes = {"SOFTCAP": cap, **tile.sizes(dim), **tile.options}
    walks, scale = triton.cdiv(triton.cdiv(number, tile.block_n), _WALK.value), logits.scaling * LOG2E.value
    _tile_block_mass[walks * tiles, batch * heads](*inputs, scale, ONE=rows <= tile.block_m, **sizes)
    return mass


# Sizes change from call to call; unspecialised, one compiled kernel serves all of them.
@triton.jit(do_not_specialize=["heads", "tiles", "rows", "number"])
def _tile_block_mass(
    q_ptr, k_ptr, lse_ptr, begin_ptr, mass_ptr,
    k_stride_b, k_stride_h, k_stride_l, k_stride_d,
    heads, tiles, rows, number, scale,
    SOFTCAP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ONE: tl.constexpr,
):  # fmt: skip
    """The attention that a tile of queries pays to the keys before it: writes ``mass [B, H, T, n]``, -inf from the
    tile's first position on, from contiguous queries ``[B, H, T, W, D]`` and ``lse [B, H, T, W]``. Logits are to the
    base 2, and ``scale`` includes log2(e).

    A program owns ``_WALK`` blocks of keys for one tile of one head, and reads the keys before the tile in ascending
    order. If one block holds all queries of the tile (``ONE``), they are loaded once and stay in registers; otherwise
    each block of keys reads the tile's queries again, in ascending order.

    Shapes: M = BLOCK_M queries, N = BLOCK_N keys, D = BLOCK_D, which holds the head dim ``DIM``.
    """
    t, walk = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    row = tl.program_id(1)
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    members, dims, places = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)  # [M], [D], [N]
    begin = tl.minimum(tl.load(begin_ptr + t), number).to(tl.int32)
    of_tile = row.to(tl.int64) * tiles + t
    q_ptr += of_tile * rows * DIM
    lse_ptr += of_tile * rows
    mass_ptr += of_tile * number
    k_ptr += batch * k_stride_b + head * k_stride_h

    # 1. Load the first block of queries, transposed. A query that does not exist has a log-sum-exp of inf: its
    # exponentials are 0.
    exist = members < rows  # [M]
    # [D, M]
    q = tl.load(q_ptr + members[None, :] * DIM + dims[:, None], mask=exist[None, :] & (dims < DIM)[:, None], other=0.0)
    lse = tl.load(lse_ptr + members, mask=exist, other=float("inf")) * LOG2E  # [M]

    # 2. Walk over the keys before the tile.
    first = walk * _WALK * BLOCK_N
    last = tl.minimum(first + _WALK * BLOCK_N, number)
    for start in tl.range(first, tl.minimum(last, begin), BLOCK_N):
        keys = start + places  # [N]
        k_tile = keys.to(tl.int64)[:, None] * k_stride_l + dims[None, :] * k_stride_d  # [N, D]
        k = tl.load(k_ptr + k_tile, mask=(keys < begin)[:, None] & (dims < DIM)[None, :], other=0.0)  # [N, D]
        if ONE:
            logits = capped(tl.dot(k, q, input_precision="ieee") * scale, SOFTCAP)  # [N, M]
            mass = tl.sum(tl.exp2(logits - lse[None, :]), 1)  # [N]
        else:
            mass = tl.zeros([BLOCK_N], tl.float32)  # [N]
            for some in tl.range(0, rows, BLOCK_M):
                exist = some + members < rows  # [M]
                # [D, M]
                q = tl.load(
                    q_ptr + (some + members)[None, :] * DIM + dims[:, None],
                    mask=exist[None, :] & (dims < DIM)[:, None],
                    other=0.0,
                )
                lse = tl.load(lse_ptr + some + members, mask=exist, other=float("inf")) * LOG2E  # [M]
                logits = capped(tl.dot(k, q, input_precision="ieee") * scale, SOFTCAP)  # [N, M]
                mass += tl.sum(tl.exp2(logits - lse[None, :]), 1)  # [N]
        tl.store(mass_ptr + keys, tl.where(keys < begin, mass, float("-inf")), mask=keys < last)

    # 3. Write -inf to the remaining blocks, whose keys begin at or after the tile's first position.
    behind = first + tl.maximum(tl.cdiv(tl.minimum(last, begin) - first, BLOCK_N), 0) * BLOCK_N
    for start in tl.range(behind, last, BLOCK_N):
        keys = start + places  # [N]
        tl.store(mass_ptr + keys, tl.full([BLOCK_N], float("-inf"), tl.float32), mask=keys < last)
