"""The warpgroup of the kernel of :func:`attend_selected` on Hopper that gathers queries and keys ahead of use."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier


@gluon.jit
def place_of_item(item, num_kv_heads, parts, length):
    """Row, KV head, part of its heads and query of an item; neighbouring items are neighbouring queries."""
    part, query = item % parts, item // parts % length
    row = item // (parts * length)
    return (row // num_kv_heads).to(gl.int64), (row % num_kv_heads).to(gl.int64), part, query.to(gl.int64)


@gluon.jit
def gather(
    q_ptr, k_ptr, recent_ptr, index_ptr,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l,
    recent_stride_b, recent_stride_h, recent_stride_l, index_stride_b, index_stride_h, index_stride_l, index_stride_k,
    items, num_kv_heads, group, parts, length, places, window, offset, q_tile, k_tiles, q_full, q_empty, full, empty,
    HEADS: gl.constexpr, DIM: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Copies queries and keys to shared memory ahead of use.

    The warpgroup walks over the same items as the two warpgroups that multiply. For each item, a query, it fills
    ``q_tile [H, D]`` and then the buffers ``k_tiles [2, N, D]`` in turn, a block of keys each: first the blocks of the
    selection, then the blocks of the window, and an empty block where their number is odd. Places without a key get 0.

    It runs ahead: it fills a buffer as soon as the buffer's barrier ``empty`` says that both warpgroups have finished
    with it, and announces it with ``full``. Each half of a buffer's dimensions has barriers of its own, since the
    output of each half belongs to one warpgroup.

    Shapes: H = HEADS, D = DIM, N = KEYS of a block, R = ROWS that are copied at a time, E = HALF of the dimensions.
    """
    # 1. Lay out the copies: 16 bytes to a thread, a row of 512 bytes to a warp.
    HALF: gl.constexpr = DIM // 2
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, COPY))  # [R]
    dims = gl.arange(0, HALF, gl.SliceLayout(0, COPY))  # [E]
    of_selection = gl.cdiv(places, KEYS)
    blocks = of_selection + gl.cdiv(window, KEYS)
    turn, lap = 0, 0  # blocks and items so far, which give the barriers' phases
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        batch, head, part, query = place_of_item(item, num_kv_heads, parts, length)
        # 2. Copy the queries of the item, when both warpgroups have finished with the item before.
        mbarrier.wait(q_empty, (lap & 1) ^ 1)
        q_base = q_ptr + batch * q_stride_b + query * q_stride_l
        for half in gl.static_range(2):
            for first in gl.static_range(0, HEADS, ROWS):
                member = part * HEADS + first + rows  # [R]
                exist = member < group  # [R]
                of_head = (head * group + gl.where(exist, member, 0)) * q_stride_h  # [R]
                # [R, E]
                async_copy.async_copy_global_to_shared(
                    q_tile.slice(first, ROWS, dim=0).slice(half * HALF, HALF, dim=1),
                    q_base + of_head[:, None] + (half * HALF + dims)[None, :],
                    mask=exist[:, None],
                )
        async_copy.mbarrier_arrive(q_full, increment_count=False)
        # 3. Copy the blocks of keys.
        index_base = index_ptr + batch * index_stride_b + head * index_stride_h + query * index_stride_l
        k_base = k_ptr + batch * k_stride_b + head * k_stride_h
        recent_base = recent_ptr + batch * recent_stride_b + head * recent_stride_h
        oldest = offset + query.to(gl.int32) + 1 - window
        for block in range(2 * gl.cdiv(blocks, 2)):
            stage = turn & 1
            # 3a. Find the slots of the block's keys, in the selection or in the window.
            chosen = block < of_selection
            base = gl.where(chosen, k_base, recent_base)
            step = gl.where(chosen, k_stride_l, recent_stride_l)
            keys = ()
            for first in gl.static_range(0, KEYS, ROWS):
                place = block * KEYS + first + rows  # [R]
                key = gl.load(index_base + place * index_stride_k, mask=place < places, other=-1).to(gl.int32)  # [R]
                recent = (block - of_selection) * KEYS + first + rows  # [R]
                # KEYS / ROWS tiles [R]
                keys += (gl.where(chosen, key, gl.where(recent < window, oldest + recent, -1)),)
            # 3b. Copy each half of the dimensions, when its part of the buffer is free.
            for half in gl.static_range(2):
                mbarrier.wait(empty.index(2 * stage + half), (turn // 2 & 1) ^ 1)
                for piece in gl.static_range(KEYS // ROWS):
                    slots = gl.where(keys[piece] >= 0, keys[piece], 0).to(gl.int64) * step  # [R]
                    # [R, E]
                    async_copy.async_copy_global_to_shared(
                        k_tiles.index(stage).slice(piece * ROWS, ROWS, dim=0).slice(half * HALF, HALF, dim=1),
                        base + slots[:, None] + (half * HALF + dims)[None, :],
                        mask=(keys[piece] >= 0)[:, None],
                    )
                async_copy.mbarrier_arrive(full.index(2 * stage + half), increment_count=False)
            turn += 1
        lap += 1
