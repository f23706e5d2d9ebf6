"""Attention in tiles merged with a mean key of each tile: Triton kernel of :func:`merge_means`."""

import torch
import triton
import triton.language as tl

from foveate.ops.attend.attended import Attended
from foveate.ops.dispatch import UnsupportedError
from foveate.ops.gpu.block_table import FLOATS
from foveate.ops.gpu.softcap import capped, constant
from foveate.ops.gpu.softmax import LOG2E
from foveate.ops.gpu.tiles import padded

_ROWS = 32
"""Rows of a program, which read the same mean key."""


def merge_means(q, attended_out, lse, means, *, tile, logits, offset=0, out=None):
    """See :func:`foveate.ops.attend.means.merge_means`. One pass over queries and outputs; new output is laid out
    as ``[B, Lq, Hq, Dv]``."""
    batch, num_heads, length, dim = q.shape
    num_kv_heads, tiles, value_dim = means.v.shape[1:]
    if not q.dtype == attended_out.dtype or q.dtype not in FLOATS:
        raise UnsupportedError(f"queries in {q.dtype} with outputs in {attended_out.dtype}")
    if means.k.dtype != torch.float32:
        raise UnsupportedError(f"means in {means.k.dtype}")
    out = q.new_empty(batch, length, num_heads, value_dim).transpose(1, 2) if out is None else out
    lse, total = lse.contiguous(), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    group = num_heads // num_kv_heads
    parts = triton.cdiv(group * tile, _ROWS)
    if q.numel():
        _merge_means[tiles * parts, batch * num_kv_heads](
            q, attended_out, lse, *means, out, total,
            q.stride(), attended_out.stride(), means.k.stride(), means.v.stride(), means.numbers.stride(), out.stride(),
            num_kv_heads, group, tile, parts, length, offset % tile, logits.scaling * LOG2E.value,
            SOFTCAP=constant(logits.softcap), DIM=dim, VALUE_DIM=value_dim, BLOCK_D=padded(dim),
            BLOCK_DV=padded(value_dim), BLOCK_M=_ROWS, num_warps=4,
        )  # fmt: skip
    return Attended(out, total)


@triton.jit(do_not_specialize=["num_kv_heads", "group", "tile", "parts", "length", "lead"])
def _merge_means(
    q_ptr, given_ptr, lse_ptr, mean_k_ptr, mean_v_ptr, number_ptr, out_ptr, total_ptr,
    q_strides, given_strides, mean_k_strides, mean_v_strides, number_strides, out_strides,
    num_kv_heads, group, tile, parts, length, lead, scale,
    SOFTCAP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Writes ``out [B, Hq, Lq, Dv]``, which may be the memory of ``given``, and ``total [B, Hq, Lq]``, contiguous like
    ``lse``; ``scale`` includes log2(e). The first tile begins ``lead`` positions before the first query.

    A program owns ``BLOCK_M`` rows of one tile and KV head: row r of a tile is query ``r % tile`` of the group's head
    ``r // tile``.

    1. The logit of each row to the tile's mean key, and the logarithm of the number of keys that it stands for.
    2. The log-sum-exp of both parts, and their shares.
    3. The rows' outputs, read and written once.
    """
    q_stride_b, q_stride_h, q_stride_l, q_stride_d = q_strides
    given_stride_b, given_stride_h, given_stride_l, given_stride_d = given_strides
    k_stride_b, k_stride_h, k_stride_t, k_stride_d = mean_k_strides
    v_stride_b, v_stride_h, v_stride_t, v_stride_d = mean_v_strides
    number_stride_b, number_stride_h, number_stride_t = number_strides
    out_stride_b, out_stride_h, out_stride_l, out_stride_d = out_strides
    t, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    batch, head = (tl.program_id(1) // num_kv_heads).to(tl.int64), (tl.program_id(1) % num_kv_heads).to(tl.int64)
    rows = part * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    query = t * tile - lead + rows % tile
    exist = (rows < group * tile) & (query >= 0) & (query < length)
    query, member = tl.where(exist, query, 0), tl.where(exist, head * group + rows // tile, 0)

    # 1. Logits of the mean key
    mean_k_ptr += batch * k_stride_b + head * k_stride_h + t * k_stride_t
    mean_k = tl.load(mean_k_ptr + dims * k_stride_d, mask=dims < DIM, other=0.0)  # [D]
    q_tile = (batch * q_stride_b + member * q_stride_h + query * q_stride_l)[:, None] + dims[None, :] * q_stride_d
    q = tl.load(q_ptr + q_tile, mask=exist[:, None] & (dims < DIM)[None, :], other=0.0).to(tl.float32)  # [M, D]
    logits = capped(tl.sum(q * mean_k[None, :], 1) * scale, SOFTCAP)  # [M]
    number = tl.load(number_ptr + batch * number_stride_b + head * number_stride_h + t * number_stride_t)
    logits = tl.where(number > 0, logits + tl.log2(tl.maximum(number, 1).to(tl.float32)), float("-inf"))

    # 2. Shares
    place = (batch * num_kv_heads * group + member) * length + query  # [M]
    natural = tl.load(lse_ptr + place, mask=exist, other=0.0)
    lse = natural * LOG2E
    top = tl.maximum(lse, logits)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(lse - top) + tl.exp2(logits - top)
    weight = tl.where(weight == 0, 1.0, weight)
    share, of_mean = tl.exp2(lse - top) / weight, tl.exp2(logits - top) / weight
    total = tl.where(number > 0, (top + tl.log2(weight)) / LOG2E, natural)
    tl.store(total_ptr + place, total, mask=exist)

    # 3. Outputs
    mean_v_ptr += batch * v_stride_b + head * v_stride_h + t * v_stride_t
    mean_v = tl.load(mean_v_ptr + value_dims * v_stride_d, mask=value_dims < VALUE_DIM, other=0.0)  # [Dv]
    mask = exist[:, None] & (value_dims < VALUE_DIM)[None, :]
    at = (batch * given_stride_b + member * given_stride_h + query * given_stride_l)[:, None]
    given = tl.load(given_ptr + at + value_dims[None, :] * given_stride_d, mask=mask, other=0.0)  # [M, Dv]
    out = given.to(tl.float32) * share[:, None] + mean_v[None, :] * of_mean[:, None]
    at = (batch * out_stride_b + member * out_stride_h + query * out_stride_l)[:, None]
    tl.store(out_ptr + at + value_dims[None, :] * out_stride_d, out.to(out_ptr.dtype.element_ty), mask=mask)
