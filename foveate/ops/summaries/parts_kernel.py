"""Functions of the Triton kernels of :func:`attend_summaries`: merge the parts of the output that programs wrote."""

import triton
import triton.language as tl

from foveate.ops.gpu.softmax import LOWEST, merge, store_part


@triton.jit
def merge_parts(
    part_out_ptr,
    part_lse_ptr,
    q_heads,
    exist,
    num_q_heads,
    begin,
    end,
    left_out,
    top,
    weight,
    out,
    AT_ONCE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Add parts ``begin .. end - 1`` of ``part_out [.., num_q_heads, Dv]``, except those in ``left_out [ROOM]``, to the
    running softmax of query heads ``q_heads [M]``, always in the same order.

    Loads bypass the L1 cache, since other programs of the same launch may have written the parts.
    """
    dims, turn = tl.arange(0, out.shape[1]), tl.arange(0, AT_ONCE)
    for first in tl.range(begin, end, AT_ONCE):
        part = first + turn
        counts = (part < end) & (tl.sum((part[:, None] == left_out[None, :]).to(tl.int32), 1) == 0)
        at, mask = part.to(tl.int64)[:, None] * num_q_heads + q_heads[None, :], counts[:, None] & exist[None, :]
        lse = tl.load(part_lse_ptr + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
        tile = part_out_ptr + at[:, :, None] * VALUE_DIM + dims[None, None, :]
        there = mask[:, :, None] & (dims < VALUE_DIM)[None, None, :]
        outs = tl.load(tile, mask=there, other=0.0, cache_modifier=".cg")
        top, weight, out = merge(outs, lse, top, weight, out)
    return top, weight, out


@triton.jit
def finish(
    part_out_ptr,
    part_lse_ptr,
    arrived_ptr,
    out_ptr,
    lse_ptr,
    q_heads,
    exist,
    num_q_heads,
    begin,
    end,
    splits,
    AT_ONCE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Merge parts ``begin .. end - 1`` of ``q_heads``, in the last of ``splits`` programs to arrive here."""
    tl.debug_barrier()  # all threads have written before the program counts as ready
    ready = tl.atomic_add(arrived_ptr + tl.program_id(0), 1, sem="acq_rel")
    if ready == splits - 1:
        none = tl.full([1], -1, tl.int32)
        top, weight = tl.full(q_heads.shape, LOWEST, tl.float32), tl.zeros(q_heads.shape, tl.float32)
        out = tl.zeros([q_heads.shape[0], BLOCK_DV], tl.float32)
        top, weight, out = merge_parts(
            part_out_ptr,
            part_lse_ptr,
            q_heads,
            exist,
            num_q_heads,
            begin,
            end,
            none,
            top,
            weight,
            out,
            AT_ONCE,
            VALUE_DIM,
        )
        store_part(out_ptr, lse_ptr, q_heads, exist, top, weight, out, VALUE_DIM, NATURAL=True)
