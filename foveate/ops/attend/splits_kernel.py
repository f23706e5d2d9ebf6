"""Merging splits: Triton kernel that merges the outputs of programs that shared the keys of one head (FlashDecoding,
Dao et al. 2023)."""

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
    """Merges the splits of one head of one query by their log-sum-exps, in ascending order.

    A program owns one query of one head in one row. It reads the splits' ``lse [splits * B, Hq, Lq]`` (natural) and
    ``out [splits * B, Hq, Lq, Dv]``, ``BLOCK`` splits at a time, and writes one row of ``out [B, Hq, Lq, Dv]`` and of
    ``lse [B, Hq, Lq]`` (natural). With ``SINKS`` the head's attention sink takes part with its logit and no value.

    ``used [B, Hq / group]``, unless it is None, says how many splits the heads that share keys have, at least 1. The
    other splits may hold anything.

    Shapes: P = BLOCK splits, DV = BLOCK_DV dimensions of values.
    """
    # 1. Find the query, head and row that the program owns.
    query, head = tl.program_id(0) // num_heads, tl.program_id(0) % num_heads
    batch, head, query = tl.program_id(1).to(tl.int64), head.to(tl.int64), query.to(tl.int64)
    dims = tl.arange(0, BLOCK_DV)  # [DV]
    # 2. Start the running softmax, from the attention sink's logit if there is one.
    top, weight, out = tl.full([], LOWEST, tl.float32), 0.0, tl.zeros([BLOCK_DV], tl.float32)  # scalar, scalar, [DV]
    if SINKS:
        top = tl.maximum(tl.load(sink_ptr + head * sink_stride).to(tl.float32) * LOG2E, LOWEST)
        weight = tl.where(top > LOWEST, 1.0, 0.0)
    if used_ptr is not None:
        splits = tl.load(used_ptr + batch * (num_heads // group) + head // group)
    # 3. Merge the splits.
    for first in tl.range(0, splits, BLOCK):
        some = first + tl.arange(0, BLOCK)  # [P]
        exist = some < splits  # [P]
        row = some.to(tl.int64) * batches + batch  # [P]
        lse = tl.load(found_lse_ptr + (row * num_heads + head) * length + query, mask=exist, other=float("-inf"))  # [P]
        found = found_ptr + row * found_stride_b + head * found_stride_h + query * found_stride_l  # [P]
        some_mask = exist[:, None] & (dims < VALUE_DIM)[None, :]  # [P, DV]
        parts = tl.load(found[:, None] + dims[None, :], mask=some_mask, other=0.0)  # [P, DV]
        top, weight, out = merge(parts, lse * LOG2E, top, weight, out)  # scalar, scalar, [DV]
    # 4. Normalise and store.
    out, lse = normalised(weight, out), log_sum_exp(top, weight, NATURAL=True)  # [DV], scalar
    out_ptr += batch * out_stride_b + head * out_stride_h + query * out_stride_l
    tl.store(out_ptr + dims, out.to(out_ptr.dtype.element_ty), mask=dims < VALUE_DIM)
    tl.store(lse_ptr + (batch * num_heads + head) * length + query, lse)
