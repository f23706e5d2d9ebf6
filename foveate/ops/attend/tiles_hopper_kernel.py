"""Attention of prompt queries in tiles that share their keys, on Hopper: Gluon kernel of :func:`attend_tiles`.

A program works on 128 rows at a time, queries of one tile times heads of a group, so that a gathered key and its value
serve all 128 rows. Two warpgroups own half of the rows each and keep their outputs in registers. While the matrix units
multiply values by the weights of one block of keys, the warpgroup takes the exponentials of the next block
(FlashAttention-3, Shah et al. 2024, arXiv:2407.08608). A third warpgroup gathers keys and values ahead of both, and
starts to gather the next tile's keys while they finish the current tile.
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
from foveate.ops.attend.tiles_hopper_gather_kernel import gather, place_of_item, places_in_use
from foveate.ops.gpu.tiles import multiprocessors

_LOG2E = gl.constexpr(1.4426950408889634)
_LOWEST = gl.constexpr(-3.4e38)
"""Where a running maximum starts: finite, so that a query which has seen no key yet rescales its past by 1."""

ROWS = 64
"""Rows of a warpgroup."""
_RINGS = {64: (128, 5), 128: (128, 3), 256: (64, 2)}
"""By head dim, padded: the keys of a block, and the number of blocks that shared memory holds."""
_AT_ONCE = 32
"""Rows of queries, keys or values that one asynchronous copy gathers."""
_REGISTERS = {64: (216, 72), 128: (216, 72), 256: (232, 48)}
"""By head dim, padded: the registers of a thread that multiplies, and of a thread that gathers."""
_DTYPES = (torch.bfloat16, torch.float16)


def fits(q: Tensor, k: Tensor, v: Tensor, *, tile: int, scaling: float) -> bool:
    """Whether the kernel supports these arguments: the rows fill more than one warpgroup, and 16 bytes of a key can be
    read at a time.

    Args:
        q, k, v, tile, scaling: as for :func:`attend_tiles`.
    """
    return (
        q.dtype in _DTYPES
        and q.shape[3] == v.shape[3]
        and q.shape[3] % 8 == 0
        and 32 < q.shape[3] <= max(_RINGS)
        and q.shape[1] // k.shape[1] * tile > ROWS
        and q.numel() > 0
        and scaling > 0
        and all(x.stride(3) == 1 and not x.data_ptr() % 16 for x in (q, k, v))
        and not any(step % 16 for x in (q, k, v) for step in x.stride()[:3])
    )


def attend_tiles(q, k, v, indices, starts, counts, out, lse, *, tile, logits, offset, heads):
    """See :func:`foveate.ops.attend.tiles.attend_tiles`; the arguments must satisfy :func:`fits`.

    Repeats are equal bit for bit. ``starts`` and ``counts`` are contiguous. The kernel writes the output to ``out`` and
    the log-sum-exp to ``lse``, fp32 ``[B, Hq, Lq]``, contiguous; where ``lse`` is None, it computes none.
    """
    batch, num_heads, length, dim = q.shape
    num_kv_heads = k.shape[1]
    group, tiles = num_heads // num_kv_heads, counts.shape[2]
    parts = triton.cdiv(group * tile, 2 * ROWS)
    items = batch * num_kv_heads * tiles * parts
    block_d = next(width for width in _RINGS if dim <= width)
    keys, stages = _RINGS[block_d]
    _attend_tiles_on_hopper[(min(items, multiprocessors(q.device)),)](
        q, k, v, indices, starts, counts, heads, logits.sinks, out, lse,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *indices.stride(), *out.stride()[:3],
        0 if logits.sinks is None else logits.sinks.stride(0),
        items, num_kv_heads, group, tile, tiles, parts, length, offset, logits.scaling * _LOG2E.value,
        MAPPED=heads is not None, SINKS=logits.sinks is not None, LSE=lse is not None,
        SIZES=(ROWS, dim, block_d, keys, stages, _AT_ONCE), REGISTERS=_REGISTERS[block_d], num_warps=4,
    )  # fmt: skip
    return Attended(out, lse)


@gluon.jit
def _hide(products, block, limits, KEYS: gl.constexpr):
    """``products [R, N]`` of one block, -inf at the keys whose place in the tile's list is after the row's
    ``limits [R]``."""
    LOGITS: gl.constexpr = products.type.layout
    place = block * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, LOGITS))  # [N]
    return gl.where(place[None, :] <= limits[:, None], products, float("-inf"))  # [R, N]


@gluon.jit
def _weigh(products, top, weight, scale):
    """A step of the online softmax over ``products [R, N]``, with ``top [R]`` and ``weight [R]`` so far.

    Returns the weights ``p [R, N]`` of the block, the factors ``fade [R]`` that rescale earlier weights, and the new
    ``top [R]`` and ``weight [R]``.
    """
    higher = gl.maximum(top, gl.max(products, 1) * scale)  # [R]
    p = gl.exp2(products * scale - higher[:, None])  # [R, N]
    fade = gl.exp2(top - higher)  # [R]
    return p, fade, higher, weight * fade + gl.sum(p, 1)  # [R, N], [R], [R], [R]


@gluon.jit
def _step(
    turn, block, last, q, k_tiles, v_tiles, q_empty, k_full, k_empty, v_full, v_empty, out, p, top, weight, scale,
    limits, nothing,
    HIDES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Multiplies the queries with the keys of one block, and meanwhile adds the values of the block read before it.

    Reads ``q [R, D]``, the block's keys ``[N, D]`` and the earlier block's values ``[N, D]``, whose weights are ``p [R,
    N]``. Returns the new ``out [R, D]``, the weights ``[R, N]`` of this block, ``top [R]`` and ``weight [R]``.
    """
    # 1. Start both products: queries with the keys of this block, weights with the values of the block before.
    OF_ROW: gl.constexpr = gl.SliceLayout(1, out.type.layout)
    stage, before = turn % STAGES, (turn - 1) % STAGES
    mbarrier.wait(k_full.index(stage), turn // STAGES & 1)
    fence_async_shared()
    products = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)  # [R, N]
    mbarrier.wait(v_full.index(before), (turn - 1) // STAGES & 1)
    fence_async_shared()
    adding = warpgroup_mma(p, v_tiles.index(before), out, is_async=True)  # [R, D]
    # 2. Take the exponentials of this block while the product with the values runs.
    products = warpgroup_mma_wait(1, deps=(products,))  # [R, N]
    mbarrier.arrive(k_empty.index(stage), count=1)
    mbarrier.arrive(q_empty, count=1, pred=last)
    if HIDES:
        products = _hide(products, block, limits, KEYS)  # [R, N]
    weights, fade, top, weight = _weigh(products, top, weight, scale)  # [R, N], [R], [R], [R]
    # 3. Wait for the output, free the values and rescale the output to the new maxima.
    out, p = warpgroup_mma_wait(0, deps=(adding, p))  # [R, D], [R, N]
    mbarrier.arrive(v_empty.index(before), count=1)
    out = out * gl.convert_layout(fade, OF_ROW)[:, None]  # [R, D]
    return out, gl.convert_layout(weights.to(k_tiles.dtype), p.type.layout), top, weight  # [R, D], [R, N], [R], [R]


@gluon.jit
def _attend(
    count_ptr, heads_ptr, sink_ptr, out_ptr, lse_ptr,
    out_stride_b, out_stride_h, out_stride_l, sink_stride,
    items, num_kv_heads, group, tile, tiles, parts, length, offset, scale, q_tiles, k_tiles, v_tiles, q_full, q_empty,
    k_full, k_empty, v_full, v_empty,
    WHICH: gl.constexpr, MAPPED: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr, SIZES: gl.constexpr,
):  # fmt: skip
    """Attention of one of the two warpgroups, which is number ``WHICH``.

    It owns half of the rows of each item that the program owns, and writes these rows of ``out`` and, with ``LSE``, of
    ``lse``. It reads the blocks that :func:`gather` copies, from the last block of the tile's list of keys to the first
    block, with an online softmax in fp32 to the base 2. The list holds the chosen keys and then the tile's own keys,
    so only the blocks read first hold keys that the causal mask hides.

    Shapes: R = ROWS of the warpgroup, N = KEYS of a block, D = BLOCK_D dimensions, S = STAGES of the ring of blocks.
    """
    # 1. Name the layouts of registers, and look up the count of the first item's places.
    ROWS: gl.constexpr = SIZES[0]
    DIM: gl.constexpr = SIZES[1]
    BLOCK_D: gl.constexpr = SIZES[2]
    KEYS: gl.constexpr = SIZES[3]
    STAGES: gl.constexpr = SIZES[4]
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    OF_LOGITS: gl.constexpr = gl.SliceLayout(1, LOGITS)
    OF_ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    STORED: gl.constexpr = _four_together(BLOCK_D)
    FIRST: gl.constexpr = WHICH * ROWS
    q = q_tiles.slice(FIRST, ROWS, dim=0)  # [R, D]
    nothing = gl.zeros([ROWS, KEYS], gl.float32, LOGITS)  # [R, N]
    in_use = places_in_use(gl.program_id(0), count_ptr, heads_ptr, items, num_kv_heads, tiles, parts, MAPPED)
    turn, lap = 0, 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        # 2. Find the item's tile, head and blocks, and look up the count of the next item's places.
        row, t, part = place_of_item(item, tiles, parts)
        batch, head = (row // num_kv_heads).to(gl.int64), (row % num_kv_heads).to(gl.int64)
        used = in_use[1]
        in_use = places_in_use(
            item + gl.num_programs(0), count_ptr, heads_ptr, items, num_kv_heads, tiles, parts, MAPPED
        )
        start = (offset // tile + t) * tile
        own = gl.minimum(tile, offset + length - start)
        blocks = gl.cdiv(used + own, KEYS)
        whole = used // KEYS  # blocks that hold chosen keys alone: every row sees all of their keys
        limits = used + (part * (2 * ROWS) + FIRST + gl.arange(0, ROWS, OF_LOGITS)) % tile  # [R]
        top = gl.full([ROWS], _LOWEST, gl.float32, OF_LOGITS)  # [R]
        weight = gl.zeros([ROWS], gl.float32, OF_LOGITS)  # [R]
        out = gl.zeros([ROWS, BLOCK_D], gl.float32, OUT)  # [R, D]
        # 3. Multiply the queries with the last block of keys and take its exponentials.
        mbarrier.wait(q_full, lap & 1)
        mbarrier.wait(k_full.index(turn % STAGES), turn // STAGES & 1)
        fence_async_shared()
        keys = k_tiles.index(turn % STAGES).permute((1, 0))  # [D, N]
        products = warpgroup_mma(q, keys, nothing, use_acc=False, is_async=True)  # [R, N]
        products = warpgroup_mma_wait(0, deps=(products,))  # [R, N]
        mbarrier.arrive(k_empty.index(turn % STAGES), count=1)
        mbarrier.arrive(q_empty, count=1, pred=blocks == 1)
        products = _hide(products, blocks - 1, limits, KEYS)  # [R, N]
        weights, _, top, weight = _weigh(products, top, weight, scale)  # [R, N], [R], [R]
        p = gl.convert_layout(weights.to(k_tiles.dtype), WEIGHTS)  # [R, N]
        turn += 1
        # 4. Read the other blocks that hold keys of the tile itself, and then the blocks of chosen keys alone.
        # fmt: off
        for step in range(1, blocks - whole):
            # [R, D], [R, N], [R], [R]
            out, p, top, weight = _step(
                turn, blocks - 1 - step, step == blocks - 1, q, k_tiles, v_tiles, q_empty, k_full, k_empty, v_full,
                v_empty, out, p, top, weight, scale, limits, nothing, True, KEYS,
                STAGES)
            turn += 1
        for step in range(blocks - whole, blocks):
            # [R, D], [R, N], [R], [R]
            out, p, top, weight = _step(
                turn, blocks - 1 - step, step == blocks - 1, q, k_tiles, v_tiles, q_empty, k_full, k_empty, v_full,
                v_empty, out, p, top, weight, scale, limits, nothing, False, KEYS,
                STAGES)
            turn += 1
        # fmt: on
        # 5. Add the values of the block that was read last.
        before = (turn - 1) % STAGES
        mbarrier.wait(v_full.index(before), (turn - 1) // STAGES & 1)
        fence_async_shared()
        adding = warpgroup_mma(p, v_tiles.index(before), out, is_async=True)  # [R, D]
        out, p = warpgroup_mma_wait(0, deps=(adding, p))  # [R, D], [R, N]
        mbarrier.arrive(v_empty.index(before), count=1)
        lap += 1

        # 6. Add the attention sinks, each a logit without a value.
        if SINKS:
            in_tile = part * (2 * ROWS) + FIRST + gl.arange(0, ROWS, OF_LOGITS)  # [R]
            member = head * group + gl.where(in_tile < group * tile, in_tile // tile, 0)  # [R]
            sink = gl.load(sink_ptr + member * sink_stride).to(gl.float32) * _LOG2E  # [R]
            higher = gl.maximum(top, sink)  # [R]
            fade = gl.exp2(top - higher)  # [R]
            weight = weight * fade + gl.exp2(sink - higher)  # [R]
            share = fade / weight  # [R]
            top = higher  # [R]
        else:
            share = 1 / weight  # [R]
        # 7. Store the log-sum-exp, normalise the output and store it.
        if LSE:
            in_tile = part * (2 * ROWS) + FIRST + gl.arange(0, ROWS, OF_LOGITS)  # [R]
            query = start - offset + in_tile % tile  # [R]
            exist = (in_tile < group * tile) & (query >= 0) & (query < length)  # [R]
            lse_row = (batch * num_kv_heads + head) * group + in_tile // tile  # [R]
            gl.store(lse_ptr + lse_row * length + query, (top + gl.log2(weight)) / _LOG2E, mask=exist)
        out = out * gl.convert_layout(share, OF_ROW)[:, None]  # [R, D]
        out = gl.convert_layout(out.to(out_ptr.dtype.element_ty), STORED)  # [R, D]
        in_tile = part * (2 * ROWS) + FIRST + gl.arange(0, ROWS, gl.SliceLayout(1, STORED))  # [R]
        query = start - offset + in_tile % tile  # [R]
        exist = (in_tile < group * tile) & (query >= 0) & (query < length)  # [R]
        member = head * group + in_tile // tile  # [R]
        out_rows = member * out_stride_h + query.to(gl.int64) * out_stride_l  # [R]
        dims = gl.arange(0, BLOCK_D, gl.SliceLayout(0, STORED))  # [D]
        out_base = out_ptr + batch * out_stride_b
        gl.store(out_base + out_rows[:, None] + dims[None, :], out, mask=exist[:, None] & (dims < DIM)[None, :])


@gluon.constexpr_function
def _four_together(dim):
    """A layout in which a thread stores 8 bytes of a row at once.

    Every row stays in the warp that has it in the accumulator, so that the conversion needs no shared memory.
    """
    registers = [[0, 1], [0, 2], [8, 0]] + [[0, 16 << i] for i in range((dim // 16).bit_length() - 1)]
    lanes = [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, dim])


@gluon.jit(do_not_specialize=["items", "num_kv_heads", "group", "tile", "tiles", "parts", "length", "offset"])
def _attend_tiles_on_hopper(
    q_ptr, k_ptr, v_ptr, index_ptr, start_ptr, count_ptr, heads_ptr, sink_ptr, out_ptr, lse_ptr,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    index_stride_b, index_stride_h, index_stride_k, out_stride_b, out_stride_h, out_stride_l, sink_stride,
    items, num_kv_heads, group, tile, tiles, parts, length, offset, scale,
    MAPPED: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr, SIZES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Attention of prompt queries over the keys chosen for their tile and the tile's own keys; a persistent kernel.

    An item is a part of a tile, ``2 * ROWS`` rows of one KV head. Row r of a tile is query ``r % tile`` of the group's
    head ``r // tile``. A program owns the items ``program_id``, ``program_id + num_programs`` and so on; there is at
    most one program to a multiprocessor. For each item it writes the rows of ``out [B, Hq, Lq, D]``, whose last stride
    is 1, and with ``LSE`` also of ``lse [B, Hq, Lq]``, contiguous and natural. ``scale`` includes log2(e).

    ``SIZES`` holds the rows of a warpgroup, the head dim, the padded head dim, the keys of a block, the blocks that
    shared memory holds, and the rows that one asynchronous copy gathers.

    Two warpgroups run :func:`_attend`, the third runs :func:`gather`. They share this memory and these barriers:

    - ``q_tiles``, ``k_tiles``, ``v_tiles``: the queries of an item, and rings of blocks of keys and values, filled by
      :func:`gather`;
    - ``lists``: the keys of two blocks, which :func:`gather` alone uses;
    - ``.._full`` and ``.._empty``: whether a buffer has been written and whether its readers have finished with it.

    Shapes: R = ROWS of a warpgroup, N = KEYS of a block, D = BLOCK_D dimensions, S = STAGES of a ring.
    """
    # 1. Allocate the shared memory.
    ROWS: gl.constexpr = SIZES[0]
    BLOCK_D: gl.constexpr = SIZES[2]
    KEYS: gl.constexpr = SIZES[3]
    STAGES: gl.constexpr = SIZES[4]
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q_tiles = gl.allocate_shared_memory(dtype, [1, 2 * ROWS, BLOCK_D], LAYOUT)  # [1, 2 * R, D]
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, BLOCK_D], LAYOUT)  # [S, N, D]
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, BLOCK_D], LAYOUT)  # [S, N, D]
    lists = gl.allocate_shared_memory(gl.int32, [2, KEYS], gl.SwizzledSharedLayout(1, 1, 1, [0]))  # [2, N]
    # 2. Allocate the barriers and set how many arrivals complete a phase.
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=128)  # the threads of the warpgroup that gathers
    mbarrier.init(q_empty, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=128)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=128)
        mbarrier.init(v_empty.index(stage), count=2)
    # 3. Start the three warpgroups.
    # fmt: off
    gl.warp_specialize([
        (_attend, (count_ptr, heads_ptr, sink_ptr, out_ptr, lse_ptr, out_stride_b, out_stride_h, out_stride_l,
                   sink_stride, items, num_kv_heads, group, tile, tiles, parts, length, offset, scale,
                   q_tiles.index(0), k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                   0, MAPPED, SINKS, LSE, SIZES)),
        (_attend, (count_ptr, heads_ptr, sink_ptr, out_ptr, lse_ptr, out_stride_b, out_stride_h, out_stride_l,
                   sink_stride, items, num_kv_heads, group, tile, tiles, parts, length, offset, scale,
                   q_tiles.index(0), k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                   1, MAPPED, SINKS, LSE, SIZES)),
        (gather, (q_ptr, k_ptr, v_ptr, index_ptr, start_ptr, count_ptr, heads_ptr, q_stride_b, q_stride_h, q_stride_l,
                   k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l, index_stride_b,
                   index_stride_h, index_stride_k, items, num_kv_heads, group, tile, tiles, parts, length, offset,
                   lists, q_tiles.index(0), k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                   MAPPED, SIZES)),
    ], [4, 4], [REGISTERS[0], REGISTERS[1]])
    # fmt: on
