"""Masses of pages by their low-rank summaries: Triton kernel of :func:`page_lse`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.ops._dispatch import UnsupportedError
from foveate.ops.compress.low_rank import PageRecord
from foveate.ops.gpu.softcap import capped, constant
from foveate.ops.gpu.softmax import LOG2E, LOWEST
from foveate.ops.gpu.tiles import Tile, multiprocessors, split
from foveate.ops.score.kept_logits_kernel import per_head

_LARGEST = 256
"""The largest head dim."""
_HEADS = 16
"""The most heads of a program."""
_RESIDENT = 3
"""Programs that a multiprocessor runs at a time."""
_FAR = tl.constexpr(120.0)
"""How far from the mean's logit those of a page may be, to the base 2, for 2^x of the difference to stay in fp32."""
_VARYING = ["length_stride_b", "length_stride_h", "num_kv_heads", "parts", "number", "each"]
"""What changes from step to step, or from batch to batch: no reason to compile anew."""


def tile_for(dtype: torch.dtype, form: PageRecord, group: int) -> Tile:
    """Heads (``block_m``) and pages (``block_n``) of a program.

    Pages are the rows of the matrix products and heads their columns, of which there need be only eight: the
    exponentials, one for each key and head, cost as much as the bytes.
    """
    heads = min(_HEADS, max(8, triton.next_power_of_2(group)))
    if dtype == torch.float32:  # multiplied without tensor cores
        return Tile(heads, 16, num_warps=4, num_stages=1)
    return Tile(heads, 64 if form.head_dim * heads <= 1024 else 32, num_warps=4, num_stages=3)


def page_lse(
    rows: Tensor,
    records: Tensor,
    form: PageRecord,
    scaling: float,
    *,
    weights: Tensor | None = None,
    lengths: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """See :func:`foveate.ops.score.low_rank.page_lse`.

    The heads of a group share a program, so that a record is read once; pages that are not there are not read. Integers
    are multiplied as such, in the queries' dtype, and summed in fp32. Repeats are equal bit for bit.
    """
    form.check(records, rows, weights)
    batch, num_kv_heads, group, dim = rows.shape
    number = records.shape[2]
    if rows.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise UnsupportedError(f"queries in {rows.dtype}")
    if dim > _LARGEST:
        raise UnsupportedError(f"head dims above {_LARGEST}")
    if records.stride(3) != 1 or records.data_ptr() % 4 or any(x % 4 for x in records.stride()[:3]):
        raise UnsupportedError("records that do not begin at multiples of 4 bytes")
    cap = constant(softcap)
    tile = tile_for(rows.dtype, form, group)
    parts, blocks = triton.cdiv(group, tile.block_m), triton.cdiv(number, tile.block_n)
    weights = None if weights is None else weights.contiguous()
    lengths = None if lengths is None else per_head(lengths, num_kv_heads)
    padded = triton.cdiv(number, 16) * 16
    found = torch.empty(batch, num_kv_heads, group, padded, dtype=torch.float32, device=rows.device)
    if found.numel():
        splits, each = split(batch * num_kv_heads * parts, blocks, _RESIDENT * multiprocessors(rows.device))
        _page_lse[batch * num_kv_heads * parts, splits](
            rows,
            records,
            weights,
            lengths,
            found,
            *rows.stride(),
            *records.stride()[:3],
            *((0, 0) if lengths is None else lengths.stride()),
            num_kv_heads,
            group,
            parts,
            number,
            padded,
            each,
            scaling,
            WEIGHTED=weights is not None,
            BOUNDED=lengths is not None,
            SOFTCAP=cap,
            DIM=dim,
            SIZE=form.page_size,
            RANK=form.rank,
            MEAN=form.mean,
            DIRECTIONS=form.directions,
            COEFFICIENTS=form.coefficients,
            BLOCK_D=max(16, triton.next_power_of_2(dim)),
            BLOCK_H=max(16, triton.next_power_of_2(-(-dim // 2))),
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            **tile.options,
        )
    return found[..., :number]


@triton.jit
def _query(q_ptr, q_stride_d, weight_ptr, weight_row, dims, there, exist, WEIGHTED: tl.constexpr):
    """Some dimensions of the queries ``[D, M]``, divided by the channels' weights."""
    q = tl.load(q_ptr + dims[:, None] * q_stride_d, mask=there[:, None] & exist[None, :], other=0.0)
    if WEIGHTED:
        weight = tl.load(weight_ptr + weight_row + dims, mask=there, other=1.0)
        q = (q.to(tl.float32) / weight[:, None]).to(q.dtype)
    return q


@triton.jit
def _logits(
    middle,
    along,
    coefficient_ptr,
    stored,
    unit,
    nibble: tl.constexpr,
    SIZE: tl.constexpr,
    WORDS: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Capped logits ``[N, M]`` of one key of each page, to the base 2; -inf of the key that an odd page lacks.

    Coefficients are loaded by units, of a direction: words of eight, or bytes of two.
    """
    HALF: tl.constexpr = (SIZE + 1) // 2
    logits = middle
    for direction in tl.static_range(len(along)):
        ptr = coefficient_ptr + direction * HALF
        if WORDS:
            codes = tl.load(ptr.to(tl.pointer_type(tl.int32), bitcast=True) + unit, mask=stored, other=0)
        else:
            codes = tl.load(ptr + unit, mask=stored, other=0).to(tl.int32)
        coefficient = ((codes >> (4 * nibble)) & 15).to(tl.float32) - 8.0
        logits += coefficient[:, None] * along[direction]
    logits = capped(logits, SOFTCAP)
    if SIZE % 2 == 1 and nibble == 1:
        logits = tl.where(unit + HALF < SIZE, logits, float("-inf"))
    return logits


@triton.jit(do_not_specialize=_VARYING)
def _page_lse(
    q_ptr,
    record_ptr,
    weight_ptr,
    length_ptr,
    lse_ptr,
    q_stride_b,
    q_stride_h,
    q_stride_g,
    q_stride_d,
    record_stride_b,
    record_stride_h,
    record_stride_p,
    length_stride_b,
    length_stride_h,
    num_kv_heads,
    group,
    parts,
    number,
    padded,
    each,
    scale,
    WEIGHTED: tl.constexpr,
    BOUNDED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    MEAN: tl.constexpr,
    DIRECTIONS: tl.constexpr,
    COEFFICIENTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Writes ``lse [B, Hkv, G, padded]``, contiguous. ``length`` (``BOUNDED``): how many of the first pages are there.

    ``BLOCK_H`` holds half of the dimensions, which share bytes with the other half.
    """
    HALF: tl.constexpr = (DIM + 1) // 2
    WORDS: tl.constexpr = COEFFICIENTS % 4 == 0 and SIZE % 8 == 0
    UNIT: tl.constexpr = 8 if WORDS else 2
    UNITS: tl.constexpr = (SIZE + UNIT - 1) // UNIT
    # records are fetched ahead where the loops below are unrolled, for which registers must suffice
    UNROLLED: tl.constexpr = UNITS if SIZE * BLOCK_M <= 256 else 1
    row, part, split = tl.program_id(0) // parts, tl.program_id(0) % parts, tl.program_id(1)
    batch, head = (row // num_kv_heads).to(tl.int64), (row % num_kv_heads).to(tl.int64)
    member = part * BLOCK_M + tl.arange(0, BLOCK_M)
    exist = member < group
    member = tl.where(exist, member, 0)
    dims, halves, places = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_N)

    q_ptr += batch * q_stride_b + head * q_stride_h + member[None, :] * q_stride_g
    weight_row = (batch * num_kv_heads + head) * DIM
    in_half, upper = halves < HALF, HALF + halves
    q = _query(q_ptr, q_stride_d, weight_ptr, weight_row, dims, dims < DIM, exist, WEIGHTED)
    low = _query(q_ptr, q_stride_d, weight_ptr, weight_row, halves, in_half, exist, WEIGHTED)
    high = _query(q_ptr, q_stride_d, weight_ptr, weight_row, upper, in_half & (upper < DIM), exist, WEIGHTED)
    record_ptr += batch * record_stride_b + head * record_stride_h
    there = number
    if BOUNDED:
        length = tl.load(length_ptr + batch * length_stride_b + head * length_stride_h)
        there = tl.minimum(number, length.to(tl.int32))
    first = batch * num_kv_heads + head
    out_ptr = lse_ptr + (first * group + member)[None, :] * padded + places[:, None]
    scale *= LOG2E

    begin, end = split * each, tl.minimum((split + 1) * each, tl.cdiv(number, BLOCK_N))
    behind = tl.minimum(end, tl.maximum(begin, tl.cdiv(there, BLOCK_N)))
    for block in tl.range(begin, behind):
        place = block * BLOCK_N + places
        stored = place < there
        page_ptr = record_ptr + place.to(tl.int64) * record_stride_p
        scale_ptr = page_ptr.to(tl.pointer_type(tl.float32), bitcast=True)
        mean = tl.load(
            page_ptr[:, None] + (MEAN + dims)[None, :], mask=stored[:, None] & (dims < DIM)[None, :], other=0
        )
        mean = mean.to(tl.int8, bitcast=True).to(q.dtype)
        factor = tl.load(scale_ptr, mask=stored, other=0.0) * scale
        middle = tl.dot(mean, q, input_precision="ieee") * factor[:, None]
        along, reach = (), tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for direction in tl.static_range(RANK):
            at = (DIRECTIONS + direction * HALF + halves)[None, :]
            codes = tl.load(page_ptr[:, None] + at, mask=stored[:, None] & in_half[None, :], other=0)
            product = tl.dot(((codes & 15).to(tl.int8) - 8).to(q.dtype), low, input_precision="ieee")
            product = tl.dot(((codes >> 4).to(tl.int8) - 8).to(q.dtype), high, product, input_precision="ieee")
            factor = tl.load(scale_ptr + 1 + direction, mask=stored, other=0.0) * scale
            along += (product * factor[:, None],)
            reach += tl.abs(along[direction]) * 8.0

        # exponentials about the mean's logit can neither overflow nor all vanish, unless keys reach very far from it
        top = capped(middle, SOFTCAP)
        if tl.max(reach) > _FAR:
            top = tl.full([BLOCK_N, BLOCK_M], LOWEST, tl.float32)
            for unit in tl.range(UNITS, loop_unroll_factor=UNROLLED):
                for nibble in tl.static_range(UNIT):
                    logits = _logits(middle, along, page_ptr + COEFFICIENTS, stored, unit, nibble, SIZE, WORDS, SOFTCAP)
                    top = tl.maximum(top, logits)
        weight = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for unit in tl.range(UNITS, loop_unroll_factor=UNROLLED):
            for nibble in tl.static_range(UNIT):
                logits = _logits(middle, along, page_ptr + COEFFICIENTS, stored, unit, nibble, SIZE, WORDS, SOFTCAP)
                weight += tl.exp2(logits - top)
        lse = tl.where(stored[:, None], (top + tl.log2(weight)) / LOG2E, float("-inf"))
        tl.store(out_ptr + block * BLOCK_N, lse, mask=exist[None, :] & (place < padded)[:, None])
    for block in tl.range(behind, end):
        place = block * BLOCK_N + places
        none = tl.full([BLOCK_N, BLOCK_M], float("-inf"), tl.float32)
        tl.store(out_ptr + block * BLOCK_N, none, mask=exist[None, :] & (place < padded)[:, None])
