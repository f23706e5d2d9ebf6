"""Attention mass in one causal QK pass: Triton kernel of :func:`column_mass`."""

import torch
import triton
import triton.language as tl

from foveate.ops.dispatch import UnsupportedError
from foveate.ops.gpu.block_table import FLOATS
from foveate.ops.gpu.softcap import capped, constant
from foveate.ops.gpu.softmax import LOG2E
from foveate.ops.gpu.tiles import Tile, tile_of_width

_NEIGHBOURS = tl.constexpr(8)
"""Key blocks of one head that run side by side, so that the queries which they read stay in the L2 cache."""

_TILES = {
    64: Tile(64, 128, num_warps=4, num_stages=3, maxnreg=168),
    128: Tile(64, 128, num_warps=4, num_stages=2, maxnreg=168),
    256: Tile(64, 64, num_warps=4, num_stages=2),
}
"""By head dim, padded. QK and exp2 cost about the same, so several small programs share a multiprocessor (three of 168
registers a thread): the exponentials of one overlap with the products of another. Every tile fits into 99 KB of shared
memory."""

_TILE_FP32 = Tile(16, 32, num_warps=4, num_stages=1)
"""For fp32, which is multiplied without tensor cores."""


def tile_for(dtype: torch.dtype, dim: int) -> Tile:
    """The tile for a head dim of at most 256."""
    return _TILE_FP32 if dtype == torch.float32 else tile_of_width(_TILES, dim)


def column_mass(q, kv, lse, *, logits, offset=0, out=None):
    """See :func:`foveate.ops.score.reference.column_mass`.

    A program owns a block of keys and one query head, and walks over the queries that see the block, so every sum has
    one owner and one order: repeats are equal bit for bit. The heads of a group are added afterwards, from a scratch
    tensor of ``4 * B * Hq * (offset + Lq)`` bytes. fp32 is multiplied in full precision.
    """
    k = kv.k
    batch, num_heads, length, dim = q.shape
    num_kv_heads, visible = k.shape[1], offset + length
    if q.dtype != k.dtype or q.dtype not in FLOATS:
        raise UnsupportedError(f"queries in {q.dtype} with keys in {k.dtype}")
    if dim > max(_TILES):
        raise UnsupportedError(f"head dims above {max(_TILES)}")
    out = k.new_zeros(k.shape[:3], dtype=torch.float32) if out is None else out
    if k.shape[2] < visible or out.shape[2] < visible:
        raise ValueError(f"offset {offset} and {length} queries need {visible} keys: {k.shape[2]}, out {out.shape[2]}")
    if num_heads % num_kv_heads or lse.shape != q.shape[:3] or out.shape[:2] != k.shape[:2]:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("q", q), ("k", k), ("lse", lse), ("out", out)))
        raise ValueError(f"shapes do not fit: {shapes}")

    tile = tile_for(q.dtype, dim)
    mass = q.new_empty(batch, num_heads, visible, dtype=torch.float32)
    rounds = triton.cdiv(triton.cdiv(visible, tile.block_n), _NEIGHBOURS.value)
    _column_mass[_NEIGHBOURS.value * batch * num_heads, rounds](
        q, k, lse, mass,
        *q.stride(), *k.stride(), *lse.stride(),
        num_heads, num_heads // num_kv_heads, length, offset, logits.scaling * LOG2E.value,
        SOFTCAP=constant(logits.softcap), **tile.sizes(dim), **tile.options,
    )  # fmt: skip
    out[:, :, :visible] += mass.unflatten(1, (num_kv_heads, -1)).sum(2)
    return out


# Sizes change from call to call; unspecialised, one compiled kernel serves all of them.
@triton.jit(do_not_specialize=["num_heads", "group", "length", "offset"])
def _column_mass(
    q_ptr, k_ptr, lse_ptr, mass_ptr,
    q_stride_b, q_stride_h, q_stride_l, q_stride_d, k_stride_b, k_stride_h, k_stride_l, k_stride_d,
    lse_stride_b, lse_stride_h, lse_stride_l,
    num_heads, group, length, offset, scale,
    SOFTCAP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The attention mass that each key receives: writes ``mass [B, Hq, offset + Lq]``, contiguous. Logits and
    log-sum-exps are to the base 2 inside, and ``scale`` includes log2(e).

    A program owns ``BLOCK_N`` keys of one query head in one row of the batch. It loads the keys once and reads the
    queries that see them in ascending order: first the queries on the diagonal, which see a part of the block, then all
    later queries, which see the whole block. A key's sum has one owner and one order. Early keys are seen by the most
    queries: their programs, of all heads, have the lowest numbers and start first.

    Shapes: M = BLOCK_M queries, N = BLOCK_N keys, D = BLOCK_D, which holds the head dim ``DIM``.
    """
    row = tl.program_id(0) // _NEIGHBOURS
    first_key = (tl.program_id(1) * _NEIGHBOURS + tl.program_id(0) % _NEIGHBOURS) * BLOCK_N
    visible = offset + length
    if first_key >= visible:
        return
    batch, head = (row // num_heads).to(tl.int64), (row % num_heads).to(tl.int64)
    # [M], [N], [D]
    queries, keys, dims = tl.arange(0, BLOCK_M), first_key + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)

    # 1. Load the block of keys, transposed, for all products.
    k_ptr += batch * k_stride_b + head // group * k_stride_h + first_key.to(tl.int64) * k_stride_l
    k_tile = tl.arange(0, BLOCK_N)[None, :] * k_stride_l + dims[:, None] * k_stride_d  # [D, N]
    k = tl.load(k_ptr + k_tile, mask=(keys < visible)[None, :] & (dims < DIM)[:, None], other=0.0)  # [D, N]

    # 2. Find the queries that see the block: from ``first`` on, and before ``diagonal_end`` only a part of it.
    first = tl.maximum(first_key - offset, 0)
    on_diagonal = tl.maximum(first_key + BLOCK_N - 1 - offset - first, 0)
    diagonal_end = tl.minimum(first + tl.cdiv(on_diagonal, BLOCK_M) * BLOCK_M, length)

    # 3. Walk over these queries and add up their exponentials.
    q_ptr += batch * q_stride_b + head * q_stride_h + first.to(tl.int64) * q_stride_l
    q_tile = queries[:, None] * q_stride_l + dims[None, :] * q_stride_d  # [M, D]
    lse_ptr += batch * lse_stride_b + head * lse_stride_h + first.to(tl.int64) * lse_stride_l
    mass = tl.zeros([BLOCK_M // 16, 8, BLOCK_N], tl.float32)  # [M/16, 8, N]
    for whole in tl.static_range(2):  # 0: queries that see a part of the block; 1: queries that see all of it
        for start in tl.range(diagonal_end if whole else first, length if whole else diagonal_end, BLOCK_M):
            exist = start + queries < length  # [M]
            q = tl.load(q_ptr + q_tile, mask=exist[:, None] & (dims < DIM)[None, :], other=0.0)  # [M, D]
            lse = tl.load(lse_ptr + queries * lse_stride_l, mask=exist, other=float("-inf"))  # [M]
            # A query that saw nothing has -inf; with inf instead its exponentials are 0, not inf.
            lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)  # [M]
            logits = capped(tl.dot(q, k, input_precision="ieee") * scale, SOFTCAP)  # [M, N]
            p = tl.exp2(logits - lse[:, None])  # [M, N]
            if not whole:
                p = tl.where((offset + start + queries)[:, None] >= keys[None, :], p, 0.0)  # [M, N]
            # Rows 8 apart are in the registers of one thread: adding these pairs first halves the accumulator.
            mass += tl.sum(tl.reshape(p, [BLOCK_M // 16, 2, 8, BLOCK_N]), 1)  # [M/16, 8, N]
            q_ptr += BLOCK_M * q_stride_l
            lse_ptr += BLOCK_M * lse_stride_l

    # 4. Add up the accumulator and write the masses of the keys.
    mass_ptr += row.to(tl.int64) * visible
    tl.store(mass_ptr + keys, tl.sum(tl.sum(mass, 0), 0), mask=keys < visible)
