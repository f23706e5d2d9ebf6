"""Attention of queries that each have their own selection of keys, on Hopper: Gluon kernel of :func:`attend_selected`.

It is for 64 heads of 512 dimensions that share keys, where the keys are also the values. Three warpgroups share a
query. Two of them multiply: each keeps half of the output's dimensions in registers. Of every two blocks of keys each
computes the softmax weights of one block and hands them to the other warpgroup through shared memory, so that one
multiplies while the other takes exponentials. The third warpgroup gathers keys ahead of both, also the keys of the next
query.
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
"""The only number of heads in a program and the only head dim that the kernel supports."""
_KEYS = 64
"""Keys of a block."""
_ROWS = 32
"""Keys that are gathered at a time."""
_REGISTERS = (216, 72)
"""Registers of a thread that multiplies, and of a thread that gathers."""
_DTYPES = (torch.bfloat16, torch.float16)


def fits(q: Tensor, k: Tensor, recent_k: Tensor, value_dim: int, shared: bool, places: int) -> bool:
    """Whether the kernel does this case: Hopper, queries that fill it, and memory that can be read 16 bytes at a time.

    Args:
        q, k: as for :func:`attend_selected`.
        recent_k: the window's keys, or ``k`` again.
        value_dim: dimensions of values.
        shared: whether values are keys.
        places: selected keys and keys of the window together.
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

    Keys are values. ``recent_k`` holds the keys of the window, or is ``k`` again. ``indices`` is
    ``[B, Hkv or 1, Lq, K]``. Repeats are equal bit for bit. The output is laid out as ``[B, Lq, Hq, Dv]``.
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
    """Attention over all keys of an item, for half of the output's dimensions; warpgroup ``WHICH`` of the two that
    multiply.

    The warpgroup owns the dimensions ``WHICH * E .. (WHICH + 1) * E - 1`` of the output of each item, up to 64 heads of
    one query. Warpgroup 0 computes the weights of even blocks, warpgroup 1 the weights of odd blocks, and each
    multiplies the weights of both with its half of the values. Warpgroup 1 starts an odd block from the maxima that
    warpgroup 0 found in the even block before it, and warpgroup 0 takes over the maxima of the odd block, so both
    rescale their outputs alike.

    It reads the blocks that :func:`gather` copies, in ascending order, with an online softmax in fp32 to the base 2.
    Each warpgroup sums the weights of its own blocks; the two sums are added at the end of an item. Warpgroup 0 alone
    writes the log-sum-exp.

    Shapes: H = HEADS, N = KEYS of a block, D = DIM, E = HALF of the dimensions.
    """
    # 1. Name the layouts of registers.
    HALF: gl.constexpr = DIM // 2
    OTHER: gl.constexpr = 1 - WHICH
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    OF_HEAD: gl.constexpr = gl.SliceLayout(1, OUT)
    OF_LOGITS: gl.constexpr = gl.SliceLayout(1, LOGITS)
    STORED: gl.constexpr = _eight_together()
    columns = gl.arange(0, KEYS, gl.SliceLayout(0, LOGITS))  # [N]
    nothing = gl.zeros([HEADS, KEYS], gl.float32, LOGITS)  # [H, N]
    of_selection = gl.cdiv(places, KEYS)
    pairs = gl.cdiv(of_selection + gl.cdiv(window, KEYS), 2)
    turn, lap = 0, 0  # pairs of blocks and items so far, whose lowest bits are the barriers' phases
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        # 2. Start the online softmax of an item.
        batch, head, part, query = place_of_item(item, num_kv_heads, parts, length)
        index_base = index_ptr + batch * index_stride_b + head * index_stride_h + query * index_stride_l
        oldest = offset + query.to(gl.int32) + 1 - window
        top = gl.full([HEADS], LOWEST, gl.float32, OF_LOGITS)  # [H]
        weight = gl.zeros([HEADS], gl.float32, OF_LOGITS)  # [H]
        out = gl.zeros([HEADS, HALF], gl.float32, OUT)  # [H, E]
        mbarrier.wait(q_full, lap & 1)
        # 3. Read the blocks of keys in pairs, an even block and an odd one.
        for pair in range(pairs):
            phase = turn & 1
            # 3a. Multiply the queries with this warpgroup's block, one half of the dimensions after the other. ``zero``
            # is always 0, which the compiler cannot know: so it computes addresses anew and does not keep them in
            # registers, which are scarce.
            zero = turn >> 30
            q, mine = q_tiles.index(zero), k_tiles.index(WHICH + zero)  # [H, D], [N, D]
            my_values = mine.slice(WHICH * HALF, HALF, dim=1)  # [N, E]
            other_values = k_tiles.index(OTHER + zero).slice(WHICH * HALF, HALF, dim=1)  # [N, E]
            mbarrier.wait(full.index(2 * WHICH), phase)
            fence_async_shared()
            # [H, N]
            products = warpgroup_mma(
                q.slice(0, HALF, dim=1), mine.slice(0, HALF, dim=1).permute((1, 0)), nothing, use_acc=False,
                is_async=True,
            )  # fmt: skip
            mbarrier.wait(full.index(2 * WHICH + 1), phase)
            fence_async_shared()
            # [H, N]
            products = warpgroup_mma(
                q.slice(HALF, HALF, dim=1), mine.slice(HALF, HALF, dim=1).permute((1, 0)), products, is_async=True
            )
            # 3b. Meanwhile find which of the block's places hold a key.
            block = 2 * pair + WHICH
            chosen = block < of_selection
            place = block * KEYS + columns  # [N]
            key = gl.load(index_base + place * index_stride_k, mask=place < places, other=-1).to(gl.int32)  # [N]
            recent = (block - of_selection) * KEYS + columns  # [N]
            key = gl.where(chosen, key, gl.where(recent < window, oldest + recent, -1))  # [N]
            products = warpgroup_mma_wait(0, deps=(products,))  # [H, N]
            mbarrier.arrive(q_empty, count=1, pred=pair == pairs - 1)
            logits = gl.where((key >= 0)[None, :], products * scale, float("-inf"))  # [H, N]
            # 3c. Warpgroup 1 takes over the even block's maxima and starts to add that block's values, so that this
            # product runs during its own exponentials.
            if WHICH == 1:
                mbarrier.wait(p_full.index(OTHER), phase)
                fade = fades.index(OTHER).load(OF_LOGITS)  # [H]
                top = tops.index(OTHER).load(OF_LOGITS)  # [H]
                weight = weight * fade  # [H]
                out = out * gl.convert_layout(fade, OF_HEAD)[:, None]  # [H, E]
                mbarrier.wait(full.index(2 * OTHER + WHICH), phase)
                fence_async_shared()
                adding = warpgroup_mma(p_tiles.index(OTHER), other_values, out, is_async=True)  # [H, E]
            # 3d. Take the exponentials of this warpgroup's block, and hand its weights, rescaling factors and maxima to
            # the other warpgroup.
            higher = gl.maximum(top, gl.max(logits, 1))  # [H]
            p = gl.exp2(logits - higher[:, None])  # [H, N]
            fade = gl.exp2(top - higher)  # [H]
            weight = weight * fade + gl.sum(p, 1)  # [H]
            top = higher  # [H]
            p = p.to(k_tiles.dtype)  # [H, N]
            mbarrier.wait(p_empty.index(WHICH), phase ^ 1)
            p_tiles.index(WHICH).store(p)
            fades.index(WHICH).store(fade)
            tops.index(WHICH).store(top)
            fence_async_shared()
            mbarrier.arrive(p_full.index(WHICH), count=1)
            # 3e. Add the values of this warpgroup's block, and free its half of the buffer's dimensions.
            if WHICH == 1:
                out = warpgroup_mma_wait(0, deps=(adding,))  # [H, E]
                mbarrier.arrive(empty.index(2 * OTHER + WHICH), count=1)
                mbarrier.arrive(p_empty.index(OTHER), count=1)
            out = out * gl.convert_layout(fade, OF_HEAD)[:, None]  # [H, E]
            out = warpgroup_mma(gl.convert_layout(p, WEIGHTS), my_values, out, is_async=True)  # [H, E]
            out = warpgroup_mma_wait(0, deps=(out,))  # [H, E]
            mbarrier.arrive(empty.index(2 * WHICH + WHICH), count=1)
            # 3f. Warpgroup 0 takes over the odd block's maxima and adds that block's values.
            if WHICH == 0:
                mbarrier.wait(p_full.index(OTHER), phase)
                fade = fades.index(OTHER).load(OF_LOGITS)  # [H]
                top = tops.index(OTHER).load(OF_LOGITS)  # [H]
                weight = weight * fade  # [H]
                out = out * gl.convert_layout(fade, OF_HEAD)[:, None]  # [H, E]
                mbarrier.wait(full.index(2 * OTHER + WHICH), phase)
                fence_async_shared()
                out = warpgroup_mma(p_tiles.index(OTHER), other_values, out, is_async=True)  # [H, E]
                out = warpgroup_mma_wait(0, deps=(out,))  # [H, E]
                mbarrier.arrive(empty.index(2 * OTHER + WHICH), count=1)
                mbarrier.arrive(p_empty.index(OTHER), count=1)
            turn += 1

        # 4. Add the sums of both warpgroups, in the same order in both.
        sums.index(WHICH).store(weight)
        mbarrier.arrive(sum_full.index(WHICH), count=1)
        mbarrier.wait(sum_full.index(OTHER), lap & 1)
        if WHICH == 0:
            weight = weight + sums.index(OTHER).load(OF_LOGITS)  # [H]
        else:
            weight = sums.index(OTHER).load(OF_LOGITS) + weight  # [H]
        lap += 1

        # 5. Find the heads of the item, and add the attention sinks, each a logit without a value.
        member = part * HEADS + gl.arange(0, HEADS, gl.SliceLayout(1, LOGITS))  # [H]
        exist = member < group  # [H]
        of_head = head * group + gl.where(exist, member, 0)  # [H]
        if SINKS:
            sink = gl.load(sink_ptr + of_head * sink_stride).to(gl.float32) * LOG2E  # [H]
            higher = gl.maximum(top, sink)  # [H]
            fade = gl.exp2(top - higher)  # [H]
            weight = weight * fade + gl.exp2(sink - higher)  # [H]
            top = higher  # [H]
            share = fade / gl.where(weight == 0, 1.0, weight)  # [H]
        else:
            share = 1 / gl.where(weight == 0, 1.0, weight)  # [H]
        # 6. Normalise and store; warpgroup 0 stores the log-sum-exp.
        if WHICH == 0:
            lse = gl.where(weight == 0, float("-inf"), (top + gl.log2(weight)) / LOG2E)  # [H]
            gl.store(lse_ptr + (batch * num_kv_heads * group + of_head) * length + query, lse, mask=exist)
        out = out * gl.convert_layout(share, OF_HEAD)[:, None]  # [H, E]
        out = gl.convert_layout(out.to(out_ptr.dtype.element_ty), STORED)  # [H, E]
        member = part * HEADS + gl.arange(0, HEADS, gl.SliceLayout(1, STORED))  # [H]
        exist = member < group  # [H]
        of_head = (head * group + gl.where(exist, member, 0)) * out_stride_h  # [H]
        dims = WHICH * HALF + gl.arange(0, HALF, gl.SliceLayout(0, STORED))  # [E]
        out_base = out_ptr + batch * out_stride_b + query * out_stride_l
        gl.store(out_base + of_head[:, None] + dims[None, :], out, mask=exist[:, None])


@gluon.constexpr_function
def _eight_together():
    """A layout in which a thread stores 16 bytes of a row at once.

    Every row stays in the warp that has it in the accumulator, so that the conversion needs no shared memory.
    """
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
    """Attention of queries over their selected keys and their windows; a persistent kernel.

    An item is one query of up to 64 heads of a GQA group in one row. A program owns the items ``program_id``,
    ``program_id + num_programs`` and so on; there is at most one program to a multiprocessor. For each item it writes
    the heads' rows of ``out [B, Hq, Lq, D]``, whose last stride is 1, and of ``lse [B, Hq, Lq]``, contiguous and
    natural. ``scale`` includes log2(e).

    Two warpgroups run :func:`_attend`, the third runs :func:`gather`. They share this memory and these barriers:

    - ``q_tiles``, ``k_tiles``: queries, and two blocks of keys, filled by :func:`gather`;
    - ``p_tiles``, ``fades``, ``tops``: each warpgroup's softmax weights, rescaling factors and maxima, for the other
      warpgroup;
    - ``sums``: each warpgroup's sum of weights;
    - ``.._full`` and ``.._empty``: whether a buffer has been written and whether its readers have finished with it.
      ``full`` and ``empty`` are numbered by block and half of the dimensions, ``2 * block + half``.

    Shapes: H = HEADS, N = KEYS of a block, D = DIM.
    """
    # 1. Allocate the shared memory.
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q_tiles = gl.allocate_shared_memory(dtype, [1, HEADS, DIM], LAYOUT)  # [1, H, D]
    k_tiles = gl.allocate_shared_memory(dtype, [2, KEYS, DIM], LAYOUT)  # [2, N, D]
    p_tiles = gl.allocate_shared_memory(dtype, [2, HEADS, KEYS], LAYOUT)  # [2, H, N]
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    fades = gl.allocate_shared_memory(gl.float32, [2, HEADS], FLAT)  # [2, H]
    tops = gl.allocate_shared_memory(gl.float32, [2, HEADS], FLAT)  # [2, H]
    sums = gl.allocate_shared_memory(gl.float32, [2, HEADS], FLAT)  # [2, H]
    # 2. Allocate the barriers and set how many arrivals complete a phase.
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    sum_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=128)  # the threads of the warpgroup that gathers
    mbarrier.init(q_empty, count=2)
    for which in gl.static_range(4):
        mbarrier.init(full.index(which), count=128)
        mbarrier.init(empty.index(which), count=1)
    for which in gl.static_range(2):
        mbarrier.init(p_full.index(which), count=1)
        mbarrier.init(p_empty.index(which), count=1)
        mbarrier.init(sum_full.index(which), count=1)
    # 3. Start the three warpgroups.
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
