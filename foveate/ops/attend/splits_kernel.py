"""Attention whose keys were split among programs: Triton kernel that merges what they found (FlashDecoding, Dao et al.
2023)."""

import triton
import triton.language as tl

from foveate.ops.gpu.softmax import LOG2E, LOWEST, log_sum_exp, merge, normalised


@triton.jit(do_not_specialize=["batches", "num_heads", "length", "splits", "group"])
def merge_splits(
    found_ptr, found_lse_ptr, sink_ptr, used_ptr, out_ptr, lse_ptr,
    found_stride_b, found_stride_h, found_stride_l, out_stride_b, out_stride_h, out_stride_l, sink_stride,
    batches, num_heads, length, splits, group,
    SINKS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merges the splits of one head of one query by their log-sum-exps, in their order.

    ``used [B, Hq / group]``, if there is any: how many splits heads that share keys have, at least 1; what is of the
    others may be anything."""
    query, head = tl.program_id(0) // num_heads, tl.program_id(0) % num_heads
    batch, head, query = tl.program_id(1).to(tl.int64), head.to(tl.int64), query.to(tl.int64)
    dims = tl.arange(0, BLOCK_DV)
    top, weight, out = tl.full([], LOWEST, tl.float32), 0.0, tl.zeros([BLOCK_DV], tl.float32)
    if SINKS:
        top = tl.maximum(tl.load(sink_ptr + head * sink_stride).to(tl.float32) * LOG2E, LOWEST)
        weight = tl.where(top > LOWEST, 1.0, 0.0)
    if used_ptr is not None:
        splits = tl.load(used_ptr + batch * (num_heads // group) + head // group)
    for first in tl.range(0, splits, BLOCK):
        some = first + tl.arange(0, BLOCK)
        exist = some < splits
        row = some.to(tl.int64) * batches + batch
        lse = tl.load(found_lse_ptr + (row * num_heads + head) * length + query, mask=exist, other=float("-inf"))
        found = found_ptr + row * found_stride_b + head * found_stride_h + query * found_stride_l
        some_mask = exist[:, None] & (dims < VALUE_DIM)[None, :]
        parts = tl.load(found[:, None] + dims[None, :], mask=some_mask, other=0.0)
        top, weight, out = merge(parts, lse * LOG2E, top, weight, out)
    out, lse = normalised(weight, out), log_sum_exp(top, weight, NATURAL=True)
    out_ptr += batch * out_stride_b + head * out_stride_h + query * out_stride_l
    tl.store(out_ptr + dims, out.to(out_ptr.dtype.element_ty), mask=dims < VALUE_DIM)
    tl.store(lse_ptr + (batch * num_heads + head) * length + query, lse)
