"""Functions of the Triton kernels of :func:`attend_summaries`: merge the parts of the output that programs wrote."""

import triton
import triton.language as tl

from foveate.ops.gpu.softmax import LOWEST, merge, store_part


@triton.jit
def merge_parts(
    found_ptr,
    found_lse_ptr,
    row,
    exist,
    rows,
    begin,
    end,
    left_out,
    top,
    weight,
    out,
    AT_ONCE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Add parts ``begin .. end - 1`` of ``found [.., rows, Dv]``, except those in ``left_out [ROOM]``, to the running
    softmax of query heads ``row [M]``, always in the same order.

    Loads bypass the L1 cache, since other programs of the same launch may have written the parts.
    """
    dims, turn = tl.arange(0, out.shape[1]), tl.arange(0, AT_ONCE)
    for first in tl.range(begin, end, AT_ONCE):
        part = first + turn
        counts = (part < end) & (tl.sum((part[:, None] == left_out[None, :]).to(tl.int32), 1) == 0)
        at, mask = part.to(tl.int64)[:, None] * rows + row[None, :], counts[:, None] & exist[None, :]
        lse = tl.load(found_lse_ptr + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
        tile = found_ptr + at[:, :, None] * VALUE_DIM + dims[None, None, :]
        there = mask[:, :, None] & (dims < VALUE_DIM)[None, None, :]
        found = tl.load(tile, mask=there, other=0.0, cache_modifier=".cg")
        top, weight, out = merge(found, lse, top, weight, out)
    return top, weight, out


@triton.jit
def finish(
    found_ptr,
    found_lse_ptr,
    arrived_ptr,
    out_ptr,
    lse_ptr,
    row,
    exist,
    rows,
    begin,
    end,
    splits,
    AT_ONCE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Merge parts ``begin .. end - 1`` of query heads ``row``, in the last of ``splits`` programs to arrive here."""
    tl.debug_barrier()  # all threads have written before the program counts as ready
    ready = tl.atomic_add(arrived_ptr + tl.program_id(0), 1, sem="acq_rel")
    if ready == splits - 1:
        none = tl.full([1], -1, tl.int32)
        top, weight = tl.full(row.shape, LOWEST, tl.float32), tl.zeros(row.shape, tl.float32)
        out = tl.zeros([row.shape[0], BLOCK_DV], tl.float32)
        top, weight, out = merge_parts(
            found_ptr, found_lse_ptr, row, exist, rows, begin, end, none, top, weight, out, AT_ONCE, VALUE_DIM
        )
        store_part(out_ptr, lse_ptr, row, exist, top, weight, out, VALUE_DIM, NATURAL=True)
