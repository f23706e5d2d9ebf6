"""Attention of queries with selections of their own on Hopper: Gluon kernel of :func:`attend_selected`.

For 64 heads of 512 dimensions that share keys, which are the values too. Two warpgroups each have half of the output's
dimensions in registers. Of every two blocks of keys each makes the weights of one, and hands them to the other, so that
one multiplies while the other takes exponentials; a third one gathers keys ahead of both, those of the next query
included.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from foveate.ops.attend.attended import Attended
from foveate.ops.attend.selected_hopper_gather_kernel import gather, place_of_item
from foveate.ops.gpu.softmax import LOG2E, LOWEST

HEADS, DIM = 64, 512
"""What the kernel is for."""
_KEYS = 64
"""Keys of a block."""
_ROWS = 32
"""Keys that are gathered at a time."""
_REGISTERS = (216, 72)
"""Of a thread that multiplies, and of one that gathers."""
_DTYPES = (torch.bfloat16, torch.float16)


def fits(q: Tensor, k: Tensor, recent_k: Tensor, value_dim: int, shared: bool, places: int) -> bool:
    """Whether the kernel does this case: Hopper, queries that fill it, and memory that can be read 16 bytes at a time.

    Args:
        q, k: as for :func:`attend_selected`.
        recent_k: the window's keys, or ``k`` again.
        value_dim: dimensions of values.
        shared: whether values are keys.
        places: selected keys and those of the window.
    """
    items = q.shape[0] * q.shape[2] * k.shape[1]
    return (
        shared
        and places > 0
        and q.dtype in _DTYPES
        and q.shape[3] == value_dim == DIM
        and q.shape[1] // k.shape[1] > HEADS // 2
        and items >= torch.cuda.get_device_properties(q.device).multi_processor_count
        and all(x.stride(3) == 1 and not x.data_ptr() % 16 for x in (q, k, recent_k))
        and not any(step % 16 for x in (q, k, recent_k) for step in x.stride()[:3])
    )


def attend_selected(q, k, recent_k, indices, *, scaling, window, offset, sinks):
    """See :func:`foveate.ops.attend.selected.attend_selected`; only where :func:`fits`.

    Keys are values; ``recent_k`` are those of the window, or ``k`` again; ``indices [B, Hkv or 1, Lq, K]``. Repeats are
    equal bit for bit. The output is laid out as ``[B, Lq, Hq, Dv]``.
    """
    batch, num_heads, length, _ = q.shape
    num_kv_heads, places = k.shape[1], indices.shape[3]
    group = num_heads // num_kv_heads
    out = q.new_empty(batch, length, num_heads, DIM).transpose(1, 2)
    lse = q.new_empty(batch, num_heads, length, dtype=torch.float32)
    parts = triton.cdiv(group, HEADS)
    items = batch * num_kv_heads * length * parts
    _attend_selected[(min(items, torch.cuda.get_device_properties(q.device).multi_processor_count),)](
        q, k, recent_k, indices, sinks, out, lse,
        *q.stride()[:3], *k.stride()[:3], *recent_k.stride()[:3], indices.stride(0),
        indices.stride(1) if indices.shape[1] > 1 else 0, indices.stride(2), indices.stride(3), *out.stride()[:3],
        0 if sinks is None else sinks.stride(0),
        items, num_kv_heads, group, parts, length, places, window, offset, scaling * LOG2E.value,
        SINKS=sinks is not None, HEADS=HEADS, DIM=DIM, KEYS=_KEYS, ROWS=_ROWS, REGISTERS=_REGISTERS, num_warps=4,
    )  # fmt: skip
    return Attended(out, lse)


@gluon.jit
def _attend(
    index_ptr, sink_ptr, out_ptr, lse_ptr,
    index_stride_b, index_stride_h, index_stride_l, index_stride_k, out_stride_b, out_stride_h, out_stride_l,
    sink_stride,
    items, num_kv_heads, group, parts, length, places, window, offset, scale, q_tiles, k_tiles, p_tiles, fades, tops,
    sums, q_full, q_empty, full, empty, p_full, p_empty, sum_full,
    WHICH: gl.constexpr, SINKS: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Attention over all keys, for half of the output's dimensions. The first warpgroup makes the weights of even
    blocks, the second those of odd ones, which it begins with the maxima that the first one has found."""
    HALF: gl.constexpr = DIM // 2
    OTHER: gl.constexpr = 1 - WHICH
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    OF_HEAD: gl.constexpr = gl.SliceLayout(1, OUT)
    OF_LOGITS: gl.constexpr = gl.SliceLayout(1, LOGITS)
    STORED: gl.constexpr = _eight_together()
    columns = gl.arange(0, KEYS, gl.SliceLayout(0, LOGITS))
    nothing = gl.zeros([HEADS, KEYS], gl.float32, LOGITS)
    of_selection = gl.cdiv(places, KEYS)
    pairs = gl.cdiv(of_selection + gl.cdiv(window, KEYS), 2)
    turn, lap = 0, 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        batch, head, part, query = place_of_item(item, num_kv_heads, parts, length)
        index_base = index_ptr + batch * index_stride_b + head * index_stride_h + query * index_stride_l
        oldest = offset + query.to(gl.int32) + 1 - window
        top = gl.full([HEADS], LOWEST, gl.float32, OF_LOGITS)
        weight = gl.zeros([HEADS], gl.float32, OF_LOGITS)
        out = gl.zeros([HEADS, HALF], gl.float32, OUT)
        mbarrier.wait(q_full, lap & 1)
        for pair in range(pairs):
            phase = turn & 1
            zero = turn >> 30  # addresses that seem to change are not kept in registers that are short
            q, mine = q_tiles.index(zero), k_tiles.index(WHICH + zero)
            my_values = mine.slice(WHICH * HALF, HALF, dim=1)
            other_values = k_tiles.index(OTHER + zero).slice(WHICH * HALF, HALF, dim=1)
            mbarrier.wait(full.index(2 * WHICH), phase)
            fence_async_shared()
            products = warpgroup_mma(
                q.slice(0, HALF, dim=1), mine.slice(0, HALF, dim=1).permute((1, 0)), nothing, use_acc=False,
                is_async=True,
            )  # fmt: skip
            mbarrier.wait(full.index(2 * WHICH + 1), phase)
            fence_async_shared()
            products = warpgroup_mma(
                q.slice(HALF, HALF, dim=1), mine.slice(HALF, HALF, dim=1).permute((1, 0)), products, is_async=True
            )
            block = 2 * pair + WHICH
            chosen = block < of_selection
            place = block * KEYS + columns
            key = gl.load(index_base + place * index_stride_k, mask=place < places, other=-1).to(gl.int32)
            recent = (block - of_selection) * KEYS + columns
            key = gl.where(chosen, key, gl.where(recent < window, oldest + recent, -1))
            products = warpgroup_mma_wait(0, deps=(products,))
            mbarrier.arrive(q_empty, count=1, pred=pair == pairs - 1)
            logits = gl.where((key >= 0)[None, :], products * scale, float("-inf"))
            if WHICH == 1:
                mbarrier.wait(p_full.index(OTHER), phase)
                fade = fades.index(OTHER).load(OF_LOGITS)
                top = tops.index(OTHER).load(OF_LOGITS)
                weight = weight * fade
                out = out * gl.convert_layout(fade, OF_HEAD)[:, None]
                mbarrier.wait(full.index(2 * OTHER + WHICH), phase)
                fence_async_shared()
                adding = warpgroup_mma(p_tiles.index(OTHER), other_values, out, is_async=True)
            higher = gl.maximum(top, gl.max(logits, 1))
            p = gl.exp2(logits - higher[:, None])
            fade = gl.exp2(top - higher)
            weight = weight * fade + gl.sum(p, 1)
            top = higher
            p = p.to(k_tiles.dtype)
            mbarrier.wait(p_empty.index(WHICH), phase ^ 1)
            p_tiles.index(WHICH).store(p)
            fades.index(WHICH).store(fade)
            tops.index(WHICH).store(top)
            fence_async_shared()
            mbarrier.arrive(p_full.index(WHICH), count=1)
            if WHICH == 1:
                out = warpgroup_mma_wait(0, deps=(adding,))
                mbarrier.arrive(empty.index(2 * OTHER + WHICH), count=1)
                mbarrier.arrive(p_empty.index(OTHER), count=1)
            out = out * gl.convert_layout(fade, OF_HEAD)[:, None]
            out = warpgroup_mma(gl.convert_layout(p, WEIGHTS), my_values, out, is_async=True)
            out = warpgroup_mma_wait(0, deps=(out,))
            mbarrier.arrive(empty.index(2 * WHICH + WHICH), count=1)
            if WHICH == 0:
                mbarrier.wait(p_full.index(OTHER), phase)
                fade = fades.index(OTHER).load(OF_LOGITS)
                top = tops.index(OTHER).load(OF_LOGITS)
                weight = weight * fade
                out = out * gl.convert_layout(fade, OF_HEAD)[:, None]
                mbarrier.wait(full.index(2 * OTHER + WHICH), phase)
                fence_async_shared()
                out = warpgroup_mma(p_tiles.index(OTHER), other_values, out, is_async=True)
                out = warpgroup_mma_wait(0, deps=(out,))
                mbarrier.arrive(empty.index(2 * OTHER + WHICH), count=1)
                mbarrier.arrive(p_empty.index(OTHER), count=1)
            turn += 1

        sums.index(WHICH).store(weight)
        mbarrier.arrive(sum_full.index(WHICH), count=1)
        mbarrier.wait(sum_full.index(OTHER), lap & 1)
        if WHICH == 0:
            weight = weight + sums.index(OTHER).load(OF_LOGITS)
        else:
            weight = sums.index(OTHER).load(OF_LOGITS) + weight
        lap += 1

        member = part * HEADS + gl.arange(0, HEADS, gl.SliceLayout(1, LOGITS))
        exist = member < group
        of_head = head * group + gl.where(exist, member, 0)
        if SINKS:
            sink = gl.load(sink_ptr + of_head * sink_stride).to(gl.float32) * LOG2E
            higher = gl.maximum(top, sink)
            fade = gl.exp2(top - higher)
            weight = weight * fade + gl.exp2(sink - higher)
            top = higher
            share = fade / gl.where(weight == 0, 1.0, weight)
        else:
            share = 1 / gl.where(weight == 0, 1.0, weight)
        if WHICH == 0:
            lse = gl.where(weight == 0, float("-inf"), (top + gl.log2(weight)) / LOG2E)
            gl.store(lse_ptr + (batch * num_kv_heads * group + of_head) * length + query, lse, mask=exist)
        out = out * gl.convert_layout(share, OF_HEAD)[:, None]
        out = gl.convert_layout(out.to(out_ptr.dtype.element_ty), STORED)
        member = part * HEADS + gl.arange(0, HEADS, gl.SliceLayout(1, STORED))
        exist = member < group
        of_head = (head * group + gl.where(exist, member, 0)) * out_stride_h
        dims = WHICH * HALF + gl.arange(0, HALF, gl.SliceLayout(0, STORED))
        out_base = out_ptr + batch * out_stride_b + query * out_stride_l
        gl.store(out_base + of_head[:, None] + dims[None, :], out, mask=exist[:, None])


@gluon.constexpr_function
def _eight_together():
    """The accumulator's rows and warps, but 16 bytes of a row in one thread: stored without shared memory."""
    registers = [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64], [0, 128]]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, 256])


@gluon.jit(do_not_specialize=["items", "num_kv_heads", "parts", "length", "places", "window", "offset"])
def _attend_selected(
    q_ptr, k_ptr, recent_ptr, index_ptr, sink_ptr, out_ptr, lse_ptr,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l,
    recent_stride_b, recent_stride_h, recent_stride_l, index_stride_b, index_stride_h, index_stride_l, index_stride_k,
    out_stride_b, out_stride_h, out_stride_l, sink_stride,
    items, num_kv_heads, group, parts, length, places, window, offset, scale,
    SINKS: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Writes ``out [B, Hq, Lq, D]``, whose last stride is 1, and ``lse [B, Hq, Lq]``, contiguous; ``scale`` includes
    log2(e). A program takes every so many-th of the items: queries, with 64 heads at most."""
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q_tiles = gl.allocate_shared_memory(dtype, [1, HEADS, DIM], LAYOUT)
    k_tiles = gl.allocate_shared_memory(dtype, [2, KEYS, DIM], LAYOUT)
    p_tiles = gl.allocate_shared_memory(dtype, [2, HEADS, KEYS], LAYOUT)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    fades = gl.allocate_shared_memory(gl.float32, [2, HEADS], FLAT)
    tops = gl.allocate_shared_memory(gl.float32, [2, HEADS], FLAT)
    sums = gl.allocate_shared_memory(gl.float32, [2, HEADS], FLAT)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    sum_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=128)  # the threads that gather
    mbarrier.init(q_empty, count=2)
    for which in gl.static_range(4):
        mbarrier.init(full.index(which), count=128)
        mbarrier.init(empty.index(which), count=1)
    for which in gl.static_range(2):
        mbarrier.init(p_full.index(which), count=1)
        mbarrier.init(p_empty.index(which), count=1)
        mbarrier.init(sum_full.index(which), count=1)
    # fmt: off
    gl.warp_specialize([
        (_attend, (index_ptr, sink_ptr, out_ptr, lse_ptr, index_stride_b, index_stride_h, index_stride_l,
                   index_stride_k, out_stride_b, out_stride_h, out_stride_l, sink_stride, items, num_kv_heads, group,
                   parts, length, places, window, offset, scale, q_tiles, k_tiles, p_tiles, fades, tops, sums,
                   q_full, q_empty, full, empty, p_full, p_empty, sum_full, 0, SINKS, HEADS, DIM, KEYS)),
        (_attend, (index_ptr, sink_ptr, out_ptr, lse_ptr, index_stride_b, index_stride_h, index_stride_l,
                   index_stride_k, out_stride_b, out_stride_h, out_stride_l, sink_stride, items, num_kv_heads, group,
                   parts, length, places, window, offset, scale, q_tiles, k_tiles, p_tiles, fades, tops, sums,
                   q_full, q_empty, full, empty, p_full, p_empty, sum_full, 1, SINKS, HEADS, DIM, KEYS)),
        (gather, (q_ptr, k_ptr, recent_ptr, index_ptr, q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h,
                   k_stride_l, recent_stride_b, recent_stride_h, recent_stride_l, index_stride_b, index_stride_h,
                   index_stride_l, index_stride_k, items, num_kv_heads, group, parts, length, places, window, offset,
                   q_tiles.index(0), k_tiles, q_full, q_empty, full, empty, HEADS, DIM, KEYS, ROWS)),
    ], [4, 4], [REGISTERS[0], REGISTERS[1]])
    # fmt: on
