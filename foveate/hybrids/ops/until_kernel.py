"""Attention of a whole prompt to a window and to keys retained from before it: Triton kernels of
:func:`attend_until`."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.hybrids.ops import until as reference
from foveate.ops.attend import window_kernel as of_window
from foveate.ops.attend.attended import Attended
from foveate.ops.dispatch import UnsupportedError
from foveate.ops.gpu.softmax import LOG2E, LOWEST, normalised
from foveate.ops.gpu.tiles import Tile

_FOREVER = tl.constexpr(0x7FFFFFFF)

_SPAN = 256
"""Queries that share a list of retained keys: making a list takes one pass over all earlier keys."""
_SCAN = 1024
"""Keys that a program examines at a time."""


_TILES = {64: Tile(128, 32, num_warps=8, num_stages=3, maxnreg=128)}
"""Tiles that replace the tiles of a window, by the larger of the two head dims, padded."""


def tile_for(dtype: torch.dtype, dim: int) -> Tile:
    """The tile, whose rows are queries times the heads of a group; ``dim`` is the larger of the head dims."""
    if dtype == torch.float32:
        return Tile(16, 16, num_warps=8, num_stages=1)
    return _TILES.get(triton.next_power_of_2(dim)) or of_window.tile_for(dtype, dim)


class Lists(NamedTuple):
    """Retained keys that some of a span's queries see, in the order of their positions."""

    slots: Tensor
    """int32 ``[B, Hkv, spans, room]``"""
    until: Tensor
    """int32 ``[B, Hkv, spans, room]``: for each of these keys, the first query that no longer sees it."""
    first_ends: Tensor
    """int32 ``[B, Hkv, spans, room / block]``: the smallest ``until`` of each block of the list."""
    counts: Tensor
    """int32 ``[B, Hkv, spans]``: how many keys the list should hold. A list whose count exceeds ``room`` is incomplete
    and must not be used."""
    least: Tensor
    """int32 ``[B, Hkv, blocks]``: for each block of keys, the first query that does not see all of its keys."""


def attend_until(q, k, v, until, *, scaling, window=0, retained=0):
    """See :func:`foveate.hybrids.ops.until.attend_until`. Two launches, and nothing waits for the device.

    A program owns a block of queries of all heads of a group, so that a key is read once for them. It reads the keys
    from its first query's window to its last query's own key, a run of whole blocks without a mask. It also reads the
    retained keys before the run that one of a span's queries sees, which the first launch lists. A key belongs to the
    run or to the list, by its place. Where a list has no room for all keys, its queries look at every key before their
    window instead.

    Repeats are equal bit for bit. The output is laid out as ``[B, Lq, Hq, Dv]``.
    """
    reference.check(q, k, v, until, window, retained)
    batch, num_heads, length, dim = q.shape
    num_kv_heads, number, value_dim = v.shape[1:]
    group = num_heads // num_kv_heads
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise UnsupportedError(f"queries in {q.dtype} with keys in {k.dtype} and values in {v.dtype}")
    if max(dim, value_dim) > reference.LARGEST_DIM:
        raise UnsupportedError(f"head dims above {reference.LARGEST_DIM}")
    if not scaling > 0:
        raise UnsupportedError(f"a scaling of {scaling}")
    tile = tile_for(q.dtype, max(dim, value_dim))
    if group > tile.block_m:
        raise UnsupportedError(f"more than {tile.block_m} query heads to a KV head")
    out = q.new_empty(batch, length, num_heads, value_dim).transpose(1, 2)
    if not out.numel():
        return Attended(out)
    until = until.to(torch.int32).contiguous()
    lists = list_retained(until, length, window, retained, tile.block_n)
    each = tile.block_m // group
    _attend_until[batch * num_kv_heads, triton.cdiv(length, each)](
        q, k, v, until, *lists, out,
        q.stride(), k.stride(), v.stride(), out.stride()[:3],
        num_kv_heads, group, length, number, window, lists.slots.shape[2], lists.slots.shape[3], lists.least.shape[2],
        scaling * LOG2E.value,
        SPAN=_SPAN, TAIL=triton.next_power_of_2(_SPAN + tile.block_n),
        WIDE=triton.next_power_of_2(triton.cdiv(window + each, tile.block_n) + 2), DIM=dim, VALUE_DIM=value_dim,
        BLOCK_D=max(16, triton.next_power_of_2(dim)), BLOCK_DV=max(16, triton.next_power_of_2(value_dim)),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, **tile.options,
    )  # fmt: skip
    return Attended(out)


def list_retained(until: Tensor, length: int, window: int, retained: int, block: int) -> Lists:
    """The keys before their windows that queries see, for int32 ``until [B, Hkv, Lk]``, contiguous."""
    batch, heads, number = until.shape
    spans, blocks = triton.cdiv(length, _SPAN), triton.cdiv(number, block)
    room = triton.cdiv(min(retained + _SPAN, number), block) * block  # a span's first query sees retained ones
    slots, ends = torch.empty(2, batch, heads, spans, room, dtype=torch.int32, device=until.device)
    first_ends = until.new_empty(batch, heads, spans, room // block)
    counts, least = until.new_empty(batch, heads, spans), until.new_empty(batch, heads, blocks)
    _list_retained[spans, batch * heads](
        until, slots, ends, first_ends, counts, least, length, number, window, room, blocks, triton.cdiv(blocks, spans),
        SPAN=_SPAN, BLOCK_N=block, SCAN=_SCAN, num_warps=4,
    )  # fmt: skip
    return Lists(slots, ends, first_ends, counts, least)


@triton.jit
def _run_begins(query, length, number, window, BLOCK_N: tl.constexpr):
    """The number of the block of keys with which the window of a query begins."""
    return tl.maximum(number - length + query - window, 0) // BLOCK_N


@triton.jit(do_not_specialize=["length", "number", "window", "blocks", "blocks_each"])
def _list_retained(
    until_ptr, slot_ptr, end_ptr, first_end_ptr, count_ptr, least_ptr,
    length, number, window, room, blocks, blocks_each,
    SPAN: tl.constexpr, BLOCK_N: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Lists the retained keys of one span of queries, see :class:`Lists`, and the ends of some blocks of keys.

    A program owns a span of ``SPAN`` queries of a KV head in a row, and its share of the head's blocks of keys,
    ``blocks_each`` blocks. It reads ``until [B, Hkv, Lk]`` of its blocks, and then of all keys before the window of its
    last query, in ascending order. All outputs are contiguous. A key is retained if some query sees it after it has
    left the query's window.

    Shapes: S = SCAN keys, N = BLOCK_N keys.
    """
    # 1. Find the span, the row and the KV head.
    span, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    spans = tl.num_programs(0)
    until_ptr += row * number
    least_ptr += row * blocks
    slot_ptr += (row * spans + span) * room
    end_ptr += (row * spans + span) * room
    first_end_ptr += (row * spans + span) * (room // BLOCK_N)
    lanes, places = tl.arange(0, SCAN), tl.arange(0, BLOCK_N)  # [S], [N]

    # 2. Find the first query that does not see all keys of a block, for the program's blocks.
    for block in tl.range(span * blocks_each, tl.minimum((span + 1) * blocks_each, blocks)):
        key = block * BLOCK_N + places  # [N]
        end = tl.load(until_ptr + key, mask=key < number, other=0)  # [N]
        tl.store(least_ptr + block, tl.min(end, 0))

    # 3. List the keys that a query of the span sees and that have left the window before it.
    first = span * SPAN
    last = tl.minimum(first + SPAN, length) - 1
    before = _run_begins(last, length, number, window, BLOCK_N) * BLOCK_N
    found = 0
    for begin in tl.range(0, before, SCAN, num_stages=3):
        key = begin + lanes  # [S]
        until = tl.load(until_ptr + key, mask=key < before, other=0)  # [S]
        left = key - (number - length) + window + 1  # [S]; the first query that has the key before its window
        seen = (key < before) & (until > tl.maximum(left, first))  # [S]
        place = found + tl.cumsum(seen.to(tl.int32), 0) - 1  # [S]
        fits = seen & (place < room)  # [S]
        tl.store(slot_ptr + place, key, mask=fits)
        tl.store(end_ptr + place, until, mask=fits)
        found += tl.sum(seen.to(tl.int32), 0)
    tl.store(count_ptr + row * spans + span, found)
    # 4. Find the smallest end in each block of the list.
    tl.debug_barrier()  # other threads have written the ends that a thread reads
    for block in tl.range(0, tl.cdiv(tl.minimum(found, room), BLOCK_N)):
        place = block * BLOCK_N + places  # [N]
        tl.store(first_end_ptr + block, tl.min(tl.load(end_ptr + place, mask=place < found, other=_FOREVER), 0))


@triton.jit(do_not_specialize=["num_kv_heads", "group", "length", "number", "window", "spans", "blocks"])
def _attend_until(
    q_ptr, k_ptr, v_ptr, until_ptr, slot_ptr, end_ptr, first_end_ptr, count_ptr, least_ptr, out_ptr,
    q_strides, k_strides, v_strides, out_strides,
    num_kv_heads, group, length, number, window, spans, room, blocks, scale,
    SPAN: tl.constexpr, TAIL: tl.constexpr, WIDE: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention of one block of queries to the retained keys and to the run of their windows.

    A program owns ``BLOCK_M // group`` consecutive queries of all heads of a group. Row r of a tile is the query
    ``first + r // group`` of the group's head ``r % group``. The program writes their rows of ``out [B, Hq, Lq, Dv]``,
    whose last stride is 1.

    It reads the retained keys before the first window, then the edges of the run of windows, and then the run's middle,
    which needs no mask, each key once, with an online softmax in fp32: repeats are equal bit for bit. ``scale``
    includes log2(e), so exponents are to the base 2.

    Shapes: M = BLOCK_M rows, N = BLOCK_N keys, D = BLOCK_D dimensions of keys, DV = BLOCK_DV dimensions of values, W =
    WIDE blocks of the run, T = TAIL last entries of a list.
    """
    # 1. Unpack the strides, and find the queries and the heads that the program owns.
    q_stride_b, q_stride_h, q_stride_l, q_stride_d = q_strides
    k_stride_b, k_stride_h, k_stride_l, k_stride_d = k_strides
    v_stride_b, v_stride_h, v_stride_l, v_stride_d = v_strides
    out_stride_b, out_stride_h, out_stride_l = out_strides
    each = BLOCK_M // group
    row, first = tl.program_id(0), tl.program_id(1) * each
    batch, head = (row // num_kv_heads).to(tl.int64), (row % num_kv_heads).to(tl.int64)
    last = tl.minimum(first + each, length) - 1
    rows, places = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)  # [M], [N]
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)  # [D], [DV]
    queries, heads = first + rows // group, head * group + rows % group  # [M], [M]
    exist = queries <= last  # [M]
    queries = tl.minimum(queries, last)  # [M]
    lead = number - length

    # 2. Find the run of blocks, from the first window to the last query's own key. All queries see all keys of the
    # run's middle, the blocks ``low .. high - 1``.
    begin = _run_begins(first, length, number, window, BLOCK_N)
    end, high = tl.cdiv(lead + last + 1, BLOCK_N), tl.maximum((lead + first + 1) // BLOCK_N, begin)
    candidates = begin + tl.arange(0, WIDE)  # [W]
    ends = tl.load(least_ptr + row.to(tl.int64) * blocks + candidates, mask=candidates < high, other=_FOREVER)  # [W]
    low = tl.minimum(tl.max(tl.where(ends <= last, candidates + 1, begin), 0), high)

    # 3. Find the retained keys before the run: the list's keys before it, or every key where the list is incomplete.
    # The list is made for a span, whose later queries have later windows, so its last entries may lie in the run.
    of_span = row.to(tl.int64) * spans + first // SPAN
    until_ptr += row.to(tl.int64) * number
    least_ptr += row.to(tl.int64) * blocks
    slot_ptr += of_span * room
    end_ptr += of_span * room
    first_end_ptr += of_span * (room // BLOCK_N)
    found = tl.load(count_ptr + of_span)
    listed = found <= room
    tail = tl.where(listed, found, 0) - 1 - tl.arange(0, TAIL)  # [T]
    late = tl.load(slot_ptr + tail, mask=tail >= 0, other=-1) >= begin * BLOCK_N  # [T]
    earlier = tl.where(listed, found - tl.sum(late.to(tl.int32), 0), begin * BLOCK_N)

    # 4. Load the queries.
    q_ptr += batch * q_stride_b
    # [M, D]
    q_tile = heads[:, None] * q_stride_h + queries.to(tl.int64)[:, None] * q_stride_l + dims[None, :] * q_stride_d
    q = tl.load(q_ptr + q_tile, mask=exist[:, None] & (dims < DIM)[None, :], other=0.0)  # [M, D]
    k_ptr += batch * k_stride_b + head * k_stride_h
    v_ptr += batch * v_stride_b + head * v_stride_h

    # 5. Start the online softmax.
    top = tl.full([BLOCK_M], LOWEST, tl.float32)  # [M]
    weight = tl.zeros([BLOCK_M], tl.float32)  # [M]
    out = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)  # [M, DV]
    apart, edges = tl.cdiv(earlier, BLOCK_N), low - begin + end - high
    retained_ends = tl.where(listed, end_ptr, until_ptr)
    retained_least = tl.where(listed, first_end_ptr, least_ptr)
    # 6. Load the places and ends of the first retained keys. They are loaded one block ahead, so that loads of keys do
    # not wait for places, nor a block for the decision whether it needs a mask.
    # [N]
    following = tl.where(listed, tl.load(slot_ptr + places, mask=(places < earlier) & listed, other=0), places)
    following_ends = tl.load(retained_ends + places, mask=places < earlier, other=0)  # [N]
    following_least = tl.load(retained_least, mask=apart > 0, other=0)
    # 7. Read the keys: the retained keys (part 0), then the run's edges (part 1), then its middle (part 2). Three loops
    # are compiled, so that the last one has no mask.
    for part in tl.static_range(3):
        for step in tl.range(0, apart if part == 0 else (edges if part == 1 else high - low)):
            if part == 0:
                keys, until, least = following, following_ends, following_least  # [N], [N], scalar
                stored = step * BLOCK_N + places < earlier  # [N]
                ragged = (least <= last) | ((step + 1) * BLOCK_N > earlier)
                place = (step + 1) * BLOCK_N + places  # [N]
                # [N]
                following = tl.where(listed, tl.load(slot_ptr + place, mask=(place < earlier) & listed, other=0), place)
                following_ends = tl.load(retained_ends + place, mask=place < earlier, other=0)  # [N]
                following_least = tl.load(retained_least + step + 1, mask=step + 1 < apart, other=0)
            elif part == 1:
                block = begin + step
                keys = tl.where(block < low, block, block - low + high) * BLOCK_N + places  # [N]
                stored = keys < number  # [N]
                until = tl.load(until_ptr + keys, mask=stored, other=0)  # [N]
            else:
                keys = (low + step) * BLOCK_N + places  # [N]
                stored = places >= 0  # [N]
            slots = keys.to(tl.int64)  # [N]
            k_tile = slots[None, :] * k_stride_l + dims[:, None] * k_stride_d  # [D, N]
            k = tl.load(k_ptr + k_tile, mask=stored[None, :] & (dims < DIM)[:, None], other=0.0)  # [D, N]
            logits = tl.dot(q, k, input_precision="ieee")  # [M, N]
            if part == 0:
                if ragged:  # keys before the run are earlier than all queries, so only their ends are compared
                    logits = tl.where(queries[:, None] < until[None, :], logits, float("-inf"))  # [M, N]
            elif part == 1:
                seen = (queries[:, None] < until[None, :]) & ((keys - lead)[None, :] <= queries[:, None])  # [M, N]
                logits = tl.where(seen, logits, float("-inf"))  # [M, N]
            # [M]; the scale is positive, so it can be applied after the maximum
            higher = tl.maximum(top, tl.max(logits, 1) * scale)
            p = tl.exp2(logits * scale - higher[:, None])  # [M, N]
            fade = tl.exp2(top - higher)  # [M]
            v_tile = slots[:, None] * v_stride_l + value_dims[None, :] * v_stride_d  # [N, DV]
            v = tl.load(v_ptr + v_tile, mask=stored[:, None] & (value_dims < VALUE_DIM)[None, :], other=0.0)  # [N, DV]
            out = tl.dot(p.to(v.dtype), v, out * fade[:, None], input_precision="ieee")  # [M, DV]
            weight = weight * fade + tl.sum(p, 1)  # [M]
            top = higher  # [M]

    # 8. Normalise and store.
    out = normalised(weight, out)  # [M, DV]
    out_ptr += batch * out_stride_b
    # [M, DV]
    out_tile = heads[:, None] * out_stride_h + queries.to(tl.int64)[:, None] * out_stride_l + value_dims[None, :]
    out_mask = exist[:, None] & (value_dims < VALUE_DIM)[None, :]  # [M, DV]
    tl.store(out_ptr + out_tile, out.to(out_ptr.dtype.element_ty), mask=out_mask)
