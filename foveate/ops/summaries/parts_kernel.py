"""Function of the Triton kernels of :func:`attend_summaries`: merges the parts of the output that programs wrote."""

import triton
import triton.language as tl

from foveate.ops.gpu.softmax import LOWEST, merge, store_part


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
    parts,
    splits,
    AT_ONCE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Merge the parts ``part_out [parts, num_q_heads, Dv]`` of ``q_heads [M]``, in the last of ``splits`` programs to
    arrive here, always in the same order."""
    tl.debug_barrier()  # all threads have written before the program counts as ready
    ready = tl.atomic_add(arrived_ptr + tl.program_id(0), 1, sem="acq_rel")
    if ready == splits - 1:
        top, weight = tl.full(q_heads.shape, LOWEST, tl.float32), tl.zeros(q_heads.shape, tl.float32)
        out = tl.zeros([q_heads.shape[0], BLOCK_DV], tl.float32)
        dims, turn = tl.arange(0, BLOCK_DV), tl.arange(0, AT_ONCE)
        for first in tl.range(0, parts, AT_ONCE):
            part = first + turn
            at = part.to(tl.int64)[:, None] * num_q_heads + q_heads[None, :]
            mask = (part < parts)[:, None] & exist[None, :]
            # past the L1 cache, since other programs of this launch have written some
            lse = tl.load(part_lse_ptr + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
            tile = part_out_ptr + at[:, :, None] * VALUE_DIM + dims[None, None, :]
            there = mask[:, :, None] & (dims < VALUE_DIM)[None, None, :]
            outs = tl.load(tile, mask=there, other=0.0, cache_modifier=".cg")
            top, weight, out = merge(outs, lse, top, weight, out)
        store_part(out_ptr, lse_ptr, q_heads, exist, top, weight, out, VALUE_DIM, NATURAL=True)
