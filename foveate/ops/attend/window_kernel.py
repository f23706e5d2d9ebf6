"""Sinks and a moving window of keys in one launch: Triton kernel of :func:`attend_window` and :func:`attend_capped`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.ops.attend.attended import Attended
from foveate.ops.dispatch import UnsupportedError
from foveate.ops.gpu.block_table import FLOATS
from foveate.ops.gpu.softcap import capped, constant
from foveate.ops.gpu.softmax import LOG2E, LOWEST, accumulate, exponentials, log_sum_exp, normalised
from foveate.ops.gpu.tiles import Tile, tile_of_width
from foveate.ops.kv import KV
from foveate.ops.logits import Logits

_TILES = {
    64: Tile(128, 64, num_warps=8, num_stages=3, maxnreg=128),
    128: Tile(128, 64, num_warps=8, num_stages=2),
    256: Tile(64, 32, num_warps=4, num_stages=2),
}
"""By the larger of the two head dims, padded. 128 queries to a key, because the L2 cache feeds no faster; at 64, where
exponentials take longer than products, two programs share a multiprocessor. All fit into 99 KB of shared memory."""

_TILE_FP32 = Tile(16, 32, num_warps=8, num_stages=1)
"""For fp32, which is multiplied without tensor cores."""


def tile_for(dtype: torch.dtype, dim: int) -> Tile:
    """The tile for ``dim``, the larger of head and value dim, at most 256."""
    return _TILE_FP32 if dtype == torch.float32 else tile_of_width(_TILES, dim)


def attend_window(q, kv, *, logits, lower, sinks=0, offset=0):
    """See :func:`foveate.ops.attend.window.attend_window`.

    A program owns a block of queries of one head and walks over the keys that any of these queries sees, with an online
    softmax (FlashAttention, Dao 2023, arXiv:2307.08691): repeats are equal bit for bit. fp32 is multiplied in full
    precision. The output is laid out as ``[B, Lq, Hq, Dv]``.
    """
    return _windowed(q, kv, logits, lower, sinks, offset, need_lse=False)


def attend_capped(q: Tensor, kv: KV, *, logits: Logits, offset: int) -> Attended:
    """See :func:`foveate.ops.attend.window.attend_capped`: a window that begins at the first key."""
    lower = torch.zeros(q.shape[2], dtype=torch.int64, device=q.device)
    return _windowed(q, kv, logits, lower, 0, offset, need_lse=True)


def _windowed(q: Tensor, kv: KV, logits: Logits, lower: Tensor, sinks: int, offset: int, need_lse: bool) -> Attended:
    k, v = kv.k, kv.v
    (batch, num_heads, length, dim), value_dim = q.shape, v.shape[3]
    if not q.dtype == k.dtype == v.dtype or q.dtype not in FLOATS:
        raise UnsupportedError(f"queries in {q.dtype} with keys in {k.dtype} and values in {v.dtype}")
    if max(dim, value_dim) > max(_TILES):
        raise UnsupportedError(f"head dims above {max(_TILES)}")
    tile = tile_for(q.dtype, max(dim, value_dim))
    out = q.new_empty(batch, length, num_heads, value_dim).transpose(1, 2)
    lse = q.new_empty(batch, num_heads, length, dtype=torch.float32) if need_lse else None
    _attend_window[batch * num_heads, triton.cdiv(length, tile.block_m)](
        q, k, v, lower, logits.sinks, out, lse,
        q.stride(), k.stride(), v.stride(), out.stride()[:3], lower.stride(0),
        0 if logits.sinks is None else logits.sinks.stride(0),
        num_heads, num_heads // k.shape[1], length, offset, sinks, logits.scaling * LOG2E.value,
        SOFTCAP=constant(logits.softcap), **tile.sizes(dim, value_dim) | tile.options,
    )  # fmt: skip
    return Attended(out, lse)


@triton.jit(do_not_specialize=["num_heads", "group", "length", "offset", "sinks"])
def _attend_window(
    q_ptr, k_ptr, v_ptr, lower_ptr, sink_ptr, out_ptr, lse_ptr,
    q_strides, k_strides, v_strides, out_strides, lower_stride, sink_stride,
    num_heads, group, length, offset, sinks, scale,
    SOFTCAP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention of one block of queries over the sinks and the moving window.

    A program owns ``BLOCK_M`` consecutive queries of one head. It writes their rows of ``out [B, Hq, Lq, Dv]``, whose
    last stride is 1, and of ``lse [B, Hq, Lq]``, contiguous, natural, unless that is None.

    It reads each key once: first the blocks that need a mask, at both ends, and then the blocks between them, with an
    online softmax in fp32. The program's keys are the sinks and all keys from the first query's ``lower`` to the last
    query's own. The program counts these keys by ``place``: the sinks come first, and after them it skips ``gap`` keys,
    which no query sees.

    ``scale`` includes log2(e), so logits are to the base 2. ``SOFTCAP`` 0 means no cap.

    Shapes: M = BLOCK_M queries, N = BLOCK_N keys, D = BLOCK_D dimensions of keys, DV = BLOCK_DV dimensions of values.
    """
    q_stride_b, q_stride_h, q_stride_l, q_stride_d = q_strides
    k_stride_b, k_stride_h, k_stride_l, k_stride_d = k_strides
    v_stride_b, v_stride_h, v_stride_l, v_stride_d = v_strides
    out_stride_b, out_stride_h, out_stride_l = out_strides
    # 1. Find the head and the block of queries that the program owns.
    row, first = tl.program_id(0), tl.program_id(1) * BLOCK_M
    batch, head = (row // num_heads).to(tl.int64), (row % num_heads).to(tl.int64)
    last = tl.minimum(first + BLOCK_M, length) - 1
    queries, places = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)  # [M], [N]
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)  # [D], [DV]
    exist, own, end = queries < length, offset + queries, offset + last + 1  # [M], [M], scalar

    # 2. Find the keys that any query of the block sees.
    lower = tl.load(lower_ptr + queries * lower_stride, mask=exist, other=0)  # [M]
    lower = tl.minimum(tl.maximum(lower, 0), end).to(tl.int32)  # [M]
    lowest, highest = tl.min(tl.where(exist, lower, end)), tl.max(lower)

    # 3. Classify the blocks of places: the first ``ragged`` blocks have keys that some query no longer sees, the blocks
    # from ``diagonal`` on have keys that some query does not yet see, and all queries see the blocks between.
    gap = tl.maximum(lowest - sinks, 0)
    total = end - gap
    blocks = tl.cdiv(total, BLOCK_N)
    ragged = tl.minimum(tl.cdiv(tl.where(highest > sinks, highest - gap, 0), BLOCK_N), blocks)
    diagonal = tl.maximum((offset + first + 1 - gap) // BLOCK_N, ragged)

    # 4. Load the queries.
    q_ptr += batch * q_stride_b + head * q_stride_h + first.to(tl.int64) * q_stride_l
    q_tile = tl.arange(0, BLOCK_M)[:, None] * q_stride_l + dims[None, :] * q_stride_d  # [M, D]
    q = tl.load(q_ptr + q_tile, mask=exist[:, None] & (dims < DIM)[None, :], other=0.0)  # [M, D]
    k_ptr += batch * k_stride_b + head // group * k_stride_h
    v_ptr += batch * v_stride_b + head // group * v_stride_h

    # 5. Start the online softmax, from the attention sink's logit if the model has one.
    top = tl.full([BLOCK_M], LOWEST, tl.float32)  # [M]
    weight = tl.zeros([BLOCK_M], tl.float32)  # [M]
    out = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)  # [M, DV]
    if sink_ptr is not None:
        top = tl.maximum(top, tl.load(sink_ptr + head * sink_stride).to(tl.float32) * LOG2E)  # [M]
        weight = tl.where(top > LOWEST, 1.0, weight)  # [M]
    # 6. Read the blocks of keys, first the blocks that need a mask and then, with ``whole``, the blocks between them.
    # Two loops, so that the second is compiled without any mask of logits.
    for whole in tl.static_range(2):
        for block in tl.range(ragged if whole else 0, diagonal if whole else ragged + blocks - diagonal):
            if whole:
                keys = gap + block * BLOCK_N + places  # [N]
                stored = places >= 0  # [N]
            else:
                place = tl.where(block < ragged, block, block - ragged + diagonal) * BLOCK_N + places  # [N]
                keys = tl.where(place < sinks, place, place + gap)  # [N]
                stored = place < total  # [N]
            slots = keys.to(tl.int64)  # [N]
            k_tile = slots[None, :] * k_stride_l + dims[:, None] * k_stride_d  # [D, N]
            k = tl.load(k_ptr + k_tile, mask=stored[None, :] & (dims < DIM)[:, None], other=0.0)  # [D, N]
            logits = capped(tl.dot(q, k, input_precision="ieee") * scale, SOFTCAP)  # [M, N]
            if not whole:
                seen = (keys[None, :] >= lower[:, None]) | (keys < sinks)[None, :]  # [M, N]
                logits = tl.where(seen & (keys[None, :] <= own[:, None]), logits, float("-inf"))  # [M, N]
            top, p, fade = exponentials(logits, top)  # [M], [M, N], [M]
            v_tile = slots[:, None] * v_stride_l + value_dims[None, :] * v_stride_d  # [N, DV]
            v = tl.load(v_ptr + v_tile, mask=stored[:, None] & (value_dims < VALUE_DIM)[None, :], other=0.0)  # [N, DV]
            weight, out = accumulate(p, v, fade, weight, out)  # [M], [M, DV]

    # 7. Normalise and store.
    if lse_ptr is not None:
        lse = log_sum_exp(top, weight, NATURAL=True)  # [M]
        tl.store(lse_ptr + row.to(tl.int64) * length + queries, lse, mask=exist)
    out = normalised(weight, out)  # [M, DV]
    out_ptr += batch * out_stride_b + head * out_stride_h + first.to(tl.int64) * out_stride_l
    out_tile = tl.arange(0, BLOCK_M)[:, None] * out_stride_l + value_dims[None, :]  # [M, DV]
    out_mask = exist[:, None] & (value_dims < VALUE_DIM)[None, :]  # [M, DV]
    tl.store(out_ptr + out_tile, out.to(out_ptr.dtype.element_ty), mask=out_mask)
