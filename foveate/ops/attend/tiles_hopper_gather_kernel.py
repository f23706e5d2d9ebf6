"""The warpgroup of the kernel of :func:`attend_tiles` on Hopper that gathers queries, keys and values ahead of use."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier


@gluon.jit
def place_of_item(item, tiles, parts):
    """Batch entry and KV head in one number, tile and part of its rows. Neighbouring items read the same head's keys;
    the last tiles, which have the most keys, come first."""
    return item // (tiles * parts), tiles - 1 - item // parts % tiles, item % parts


@gluon.jit
def places_in_use(item, count_ptr, heads_ptr, items, num_kv_heads, tiles, parts, MAPPED: gl.constexpr):
    """Of an item, the last one at most: the head whose selection it reads, and places in use. Loaded while the item
    before is worked on."""
    row, t, _ = place_of_item(gl.minimum(item, items - 1), tiles, parts)
    source = row % num_kv_heads
    if MAPPED:
        source = gl.load(heads_ptr + source).to(gl.int32)
    of_tile = (row // num_kv_heads * num_kv_heads + source) * tiles + t
    return source, gl.load(count_ptr + of_tile)


@gluon.jit
def _keys_of(block, places, index_base, index_stride_k, used, start, own, KEYS: gl.constexpr):
    """The keys in a block of a tile's list, which are those chosen and then its own; -1 for none."""
    place = block * KEYS + places
    chosen = gl.load(index_base + place.to(gl.int64) * index_stride_k, mask=(place >= 0) & (place < used), other=-1)
    return gl.where(place < used, chosen.to(gl.int32), gl.where(place - used < own, start + place - used, -1))


@gluon.jit
def _copy(
    keys, base, stride, dims, to, full, COPY: gl.constexpr, DIM: gl.constexpr, KEYS: gl.constexpr, AT_ONCE: gl.constexpr
):
    """Fills ``to [KEYS, D]``, a few rows at a time; zeros for keys of -1."""
    for first in gl.static_range(0, KEYS, AT_ONCE):
        key = keys.slice(first, AT_ONCE, dim=0).load(gl.SliceLayout(1, COPY))
        there = key >= 0
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
    """Fills ``q_tile [2 * ROWS, D]`` for every item, and ``k_tiles`` and ``v_tiles [STAGES, KEYS, D]`` block by block,
    the last block of a tile's list first; unused keys are 0. The first keys of an item are gathered before its queries,
    whose buffer is free only when the previous item is done."""
    ROWS: gl.constexpr = SIZES[0]
    DIM: gl.constexpr = SIZES[1]
    BLOCK_D: gl.constexpr = SIZES[2]
    KEYS: gl.constexpr = SIZES[3]
    STAGES: gl.constexpr = SIZES[4]
    AT_ONCE: gl.constexpr = SIZES[5]
    LANES: gl.constexpr = BLOCK_D // 8
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    places = gl.arange(0, KEYS, gl.BlockedLayout([1], [32], [4], [0]))
    rows = gl.arange(0, AT_ONCE, gl.SliceLayout(1, COPY))
    dims = gl.arange(0, BLOCK_D, gl.SliceLayout(0, COPY))
    in_use = places_in_use(gl.program_id(0), count_ptr, heads_ptr, items, num_kv_heads, tiles, parts, MAPPED)
    turn, lap = 0, 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
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
        following = _keys_of(blocks - 1, places, index_base, index_stride_k, used, start, own, KEYS)
        for step in range(blocks):
            keys = lists.index(turn & 1)
            keys.store(following)
            following = _keys_of(blocks - 2 - step, places, index_base, index_stride_k, used, start, own, KEYS)
            stage, phase = turn % STAGES, turn // STAGES & 1
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            _copy(keys, k_base, k_stride_l, dims, k_tiles.index(stage), k_full.index(stage), COPY, DIM, KEYS, AT_ONCE)
            if step == 0:
                mbarrier.wait(q_empty, (lap & 1) ^ 1)
                for first in gl.static_range(0, 2 * ROWS, AT_ONCE):
                    in_tile = part * (2 * ROWS) + first + rows
                    query = start - offset + in_tile % tile
                    exist = (in_tile < group * tile) & (query >= 0) & (query < length)
                    member = head * group + gl.where(exist, in_tile // tile, 0)
                    q_rows = member * q_stride_h + gl.where(exist, query, 0).to(gl.int64) * q_stride_l
                    async_copy.async_copy_global_to_shared(
                        q_tile.slice(first, AT_ONCE, dim=0),
                        q_base + q_rows[:, None] + dims[None, :],
                        mask=exist[:, None] & (dims < DIM)[None, :],
                    )
                async_copy.mbarrier_arrive(q_full, increment_count=False)
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            _copy(keys, v_base, v_stride_l, dims, v_tiles.index(stage), v_full.index(stage), COPY, DIM, KEYS, AT_ONCE)
            turn += 1
        lap += 1
