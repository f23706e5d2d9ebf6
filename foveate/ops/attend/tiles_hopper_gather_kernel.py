"""The warpgroup of the kernel of :func:`attend_tiles` on Hopper that gathers queries, keys and values ahead of use."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier


@gluon.jit
def place_of_item(item, tiles, parts):
    """The row of an item, which is batch entry and KV head in one number, its tile and its part of the tile's rows.

    Neighbouring items read the same head's keys. The last tiles of a head, which have the most keys, come first.
    """
    return item // (tiles * parts), tiles - 1 - item // parts % tiles, item % parts


@gluon.jit
def places_in_use(item, count_ptr, heads_ptr, items, num_kv_heads, tiles, parts, MAPPED: gl.constexpr):
    """The head whose selection an item reads, and how many places of that selection are in use.

    Callers look both up for the next item while they work on the item before; after the last item the function answers
    for the last item again.
    """
    row, t, _ = place_of_item(gl.minimum(item, items - 1), tiles, parts)
    source = row % num_kv_heads
    if MAPPED:
        source = gl.load(heads_ptr + source).to(gl.int32)
    of_tile = (row // num_kv_heads * num_kv_heads + source) * tiles + t
    return source, gl.load(count_ptr + of_tile)


@gluon.jit
def _keys_of(block, places, index_base, index_stride_k, used, start, own, KEYS: gl.constexpr):
    """The keys ``[N]`` of one block of a tile's list, which holds the chosen keys and then the tile's own keys; -1 for
    places after the list's end."""
    place = block * KEYS + places  # [N]
    # [N]
    chosen = gl.load(index_base + place.to(gl.int64) * index_stride_k, mask=(place >= 0) & (place < used), other=-1)
    return gl.where(place < used, chosen.to(gl.int32), gl.where(place - used < own, start + place - used, -1))  # [N]


@gluon.jit
def _copy(
    keys, base, stride, dims, to, full, COPY: gl.constexpr, DIM: gl.constexpr, KEYS: gl.constexpr, AT_ONCE: gl.constexpr
):
    """Copies the rows of ``keys [N]`` to ``to [N, D]``, A rows at a time; writes zeros for keys of -1."""
    for first in gl.static_range(0, KEYS, AT_ONCE):
        key = keys.slice(first, AT_ONCE, dim=0).load(gl.SliceLayout(1, COPY))  # [A]
        there = key >= 0  # [A]
        async_copy.async_copy_global_to_shared(
            to.slice(first, AT_ONCE, dim=0),
            base + (gl.where(there, key, 0).to(gl.int64) * stride)[:, None] + dims[None, :],
            mask=there[:, None] & (dims < DIM)[None, :],
        )
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def gather(
    q_ptr, k_ptr, v_ptr, index_ptr, start_ptr, count_ptr, heads_ptr,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    index_stride_b, index_stride_h, index_stride_k,
    items, num_kv_heads, group, tile, tiles, parts, length, offset, lists, q_tile, k_tiles, v_tiles, q_full, q_empty,
    k_full, k_empty, v_full, v_empty,
    MAPPED: gl.constexpr, SIZES: gl.constexpr,
):  # fmt: skip
    """The warpgroup that gathers queries, keys and values for the two warpgroups that attend.

    It works on the items that the program owns. For each item it writes the queries to ``q_tile [2 * R, D]``, and the
    blocks of keys and values in turn to ``k_tiles`` and ``v_tiles [S, N, D]``; unused keys and values are 0. It reads a
    tile's list of keys from its last block to its first block. It gathers an item's first block of keys before the
    queries, because their buffer is free only when the previous item has multiplied its last keys.

    Shapes: N = KEYS of a block, R = ROWS of a warpgroup, D = BLOCK_D dimensions, S = STAGES of a ring, A = AT_ONCE
    rows.
    """
    # 1. Unpack the sizes, and look up the first item's head and places.
    ROWS: gl.constexpr = SIZES[0]
    DIM: gl.constexpr = SIZES[1]
    BLOCK_D: gl.constexpr = SIZES[2]
    KEYS: gl.constexpr = SIZES[3]
    STAGES: gl.constexpr = SIZES[4]
    AT_ONCE: gl.constexpr = SIZES[5]
    LANES: gl.constexpr = BLOCK_D // 8
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    places = gl.arange(0, KEYS, gl.BlockedLayout([1], [32], [4], [0]))  # [N]
    rows = gl.arange(0, AT_ONCE, gl.SliceLayout(1, COPY))  # [A]
    dims = gl.arange(0, BLOCK_D, gl.SliceLayout(0, COPY))  # [D]
    in_use = places_in_use(gl.program_id(0), count_ptr, heads_ptr, items, num_kv_heads, tiles, parts, MAPPED)
    turn, lap = 0, 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        # 2. Find the item's tile, head and blocks, and look up the next item's head and places.
        row, t, part = place_of_item(item, tiles, parts)
        batch, head = (row // num_kv_heads).to(gl.int64), (row % num_kv_heads).to(gl.int64)
        source, used = in_use
        in_use = places_in_use(
            item + gl.num_programs(0), count_ptr, heads_ptr, items, num_kv_heads, tiles, parts, MAPPED
        )
        start = (offset // tile + t) * tile
        own = gl.minimum(tile, offset + length - start)
        index_base = index_ptr + batch * index_stride_b + source.to(gl.int64) * index_stride_h
        index_base += gl.load(start_ptr + t) * index_stride_k
        q_base = q_ptr + batch * q_stride_b
        k_base = k_ptr + batch * k_stride_b + head * k_stride_h
        v_base = v_ptr + batch * v_stride_b + head * v_stride_h
        blocks = gl.cdiv(used + own, KEYS)
        following = _keys_of(blocks - 1, places, index_base, index_stride_k, used, start, own, KEYS)  # [N]
        # 3. Copy the blocks, from the last to the first.
        for step in range(blocks):
            # 3a. Take the keys of this block, and look up the keys of the next block.
            keys = lists.index(turn & 1)  # [N]
            keys.store(following)
            following = _keys_of(blocks - 2 - step, places, index_base, index_stride_k, used, start, own, KEYS)  # [N]
            # 3b. Copy the keys into the ring.
            stage, phase = turn % STAGES, turn // STAGES & 1
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            _copy(keys, k_base, k_stride_l, dims, k_tiles.index(stage), k_full.index(stage), COPY, DIM, KEYS, AT_ONCE)
            # 3c. After the first block of keys, copy the queries.
            if step == 0:
                mbarrier.wait(q_empty, (lap & 1) ^ 1)
                for first in gl.static_range(0, 2 * ROWS, AT_ONCE):
                    in_tile = part * (2 * ROWS) + first + rows  # [A]
                    query = start - offset + in_tile % tile  # [A]
                    exist = (in_tile < group * tile) & (query >= 0) & (query < length)  # [A]
                    member = head * group + gl.where(exist, in_tile // tile, 0)  # [A]
                    q_rows = member * q_stride_h + gl.where(exist, query, 0).to(gl.int64) * q_stride_l  # [A]
                    async_copy.async_copy_global_to_shared(
                        q_tile.slice(first, AT_ONCE, dim=0),
                        q_base + q_rows[:, None] + dims[None, :],
                        mask=exist[:, None] & (dims < DIM)[None, :],
                    )
                async_copy.mbarrier_arrive(q_full, increment_count=False)
            # 3d. Copy the values into the ring.
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            _copy(keys, v_base, v_stride_l, dims, v_tiles.index(stage), v_full.index(stage), COPY, DIM, KEYS, AT_ONCE)
            turn += 1
        lap += 1
