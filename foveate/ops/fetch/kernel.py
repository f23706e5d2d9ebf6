"""Triton kernels of :mod:`foveate.ops.fetch`. They read and write pinned host memory by its addresses."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.ops.fetch.types import OLDEST, HostPages, HotPages, Placed

_BLOCK = 1024
"""Pages or slots that a program of :func:`place_pages` reads at a time."""


def place_pages(pages: Tensor, hot: HotPages) -> Placed:
    """See :func:`foveate.ops.fetch.reference.place_pages`. One launch; a program owns a row.

    The program finds the age from which on slots are given away by bisection, since an age is one of 256 numbers.
    """
    rows, size = hot.holds.shape
    pages, number = pages.contiguous(), pages.shape[1]
    with torch.inference_mode(False):
        blocks, given = torch.empty_like(pages), torch.empty_like(pages)
        counts = torch.empty(2, rows, dtype=torch.int32, device=pages.device)
    tables = (hot.table, hot.holds, hot.chosen, hot.clock)
    sizes = (number, hot.table.shape[1], size)
    _place[rows,](pages, *tables, given, blocks, counts, rows, *sizes, OLDEST=OLDEST, BLOCK=_BLOCK, num_warps=8)
    return Placed(blocks, *counts)


def fetch_pages(pages: Tensor, blocks: Tensor, host: HostPages, hot: HotPages) -> None:
    """See :func:`foveate.ops.fetch.reference.fetch_pages`. One launch; a program owns a place of a row."""
    rows, number = blocks.shape
    dims = hot.keys.shape[3], hot.values.shape[3]
    entries = hot.page_size * max(dims)
    if number:
        _fetch[number, rows](
            pages.contiguous(),
            blocks,
            host.addresses,
            hot.keys,
            hot.values,
            number,
            host.addresses.shape[1],
            host.slots,
            PAGE=hot.page_size,
            DIM=dims[0],
            VALUE_DIM=dims[1],
            ALIGNED=all(dim * hot.keys.itemsize % 16 == 0 for dim in dims),
            BLOCK=min(4096, triton.next_power_of_2(entries)),
            num_warps=4,
        )


def put_both(
    k: Tensor, v: Tensor, slots: Tensor, host: HostPages, hot: HotPages, open_keys: Tensor, open_values: Tensor
) -> None:
    """See :func:`foveate.ops.fetch.reference.put_both`. One launch; a program owns a KV head of a sequence."""
    batch, heads, _, dim = k.shape
    _put[batch * heads,](
        k,
        v,
        slots,
        host.addresses,
        hot.table,
        hot.keys,
        hot.values,
        open_keys,
        open_values,
        *(k.stride(axis) for axis in (0, 1, 3)),
        *(v.stride(axis) for axis in (0, 1, 3)),
        heads,
        hot.table.shape[1],
        host.addresses.shape[1],
        host.slots,
        PAGE=hot.page_size,
        DIM=dim,
        VALUE_DIM=v.shape[3],
        BLOCK=triton.next_power_of_2(max(dim, v.shape[3])),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["rows", "number", "entries", "size"])
def _place(
    pages_ptr,
    table_ptr,
    holds_ptr,
    chosen_ptr,
    clock_ptr,
    given_ptr,
    blocks_ptr,
    counts_ptr,
    rows,
    number,
    entries,
    size,
    OLDEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Finds blocks for the pages that a row's step has chosen and the device does not hold.

    A program owns a row, a KV head of a sequence. It reads the row's choice ``pages [R, P]``, -1 for none, twice: first
    to note the pages in use and to count the missing ones, and at the end to give each missing page a slot. If pages
    are missing, it reads the ``chosen`` steps of the row's slots ten times between: eight times for a bisection of the
    age, once to count older slots, and once to list the slots that are given away.

    It writes ``blocks [R, P]``, the blocks that missing pages must be copied to, -1 elsewhere; ``counts [2, R]``, the
    pages asked for and missing; and it updates ``table``, ``holds``, ``chosen`` and ``clock``, see :class:`HotPages`.
    ``given [R, P]`` is scratch: the blocks of the slots that are given away, in ascending order.

    Shapes: N = BLOCK pages or slots.
    """
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)  # scalar, [N]
    # 1. Note which pages on the device this step has chosen, and count the missing pages.
    now = tl.load(clock_ptr + row) + 1
    pages_ptr += row * number
    given_ptr += row * number
    blocks_ptr += row * number
    table_ptr += row * entries
    asked, missing = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for first in tl.range(0, number, BLOCK):
        page = tl.load(pages_ptr + first + lanes, mask=first + lanes < number, other=-1)  # [N]
        block = tl.load(table_ptr + page, mask=page >= 0, other=-1)  # [N]
        tl.store(chosen_ptr + block, now, mask=block >= 0)
        asked += tl.sum((page >= 0).to(tl.int32), 0)
        missing += tl.sum(((page >= 0) & (block < 0)).to(tl.int32), 0)
    tl.debug_barrier()  # after it all threads see this step's choice, so that none of its slots is given away
    if missing > 0:
        # 2. Find ``low``, the largest age such that enough slots for the missing pages have this age or a larger one.
        low, high = tl.zeros([], tl.int32), tl.zeros([], tl.int32) + (OLDEST + 1)
        for _ in tl.range(0, 8):
            middle, older = (low + high) // 2, tl.zeros([], tl.int32)
            for first in tl.range(0, size, BLOCK):
                there = first + lanes < size  # [N]
                last = tl.load(chosen_ptr + row * size + first + lanes, mask=there, other=now)  # [N]
                older += tl.sum((there & (tl.minimum(now - last, OLDEST) >= middle)).to(tl.int32), 0)
            low, high = tl.where(older >= missing, middle, low), tl.where(older >= missing, high, middle)
        # 3. Count the slots that are older than ``low``, which are all given away.
        older = tl.zeros([], tl.int32)
        for first in tl.range(0, size, BLOCK):
            last = tl.load(chosen_ptr + row * size + first + lanes, mask=first + lanes < size, other=now)  # [N]
            older += tl.sum((tl.minimum(now - last, OLDEST) > low).to(tl.int32), 0)
        # 4. List the slots that are given away: the older slots, and the first slots whose age is ``low``.
        taken, alike = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
        for first in tl.range(0, size, BLOCK):
            there = first + lanes < size  # [N]
            last = tl.load(chosen_ptr + row * size + first + lanes, mask=there, other=now)  # [N]
            age = tl.minimum(now - last, OLDEST)  # [N]
            same = (there & (age == low)).to(tl.int32)  # [N]
            take = there & ((age > low) | ((same != 0) & (alike + tl.cumsum(same, 0) <= missing - older)))  # [N]
            turn = taken + tl.cumsum(take.to(tl.int32), 0) - 1  # [N]
            tl.store(given_ptr + turn, (row * size + first + lanes).to(tl.int32), mask=take)
            taken += tl.sum(take.to(tl.int32), 0)
            alike += tl.sum(same, 0)
        tl.debug_barrier()
    # 5. Give each missing page a slot, and update the tables; the page that the slot held before leaves the device.
    seen = tl.zeros([], tl.int32)  # missing pages so far: the next takes the slot of this number in ``given``
    for first in tl.range(0, number, BLOCK):
        page = tl.load(pages_ptr + first + lanes, mask=first + lanes < number, other=-1)  # [N]
        block = tl.load(table_ptr + page, mask=page >= 0, other=0)  # [N]
        miss = (page >= 0) & (block < 0)  # [N]
        turn = seen + tl.cumsum(miss.to(tl.int32), 0) - 1  # [N]
        into = tl.load(given_ptr + turn, mask=miss, other=-1)  # [N]
        replaced = tl.load(holds_ptr + into, mask=miss, other=-1)  # [N]
        tl.store(table_ptr + replaced, -1, mask=replaced >= 0)
        tl.store(table_ptr + page, into, mask=miss)
        tl.store(holds_ptr + into, page, mask=miss)
        tl.store(chosen_ptr + into, now, mask=miss)
        tl.store(blocks_ptr + first + lanes, into, mask=first + lanes < number)
        seen += tl.sum(miss.to(tl.int32), 0)
    # 6. Advance the clock and store the counts.
    tl.store(clock_ptr + row, now)
    tl.store(counts_ptr + row, asked)
    tl.store(counts_ptr + rows + row, missing)


@triton.jit(do_not_specialize=["number", "segments", "segment_slots"])
def _fetch(
    pages_ptr,
    blocks_ptr,
    address_ptr,
    k_ptr,
    v_ptr,
    number,
    segments,
    segment_slots,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies one missing page from pinned host memory to its block on the device.

    A program owns a place of a row's choice ``pages [R, P]``. If ``blocks [R, P]`` has a block for it, the program
    copies the page's keys ``[PAGE, DIM]`` and then its values ``[PAGE, VALUE_DIM]``, unchanged. Otherwise it ends at
    once. ``address [2, segments]`` holds where the segments of keys and of values begin in host memory.

    Shapes: N = BLOCK numbers.
    """
    # 1. Find the block; the page is copied only if there is one.
    place, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    block = tl.load(blocks_ptr + row * number + place).to(tl.int64)
    if block >= 0:
        # 2. Find the page in host memory.
        slot = tl.load(pages_ptr + row * number + place).to(tl.int64) * PAGE
        segment, inside = slot // segment_slots, row * segment_slots + slot % segment_slots
        lanes = tl.arange(0, BLOCK)  # [N]
        k_source = tl.load(address_ptr + segment).to(k_ptr.dtype) + inside * DIM
        v_source = tl.load(address_ptr + segments + segment).to(v_ptr.dtype) + inside * VALUE_DIM
        if ALIGNED:  # the compiler knows nothing of an address that was loaded, and would split each read in two
            k_source, v_source = tl.multiple_of(k_source, 16), tl.multiple_of(v_source, 16)
        # 3. Copy the keys.
        for first in tl.static_range(0, PAGE * DIM, BLOCK):
            there = first + lanes < PAGE * DIM  # [N]
            x = tl.load(k_source + first + lanes, mask=there, other=0.0)  # [N]
            tl.store(k_ptr + block * PAGE * DIM + first + lanes, x, mask=there)
        # 4. Copy the values.
        for first in tl.static_range(0, PAGE * VALUE_DIM, BLOCK):
            there = first + lanes < PAGE * VALUE_DIM  # [N]
            x = tl.load(v_source + first + lanes, mask=there, other=0.0)  # [N]
            tl.store(v_ptr + block * PAGE * VALUE_DIM + first + lanes, x, mask=there)


@triton.jit(do_not_specialize=["heads", "entries", "segments", "segment_slots"])
def _put(
    k_ptr,
    v_ptr,
    slots_ptr,
    address_ptr,
    table_ptr,
    hot_k_ptr,
    hot_v_ptr,
    open_k_ptr,
    open_v_ptr,
    k_stride_b,
    k_stride_h,
    k_stride_d,
    v_stride_b,
    v_stride_h,
    v_stride_d,
    heads,
    entries,
    segments,
    segment_slots,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes one new key and value of a KV head to two or three places.

    A program owns a KV head of a sequence. It reads the key ``k [B, Hkv, 1, D]`` and value ``v [B, Hkv, 1, Dv]`` of the
    token and writes them to the page that is being filled (``open_k``, ``open_v``), to the page's copy on the device if
    it has one, and to host memory.

    Shapes: D = BLOCK, the power of two that holds the dimensions of a key and of a value.
    """
    row = tl.program_id(0).to(tl.int64)
    # 1. Find the token's slot, its page, and the page's block on the device, -1 if it has none.
    batch, head, dims = row // heads, row % heads, tl.arange(0, BLOCK)  # scalar, scalar, [D]
    slot = tl.load(slots_ptr + batch)
    page, inside = slot // PAGE, slot % PAGE
    block = tl.load(table_ptr + row * entries + page).to(tl.int64)
    segment, at = slot // segment_slots, row * segment_slots + slot % segment_slots
    # 2. Load the key and the value.
    k = tl.load(k_ptr + batch * k_stride_b + head * k_stride_h + dims * k_stride_d, mask=dims < DIM)  # [D]
    v = tl.load(v_ptr + batch * v_stride_b + head * v_stride_h + dims * v_stride_d, mask=dims < VALUE_DIM)  # [D]
    # 3. Store them in the page that is being filled, in its copy, and in host memory.
    tl.store(open_k_ptr + (row * PAGE + inside) * DIM + dims, k, mask=dims < DIM)
    tl.store(open_v_ptr + (row * PAGE + inside) * VALUE_DIM + dims, v, mask=dims < VALUE_DIM)
    hot = block >= 0  # a page that was chosen while it is still being filled has a copy, which gets the token too
    tl.store(hot_k_ptr + (block * PAGE + inside) * DIM + dims, k, mask=hot & (dims < DIM))
    tl.store(hot_v_ptr + (block * PAGE + inside) * VALUE_DIM + dims, v, mask=hot & (dims < VALUE_DIM))
    tl.store(tl.load(address_ptr + segment).to(k_ptr.dtype) + at * DIM + dims, k, mask=dims < DIM)
    tl.store(
        tl.load(address_ptr + segments + segment).to(v_ptr.dtype) + at * VALUE_DIM + dims, v, mask=dims < VALUE_DIM
    )
