"""Attention to pages by their low-rank summaries: Triton kernel of :func:`page_lse` and
:func:`pooled_mass_of_records`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.ops._math import fold_group
from foveate.ops.compress.low_rank import PageRecord
from foveate.ops.compress.records import Records
from foveate.ops.dispatch import UnsupportedError
from foveate.ops.gpu.block_table import FLOATS, arguments, block_size
from foveate.ops.gpu.softcap import capped, constant
from foveate.ops.gpu.softmax import LOG2E, LOWEST
from foveate.ops.gpu.tiles import Tile, multiprocessors, split, split_of_row
from foveate.ops.logits import Logits
from foveate.ops.score.kept_logits_kernel import Kept, per_head, pooled
from foveate.ops.score.low_rank import check_pages
from foveate.ops.score.pooled import check

_LARGEST = 256
"""The largest head dim."""
_COLUMNS = 16
"""The most columns of a program's matrix products."""
_RESIDENT = 3
"""Programs that a multiprocessor runs at a time."""
_FAR = tl.constexpr(120.0)
"""How far from the mean's logit a page's logits may be, to the base 2, so that 2^x of the difference stays in fp32."""
_VARYING = ["length_stride_b", "length_stride_h", "page_stride_b", "page_stride_h", "page_stride_p"]
_VARYING += ["table_stride", "num_kv_heads", "parts", "number", "room"]
"""What changes from step to step, or from batch to batch: no reason to compile anew."""


def tile_for(dtype: torch.dtype, form: PageRecord, group: int) -> Tile:
    """Columns (``block_m``) and pages (``block_n``) of a program.

    Pages are the rows of the matrix products and heads are the columns, because eight columns suffice for a product.
    Exponentials, one for each key and column, cost as much as reading the records, so idle columns would be dear.
    """
    most = 8 if form.head_dim > 128 else _COLUMNS  # queries stay in registers
    columns = min(most, max(8, triton.next_power_of_2(group)))
    if dtype == torch.float32:  # multiplied without tensor cores
        return Tile(columns, 16, num_warps=4, num_stages=1)
    fits = form.head_dim * columns <= (1536 if columns == 8 else 1024)  # rows and queries into registers
    fits = fits and form.head_dim * form.rank <= 512  # records of three stages into shared memory
    return Tile(columns, 64 if fits else 32, num_warps=4, num_stages=3)


def packed_for(form: PageRecord, group: int, tile: Tile) -> int:
    """How many columns share a head, each with its part of a page's keys, so that no column is idle."""
    return max(1, min(_unit(form), tile.block_m // triton.next_power_of_2(group)))


def _unit(form: PageRecord) -> int:
    """Coefficients that are loaded at once, as one word or one byte."""
    words = form.coefficients % 4 == 0 and form.row_of_coefficients % 4 == 0 and form.page_size % 4 == 0
    return (32 if words else 8) // form.coefficient_bits


def constants(form: PageRecord) -> dict[str, int | tuple[int, ...]]:
    """Where the parts of a record begin, and how much of it is loaded at once."""
    lanes = 4 if form.head_dim % 8 == 0 else 1
    whole, half = (max(16, triton.next_power_of_2(triton.cdiv(form.head_dim, n * lanes))) for n in (1, 2))
    sizes = form.head_dim, form.page_size, form.rank, form.coefficient_bits
    parts = form.mean, form.directions, form.coefficients
    return {"FORM": sizes, "PARTS": parts, "UNIT": _unit(form), "LANES": lanes, "BLOCK_D": whole, "BLOCK_H": half}


def page_lse(rows, records, *, logits, pages=None, branch=1):
    """See :func:`foveate.ops.score.low_rank.page_lse`.

    The heads of a group share a program, so that a record is read once; pages that do not exist are not read. Codes are
    multiplied as integers, in the queries' dtype, and summed in fp32. Repeats are equal bit for bit.
    """
    kept = _kept(rows, records, logits, pages, branch)
    return kept.logits.unflatten(1, rows.shape[1:3])[..., : _number_of(records, pages, branch)]


def pooled_mass_of_records(q, records, *, logits, pooling="post_softmax", pool="kv_head"):
    """See :func:`foveate.ops.score.low_rank.pooled_mass_of_records`: :func:`page_lse`, and a pass that pools it."""
    check(pooling, pool, "of_largest")
    num_kv_heads = records.memory.shape[1]
    rows = fold_group(q, num_kv_heads)
    kept = _kept(rows, records, logits, None, 1, pooling)
    lengths = None if records.lengths is None else per_head(records.lengths, num_kv_heads)
    return pooled(kept, num_kv_heads, records.number, None, lengths, pooling, pool)


def _number_of(records: Records, pages: Tensor | None, branch: int) -> int:
    return records.number if pages is None else pages.shape[2] * branch


def _kept(
    rows: Tensor, records: Records, logits: Logits, pages: Tensor | None, branch: int, pooling: str | None = None
) -> Kept:
    """The log-sum-exp of each page. With ``pooling`` it is to the base 2, and each part of a head has the log-sum-exp
    or the largest value by which pooling divides."""
    records.check_queries(rows)
    check_pages(rows, pages, branch)
    batch, num_kv_heads, group, dim = rows.shape
    number, form, memory = _number_of(records, pages, branch), records.form, records.memory
    if rows.dtype not in FLOATS:
        raise UnsupportedError(f"queries in {rows.dtype}")
    if dim > _LARGEST:
        raise UnsupportedError(f"head dims above {_LARGEST}")
    if memory.stride(3) != 1 or memory.data_ptr() % 4 or any(x % 4 for x in memory.stride()[:3]):
        raise UnsupportedError("records that do not begin at multiples of 4 bytes")
    tile = tile_for(rows.dtype, form, group)
    packed = packed_for(form, group, tile)
    parts, blocks = triton.cdiv(group, tile.block_m // packed), triton.cdiv(number, tile.block_n)
    room = _RESIDENT * multiprocessors(rows.device)
    splits, _ = split(batch * num_kv_heads * parts, blocks, room)
    weights = None if records.weights is None else records.weights.contiguous()
    lengths = None if records.lengths is None else per_head(records.lengths, num_kv_heads)
    pages = None if pages is None else pages.expand(-1, num_kv_heads, -1)
    padded, like = triton.cdiv(number, 16) * 16, {"dtype": torch.float32, "device": rows.device}
    of_parts = torch.empty(batch, num_kv_heads * group, splits if pooling else 0, **like)
    kept = Kept(torch.empty(batch, num_kv_heads * group, padded, **like), of_parts[..., :0], of_parts, tile.block_n)
    if kept.logits.numel():
        _page_lse[batch * num_kv_heads * parts, splits](
            rows, memory, weights, lengths, pages, kept.logits, of_parts, *arguments(records.block_table),
            rows.stride(), memory.stride()[:3], *((0, 0) if lengths is None else lengths.stride()),
            *((0, 0, 0) if pages is None else pages.stride()),
            num_kv_heads, group, parts, number, padded, room, logits.scaling,
            WEIGHTED=weights is not None, BRANCH=0 if pages is None else branch,
            BLOCK_SIZE=block_size(records.block_table, memory), TOTALS=pooling is not None,
            LARGEST=pooling == "of_largest", SOFTCAP=constant(logits.softcap), **constants(form), PACKED=packed,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, **tile.options,
        )  # fmt: skip
    return kept


@triton.jit
def _queries(
    q_ptr, q_stride_d, weight_ptr, weight_row, units, first, end, exist, WEIGHTED: tl.constexpr, LANES: tl.constexpr
):
    """The dimensions ``first .. end - 1`` of the queries, divided by the channels' weights, in the words ``units [U]``.

    Returns:
        ``LANES`` tensors ``[U, M]``, one for each byte of a word: tensor i has the dimensions ``first + LANES * unit +
        i``.
    """
    found = ()
    for lane in tl.static_range(LANES):
        dims = first + units * LANES + lane  # [U]
        # [U, M]
        q = tl.load(q_ptr + dims[:, None] * q_stride_d, mask=(dims < end)[:, None] & exist[None, :], other=0.0)
        if WEIGHTED:
            weight = tl.load(weight_ptr + weight_row + dims, mask=dims < end, other=1.0)  # [U]
            q = (q.to(tl.float32) / weight[:, None]).to(q.dtype)  # [U, M]
        found += (q,)
    return found


@triton.jit
def _coefficients(
    along,
    coefficient_ptr,
    stored, unit,
    UNIT: tl.constexpr, BITS: tl.constexpr, ROW: tl.constexpr,
    lane,
    PACKED: tl.constexpr,
):  # fmt: skip
    """A unit of each page's coefficients: a word or a byte, which holds ``UNIT`` of them.

    Returns:
        for each direction, codes ``[N, 1]``, or ``[N, M]`` with each column's first coefficient in the lowest bits if
        columns share a head (``PACKED``).
    """
    found = ()
    for direction in tl.static_range(len(along)):
        codes = _words(coefficient_ptr + direction * ROW, unit, stored, UNIT * BITS // 8)[:, None]  # [N, 1]
        found += (codes >> (BITS * lane)[None, :] if PACKED > 1 else codes,)
    return found


@triton.jit
def _logits(start, along, codes, step: tl.constexpr, BITS: tl.constexpr, PACKED: tl.constexpr):
    """Logits ``[N, M]`` of one key of each page and column, to the base 2.

    A coefficient c of four bits, from -8 to 7, is the mantissa of ``1 + (c + 8) / 16``: ``along`` is 16 times the logit
    of a coefficient of 1, and ``start`` is the mean's logit less 1.5 times ``along``. A coefficient of eight bits is
    the mantissa of ``1 + (c + 128) / 256``, and ``along`` is 256 times the logit.
    """
    LEFT: tl.constexpr = 23 - BITS - BITS * step * PACKED
    MASK: tl.constexpr = (2**BITS - 1) << (23 - BITS)
    logits = start  # [N, M]
    for direction in tl.static_range(len(along)):
        code = codes[direction]  # [N, 1] or [N, M]
        code = code << LEFT if LEFT >= 0 else code >> -LEFT
        coefficient = ((code & MASK) | 0x3F800000).to(tl.float32, bitcast=True)  # [N, 1] or [N, M]
        logits += coefficient * along[direction]  # [N, M]
    return logits


@triton.jit(do_not_specialize=_VARYING)
def _page_lse(
    q_ptr, record_ptr, weight_ptr, length_ptr, page_ptr, lse_ptr, total_ptr, table_ptr,
    table_stride, q_strides, record_strides, length_stride_b, length_stride_h,
    page_stride_b, page_stride_h, page_stride_p,
    num_kv_heads, group, parts, number, padded, room, scale,
    WEIGHTED: tl.constexpr, BRANCH: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOTALS: tl.constexpr, LARGEST: tl.constexpr,
    SOFTCAP: tl.constexpr, FORM: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr, LANES: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, PACKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The log-sum-exp of each page's logits by its record: writes ``lse [B, Hq, padded]`` and (``TOTALS``) ``total [B,
    Hq, splits]``, the log-sum-exp of each program's pages or (``LARGEST``) the largest of them. Both are contiguous,
    and with ``TOTALS`` to the base 2, otherwise to the base e.

    A program owns up to ``BLOCK_M / PACKED`` heads of a group in one row of the batch and one split of the row's pages,
    whose records it reads once, in ascending order. Codes enter the products as whole numbers, which are summed in
    fp32. ``length`` (or None) says how many of the first pages exist; nothing is written after the block that holds the
    place after the last one. With ``BRANCH`` not 0, ``page`` lists parents, -1 for an unused place, and each stands for
    ``BRANCH`` neighbouring records.

    ``FORM``: head dim, keys of a page, directions and bits of a record (:class:`PageRecord`). ``PARTS``: the bytes at
    which its mean, directions and coefficients begin. A column of the products is a head, or one of ``PACKED`` columns
    of a head, which share the keys of a page. A word holds ``LANES`` dimensions of the mean; a byte of directions holds
    a dimension of the first half and one of the second half.

    Shapes: N = BLOCK_N pages, M = BLOCK_M columns, H = HEADS heads, D = BLOCK_D words of a mean, E = BLOCK_H words of a
    direction.
    """
    DIM: tl.constexpr = FORM[0]
    SIZE: tl.constexpr = FORM[1]
    RANK: tl.constexpr = FORM[2]
    BITS: tl.constexpr = FORM[3]
    MEAN: tl.constexpr = PARTS[0]
    DIRECTIONS: tl.constexpr = PARTS[1]
    COEFFICIENTS: tl.constexpr = PARTS[2]
    q_stride_b, q_stride_h, q_stride_g, q_stride_d = q_strides
    record_stride_b, record_stride_h, record_stride_p = record_strides
    HALF: tl.constexpr = (DIM + 1) // 2
    ROW: tl.constexpr = (SIZE * BITS + 7) // 8
    ODD: tl.constexpr = BITS == 4 and SIZE % 2 == 1
    HEADS: tl.constexpr = BLOCK_M // PACKED
    UNITS: tl.constexpr = (SIZE + UNIT - 1) // UNIT
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    # Triton fetches records ahead only if the loops below are unrolled, for which registers must suffice.
    UNROLLED: tl.constexpr = UNITS if SIZE * BLOCK_M <= 256 else 1
    row, part, split = tl.program_id(0) // parts, tl.program_id(0) % parts, tl.program_id(1)
    batch, head = (row // num_kv_heads).to(tl.int64), (row % num_kv_heads).to(tl.int64)
    column = tl.arange(0, BLOCK_M)  # [M]
    member, lane = part * HEADS + column // PACKED, column % PACKED  # [M], [M]
    exist = member < group  # [M]
    member = tl.where(exist, member, 0)  # [M]
    wholes, halves, places = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_N)  # [D], [E], [N]

    # 1. Find the blocks of this split. Its total is -inf if the row needs no such split.
    written = part * HEADS + tl.arange(0, HEADS)  # [H]
    of_head = (batch * num_kv_heads + head) * group + written  # [H]
    there, here = number, tl.cdiv(number, BLOCK_N)
    each = tl.cdiv(here, tl.num_programs(1))
    if length_ptr is not None:
        length = tl.load(length_ptr + batch * length_stride_b + head * length_stride_h)
        there = tl.minimum(number, length.to(tl.int32))
        here = tl.cdiv(tl.minimum(there + 1, number), BLOCK_N)
        used, each = split_of_row(here, tl.num_programs(0), tl.num_programs(1), room)
        if split >= used:
            if TOTALS:
                none = tl.full([HEADS], float("-inf"), tl.float32)  # [H]
                tl.store(total_ptr + of_head * tl.num_programs(1) + split, none, mask=written < group)
            return
    written = (written < group)[None, :]  # [1, H]

    # 2. Load the queries, whole for the means, and as two halves for the directions.
    q_ptr += batch * q_stride_b + head * q_stride_h + member[None, :] * q_stride_g  # [1, M]
    weight_row = (batch * num_kv_heads + head) * DIM
    # LANES x [D, M]
    whole = _queries(q_ptr, q_stride_d, weight_ptr, weight_row, wholes, 0, DIM, exist, WEIGHTED, LANES)
    low = _queries(q_ptr, q_stride_d, weight_ptr, weight_row, halves, 0, HALF, exist, WEIGHTED, LANES)  # LANES x [E, M]
    # LANES x [E, M]
    high = _queries(q_ptr, q_stride_d, weight_ptr, weight_row, halves, HALF, DIM, exist, WEIGHTED, LANES)
    record_ptr += head * record_stride_h
    if BLOCK_SIZE:
        table_ptr += batch * table_stride
    else:
        record_ptr += batch * record_stride_b
    if BRANCH:
        page_ptr += batch * page_stride_b + head * page_stride_h
    out_ptr = lse_ptr + of_head[None, :] * padded + places[:, None]  # [N, H]
    scale *= LOG2E

    # 3. Walk over the blocks of pages, and find where their records are.
    all_top = tl.full([BLOCK_N, HEADS], LOWEST, tl.float32)  # [N, H]
    all_weight = tl.zeros([BLOCK_N, HEADS], tl.float32)  # [N, H]
    for block in tl.range(split * each, tl.minimum((split + 1) * each, here)):
        place = block * BLOCK_N + places  # [N]
        stored = place < there  # [N]
        slot = place
        if BRANCH:
            page = tl.load(page_ptr + place // BRANCH * page_stride_p, mask=stored, other=-1).to(tl.int32)  # [N]
            slot, stored = page * BRANCH + place % BRANCH, page >= 0  # [N], [N]
        ptr = record_ptr
        if BLOCK_SIZE:
            ptr += tl.load(table_ptr + slot // BLOCK_SIZE, mask=stored, other=0).to(tl.int64) * record_stride_b
            slot = slot % BLOCK_SIZE
        ptr += slot.to(tl.int64) * record_stride_p  # [N]
        scale_ptr = ptr.to(tl.pointer_type(tl.float32), bitcast=True)  # [N]
        # 4. Multiply the queries by the means, and by each direction.
        # [N, D]
        code = _words(ptr[:, None] + MEAN, wholes[None, :], stored[:, None] & (wholes < DIM // LANES)[None, :], LANES)
        middle = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)  # [N, M]
        for byte in tl.static_range(LANES):
            mean = _signed(((code >> (8 * byte)) & 255) ^ 128, 8, dtype)  # [N, D]
            middle = tl.dot(mean, whole[byte], middle, input_precision="ieee")  # [N, M]
        middle *= (tl.load(scale_ptr, mask=stored, other=0.0) * scale)[:, None]
        # directions x [N, M], [N, M], [N, M]
        along, reach, start = (), tl.zeros([BLOCK_N, BLOCK_M], tl.float32), middle
        for direction in tl.static_range(RANK):
            # [N, E]
            code = _words(
                ptr[:, None] + (DIRECTIONS + direction * HALF),
                halves[None, :],
                stored[:, None] & (halves < HALF // LANES)[None, :],
                LANES,
            )
            product = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)  # [N, M]
            for byte in tl.static_range(LANES):
                shifted = code >> (8 * byte)  # [N, E]
                product = tl.dot(_signed(shifted & 15, 4, dtype), low[byte], product, input_precision="ieee")  # [N, M]
                upper = _signed((shifted >> 4) & 15, 4, dtype)  # [N, E]
                product = tl.dot(upper, high[byte], product, input_precision="ieee")  # [N, M]
            factor = tl.load(scale_ptr + 1 + direction, mask=stored, other=0.0) * (2.0**BITS * scale)  # [N]
            product *= factor[:, None]
            along += (product,)
            start -= 1.5 * product
            reach += 0.5 * tl.abs(product)

        # 5. Choose the logit that exponentials are relative to.
        # The mean's logit serves unless a key is so far from it that exponentials overflow, or all of them vanish.
        top = capped(middle, SOFTCAP)  # [N, M]
        if tl.max(reach) > _FAR:
            top = tl.full([BLOCK_N, BLOCK_M], LOWEST, tl.float32)  # [N, M]
            for unit in tl.range(UNITS, loop_unroll_factor=UNROLLED):
                # directions x [N, 1] or [N, M]
                codes = _coefficients(along, ptr + COEFFICIENTS, stored, unit, UNIT, BITS, ROW, lane, PACKED)
                for step in tl.static_range(UNIT // PACKED):
                    logits = capped(_logits(start, along, codes, step, BITS, PACKED), SOFTCAP)  # [N, M]
                    if ODD:
                        logits = tl.where(_absent(unit, step * PACKED + lane, SIZE), float("-inf"), logits)  # [N, M]
                    top = tl.maximum(top, logits)  # [N, M]
            if PACKED > 1:
                largest = tl.max(tl.reshape(top, [BLOCK_N, HEADS, PACKED]), 2)  # [N, H]
                # [N, M]
                top = tl.reshape(tl.broadcast_to(largest[:, :, None], [BLOCK_N, HEADS, PACKED]), [BLOCK_N, BLOCK_M])
        # 6. Add up the exponentials of the page's keys.
        weight = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)  # [N, M]
        if SOFTCAP == 0:
            start -= top
        for unit in tl.range(UNITS, loop_unroll_factor=UNROLLED):
            # directions x [N, 1] or [N, M]
            codes = _coefficients(along, ptr + COEFFICIENTS, stored, unit, UNIT, BITS, ROW, lane, PACKED)
            for step in tl.static_range(UNIT // PACKED):
                logits = _logits(start, along, codes, step, BITS, PACKED)  # [N, M]
                if SOFTCAP > 0:
                    logits = capped(logits, SOFTCAP) - top
                if ODD:
                    logits = tl.where(_absent(unit, step * PACKED + lane, SIZE), float("-inf"), logits)
                weight += tl.exp2(logits)
        if PACKED > 1:
            weight = tl.sum(tl.reshape(weight, [BLOCK_N, HEADS, PACKED]), 2)  # [N, H]
            top = tl.max(tl.reshape(top, [BLOCK_N, HEADS, PACKED]), 2)  # [N, H]
        # 7. Write the log-sum-exps of the block, and add them to the total of the split.
        lse = tl.where(stored[:, None], top + tl.log2(weight), float("-inf"))  # [N, H]
        if TOTALS:
            higher = tl.maximum(all_top, lse)  # [N, H]
            if not LARGEST:
                all_weight = all_weight * tl.exp2(all_top - higher) + tl.exp2(lse - higher)
            all_top = higher
        else:
            lse /= LOG2E
        tl.store(out_ptr + block * BLOCK_N, lse, mask=written & (place < padded)[:, None])

    # 8. Write the total of the split.
    if TOTALS:
        total = tl.max(all_top, 0)  # [H]
        if not LARGEST:
            weight = tl.sum(all_weight * tl.exp2(all_top - total[None, :]), 0)  # [H]
            total = tl.where(weight == 0, float("-inf"), total + tl.log2(weight))  # [H]
        tl.store(total_ptr + of_head * tl.num_programs(1) + split, total, mask=tl.reshape(written, [HEADS]))


@triton.jit
def _absent(unit, nibble, SIZE: tl.constexpr):
    """Whether a coefficient does not exist, ``[1, M]``: the upper half of the last byte is unused if a page is odd."""
    return ((nibble == 1) & (unit + (SIZE + 1) // 2 >= SIZE))[None, :]


@triton.jit
def _words(ptr, offsets, mask, LANES: tl.constexpr):
    """Words of ``LANES`` bytes, 4 or 1, in int32, in the shape of ``ptr + offsets``; ``offsets`` count words."""
    if LANES == 4:
        return tl.load(ptr.to(tl.pointer_type(tl.int32), bitcast=True) + offsets, mask=mask, other=0)
    else:
        return tl.load(ptr + offsets, mask=mask, other=0).to(tl.int32)


@triton.jit
def _signed(code, BITS: tl.constexpr, dtype: tl.constexpr):
    """``code - 2 ** (BITS - 1)`` exactly, of int32 codes of 4 or 8 bits.

    In half precision a code becomes the mantissa of a large number, which is then subtracted: far cheaper than a
    conversion.
    """
    HALF: tl.constexpr = 2 ** (BITS - 1)
    if dtype == tl.float16:
        return (code | 0x6400).to(tl.int16).to(dtype, bitcast=True) - (1024.0 + HALF)
    elif dtype == tl.bfloat16 and BITS < 8:
        return (code | 0x4300).to(tl.int16).to(dtype, bitcast=True) - (128.0 + HALF)
    elif dtype == tl.bfloat16:  # whose mantissa holds seven bits
        low = ((code & 127) | 0x4300).to(tl.int16).to(dtype, bitcast=True)
        return low - ((code & 128) ^ 0x4380).to(tl.int16).to(dtype, bitcast=True)
    else:
        return code.to(dtype) - HALF
