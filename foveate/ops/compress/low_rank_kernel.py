"""Low-rank summaries of pages: Triton kernel of :func:`compress_pages`, :func:`compress_newest` and
:func:`compress_written`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.ops.block_table import BlockTable
from foveate.ops.compress import low_rank
from foveate.ops.compress.low_rank import PageRecord
from foveate.ops.dispatch import UnsupportedError
from foveate.ops.gpu.block_table import FLOATS, arguments, block_size, converts

_LARGEST = 256
"""The largest head dim."""
_WARP = 2048
"""Numbers of a page that a warp holds."""


def warps(form: PageRecord) -> int:
    """Warps of a program."""
    numbers = triton.next_power_of_2(form.head_dim) * triton.next_power_of_2(form.page_size)
    return max(1, min(8, (1 + (form.rank > 4)) * numbers // _WARP))


def compress_pages(keys: Tensor, form: PageRecord, weights: Tensor | None = None) -> Tensor:
    """See :func:`foveate.ops.compress.low_rank.compress_pages`. One launch; a program owns a page."""
    batch, heads, length, _ = keys.shape
    form.check_pages(keys, weights)
    records = torch.empty(batch, heads, length // form.page_size, form.bytes, dtype=torch.uint8, device=keys.device)
    _launch(keys, records, None, form, weights)
    return records


def compress_newest(kv, records, form, weights=None):
    """See :func:`foveate.ops.compress.low_rank.compress_newest`. One launch; a program owns a row and a KV head."""
    kv.check_each_length()
    form.check(records, kv.k, weights, kv.block_table)
    _launch(kv.k, records, kv.lengths, form, weights, kv.block_table)


def compress_written(keys: Tensor, records: Tensor, slots: Tensor, form: PageRecord) -> None:
    """See :func:`foveate.ops.compress.low_rank.compress_written`. One launch; a program owns a token and a KV head, and
    ends at once where its token fills no page."""
    form.check_blocks(keys, records)
    _launch(keys, records, slots, form, None, written=True)


def _launch(
    keys: Tensor,
    records: Tensor,
    lengths: Tensor | None,
    form: PageRecord,
    weights: Tensor | None,
    block_table: BlockTable | None = None,
    written: bool = False,
) -> None:
    """``written``: the new tokens' slots are in ``lengths``."""
    if keys.dtype not in FLOATS and not (written and converts(keys)):
        raise UnsupportedError(f"keys in {keys.dtype}")
    if form.head_dim > _LARGEST:
        raise UnsupportedError(f"head dims above {_LARGEST}")
    if records.stride(3) != 1 or records.data_ptr() % 4 or any(x % 4 for x in records.stride()[:3]):
        raise UnsupportedError("records that do not begin at multiples of 4 bytes")
    batch, heads, pages, _ = records.shape
    if written:
        batch, pages = 1, len(lengths)
    elif lengths is not None:
        pages = 1
    if not batch * heads * pages:
        return
    block_d, block_s = (triton.next_power_of_2(x) for x in (form.head_dim, form.page_size))
    _compress[pages, batch * heads](
        keys, records, None if weights is None else weights.contiguous(), lengths, *arguments(block_table),
        *keys.stride(), *records.stride()[:3], 0 if lengths is None else lengths.stride(0),
        heads,
        WEIGHTED=weights is not None, NEWEST=lengths is not None and not written,
        WRITTEN=keys.shape[2] if written else 0, BLOCK_SIZE=block_size(block_table, keys), DIM=form.head_dim,
        SIZE=form.page_size, RANK=form.rank, MEAN=form.mean, DIRECTIONS=form.directions, COEFFICIENTS=form.coefficients,
        BITS=form.coefficient_bits, ITERATIONS=low_rank.ITERATIONS, MEAN_LIMIT=low_rank.MEAN_LIMIT,
        LIMIT=low_rank.LIMIT, TINY=low_rank.TINY, BLOCK_D=block_d, BLOCK_S=block_s, num_warps=warps(form),
    )  # fmt: skip


@triton.jit
def _rounded(x, LIMIT: tl.constexpr, TINY: tl.constexpr):
    """Rounds ``x [X]`` to integers of at most ``LIMIT``, in fp32 and halves to the even one: returns them, ``[X]``, and
    their scale."""
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x)), LIMIT * 1.0), TINY)
    magic: tl.constexpr = 12582912.0  # 1.5 * 2^23: numbers about it have no fraction
    return (tl.div_rn(x, scale) + magic) - magic, scale  # [X], scalar


@triton.jit
def _pack(ptr, values, NUMBER: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the first ``NUMBER`` of the four-bit integers ``values [X]`` in ``ceil(NUMBER / 2)`` bytes, see
    :class:`PageRecord`.

    Byte j holds number j in its low half and number ``j + HALF`` in its high half, each plus 8.
    """
    HALF: tl.constexpr = (NUMBER + 1) // 2
    at = tl.arange(0, BLOCK)  # [X]
    codes = tl.where(at < NUMBER, values.to(tl.int32) + 8, 0)  # [X]
    upper = tl.gather(codes, tl.minimum(at + HALF, BLOCK - 1), 0)  # [X]
    upper = tl.where(at + HALF < NUMBER, upper, 0)  # [X]
    tl.store(ptr + at, (codes | (upper << 4)).to(tl.uint8), mask=at < HALF)


@triton.jit(do_not_specialize=["heads", "length_stride", "table_stride"])
def _compress(
    key_ptr, record_ptr, weight_ptr, length_ptr, table_ptr,
    table_stride, key_stride_b, key_stride_h, key_stride_s, key_stride_d,
    record_stride_b, record_stride_h, record_stride_p, length_stride,
    heads,
    WEIGHTED: tl.constexpr, NEWEST: tl.constexpr, WRITTEN: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr,
    SIZE: tl.constexpr, RANK: tl.constexpr, MEAN: tl.constexpr, DIRECTIONS: tl.constexpr, COEFFICIENTS: tl.constexpr,
    BITS: tl.constexpr, ITERATIONS: tl.constexpr, MEAN_LIMIT: tl.constexpr, LIMIT: tl.constexpr, TINY: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Writes the record of one page of one KV head, see :class:`PageRecord`.

    A program owns one page, whose keys it reads once and holds in registers. The page is number ``program_id(0)`` of
    the row. With ``NEWEST`` it is the page that the row's last key fills, and with ``WRITTEN``, the slots of a block,
    it is the page that token ``program_id(0)`` fills, whose slot is in ``length``; a program without a full page ends
    at once.

    The program subtracts the page's mean and then finds ``RANK`` directions one after the other, each by power
    iteration on what the directions before it do not explain. It writes each part as soon as it is found. Directions
    are found in fp32 by a fixed number of iterations, so a page's record is the same whichever program makes it.

    ``WEIGHTED`` keys are multiplied by ``weight [B, Hkv, D]`` first.

    Shapes: S = BLOCK_S keys of the page, D = BLOCK_D dimensions.
    """
    # 1. Find the row, the KV head and the page.
    ROW: tl.constexpr = (SIZE * BITS + 7) // 8
    page, row = tl.program_id(0), tl.program_id(1)
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    if NEWEST:
        length = tl.load(length_ptr + batch * length_stride).to(tl.int32)
        if length % SIZE != 0:
            return
        page = length // SIZE - 1
    if WRITTEN:
        last = tl.load(length_ptr + page.to(tl.int64) * length_stride).to(tl.int64)
        if last < 0 or last % SIZE != SIZE - 1:
            return
        batch, page = last // WRITTEN, last % WRITTEN // SIZE
    # 2. Load the keys, in memory of one piece or of blocks, and weight their dimensions.
    dims, places = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_S)  # [D], [S]
    exists = (places < SIZE)[:, None] & (dims < DIM)[None, :]  # [S, D]
    slot = page.to(tl.int64) * SIZE + places  # [S]
    key_rows = batch * key_stride_b
    if BLOCK_SIZE:
        blocks = tl.load(table_ptr + batch * table_stride + slot // BLOCK_SIZE, mask=places < SIZE, other=0)  # [S]
        key_rows, slot = (blocks.to(tl.int64) * key_stride_b)[:, None], slot % BLOCK_SIZE  # [S, 1], [S]
    key_ptr += head * key_stride_h
    key_tile = key_rows + slot[:, None] * key_stride_s + dims[None, :] * key_stride_d  # [S, D]
    left = tl.load(key_ptr + key_tile, mask=exists, other=0.0).to(tl.float32)  # [S, D]
    if WEIGHTED:
        # [S, D]
        left *= tl.load(weight_ptr + (batch * heads + head) * DIM + dims, mask=dims < DIM, other=0.0)[None, :]
    # 3. Store the mean and its scale, and subtract the mean as it was stored.
    record_ptr += batch * record_stride_b + head * record_stride_h + page.to(tl.int64) * record_stride_p
    scale_ptr = record_ptr.to(tl.pointer_type(tl.float32), bitcast=True)

    mean, scale = _rounded(tl.sum(left, 0) / SIZE, MEAN_LIMIT, TINY)  # [D], scalar
    tl.store(scale_ptr, scale)
    tl.store(record_ptr + MEAN + dims, mean.to(tl.int8).to(tl.uint8, bitcast=True), mask=dims < DIM)
    left = tl.where(exists, left - (mean * scale)[None, :], 0.0)  # [S, D]
    # 4. Find the directions one after the other.
    for number in tl.static_range(RANK):
        # 4a. Begin the power iteration with the longest of the remaining keys; scaling by their largest entry keeps
        # squares in the range of fp32.
        scaled = left / tl.maximum(tl.max(tl.max(tl.abs(left), 1), 0), TINY)  # [S, D]
        longest = tl.argmax(tl.sum(scaled * scaled, 1), 0)
        direction = tl.sum(tl.where((places == longest)[:, None], scaled, 0.0), 0)  # [D]
        for _ in tl.static_range(ITERATIONS):
            direction = direction / tl.sqrt_rn(tl.maximum(tl.sum(direction * direction, 0), TINY))  # [D]
            along = tl.sum(scaled * direction[None, :], 1)  # [S]
            direction = tl.sum(scaled * along[:, None], 0)  # [D]
        # 4b. Round the direction, and fit each key's coefficient to the rounded direction, so that coefficients make up
        # for the rounding.
        direction, _unused = _rounded(direction, LIMIT, TINY)  # [D], scalar
        fitted = tl.sum(left * direction[None, :], 1) / tl.maximum(tl.sum(direction * direction, 0), TINY)  # [S]
        fitted, scale = _rounded(fitted, LIMIT if BITS == 4 else MEAN_LIMIT, TINY)  # [S], scalar
        # 4c. Subtract the product as it is stored, and store it.
        left -= (fitted * scale)[:, None] * direction[None, :]  # [S, D]
        tl.store(scale_ptr + 1 + number, scale)
        _pack(record_ptr + DIRECTIONS + number * ((DIM + 1) // 2), direction, DIM, BLOCK_D)
        if BITS == 4:
            _pack(record_ptr + COEFFICIENTS + number * ROW, fitted, SIZE, BLOCK_S)
        else:
            codes = (fitted.to(tl.int32) + 128).to(tl.uint8)  # [S]
            tl.store(record_ptr + COEFFICIENTS + number * ROW + places, codes, mask=places < SIZE)

    # 5. Fill the gaps between the parts, and the end of the record, with zeros.
    for at in tl.static_range(4 * (RANK + 1), MEAN):
        tl.store(record_ptr + at, tl.zeros([], tl.uint8))
    END: tl.constexpr = COEFFICIENTS + RANK * ROW
    for at in tl.static_range(END, (END + 15) // 16 * 16):
        tl.store(record_ptr + at, tl.zeros([], tl.uint8))
