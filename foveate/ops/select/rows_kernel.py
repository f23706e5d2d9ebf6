"""Top-k of rows of any length with a count for each: Triton kernels of :func:`topk_rows`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.ops._dispatch import UnsupportedError
from foveate.ops._tile import multiprocessors
from foveate.ops.select.blocks_kernel import _HELD, _HIGHEST, _LOWEST, _NONE, _chosen, _end, _kth, _ordered, _put

_TILE = 2048
"""Scores that a program looks at at once."""
_RESIDENT = 16
"""Programs that a multiprocessor runs at a time."""
_MOST = 64
"""The most programs that share a row."""
_BINS = tl.constexpr(1024)
"""Room for the counts of a digit."""
_VARYING = ["score_stride_b", "score_stride_h", "heads", "number", "k"]
"""What changes from step to step, or from batch to batch: no reason to compile anew."""


def topk_rows(scores: Tensor, counts: Tensor, k: int, *, dtype: torch.dtype = torch.int64) -> Tensor:
    """See :func:`foveate.ops.select.reference.topk_rows`; NaN counts as inf.

    Short rows are kept in registers whole, see :func:`topk_of_blocks`. Of others the k-th largest score is found digit
    by digit, from the highest on: programs count how many of the scores that
    agree in the digits so far have each of the next ones (radix select). After two digits of six bits few agree, and
    those are counted one by one. Then a program knows from the counts of those before it where its own chosen ones go.
    Whatever the scores, they are read five times. Counts are integers: repeats are equal.
    """
    batch, heads, number = scores.shape
    if scores.dtype != torch.float32:
        raise UnsupportedError(f"scores in {scores.dtype}")
    if counts.shape != (batch,):
        raise ValueError(f"counts {tuple(counts.shape)} do not fit scores {tuple(scores.shape)}")
    k, rows = min(k, number), batch * heads
    found = torch.empty(batch, heads, k, dtype=dtype, device=scores.device)
    if not found.numel():
        return found
    if number <= _HELD:
        held = max(256, triton.next_power_of_2(number))
        _topk_of_short_rows[(rows,)](
            scores,
            *scores.stride(),
            counts,
            counts.stride(0),
            found,
            heads,
            number,
            k,
            HELD=held,
            num_warps=4 if held < 4096 else 8,
        )
        return found
    fill = max(1, _RESIDENT * multiprocessors(scores.device) // rows)
    tiles = triton.cdiv(number, _TILE)
    each = triton.cdiv(tiles, min(tiles, _MOST, fill))
    chunks = triton.cdiv(tiles, each)
    digits = torch.zeros(3 + chunks, rows, _BINS.value, dtype=torch.int32, device=scores.device)
    above = torch.empty(rows, chunks, dtype=torch.int32, device=scores.device)
    arguments = (scores, *scores.stride(), counts, counts.stride(0), digits, above)
    numbers = (heads, rows, number, k, each, chunks)
    for turn in range(4):
        _count_digits[chunks, rows](*arguments, *numbers, TURN=turn, TILE=_TILE, num_warps=4)
    _write_chosen[chunks, rows](*arguments, *numbers, found, TILE=_TILE, num_warps=4)
    return found


@triton.jit(do_not_specialize=_VARYING)
def _topk_of_short_rows(
    score_ptr,
    score_stride_b,
    score_stride_h,
    score_stride_n,
    count_ptr,
    count_stride,
    found_ptr,
    heads,
    number,
    k,
    HELD: tl.constexpr,
):
    """Writes ``found [rows, k]``."""
    row, index = tl.program_id(0).to(tl.int64), tl.arange(0, HELD)
    score_ptr += row // heads * score_stride_b + row % heads * score_stride_h
    allowed = tl.minimum(tl.load(count_ptr + row // heads * count_stride), k).to(tl.int32)
    x = tl.load(score_ptr + index.to(tl.int64) * score_stride_n, mask=index < number, other=float("-inf"))
    x = tl.minimum(_ordered(x), _HIGHEST)
    x = tl.where(x > _LOWEST, x, _NONE)
    valid, high = tl.sum((x != _NONE).to(tl.int32), 0), tl.max(x, 0) + 1
    kth, room, crowded = _kth(
        x, score_ptr, score_ptr, 0, 0, 0, allowed, _LOWEST + 1, valid, high, HOLDS=True, LISTED=False, BLOCK=1, CHUNK=1
    )
    chosen, _ = _chosen(x, kth, room, crowded, 0)
    found_ptr += row * k
    _put(found_ptr, 0, index, chosen, allowed)
    _end(found_ptr, tl.minimum(valid, allowed), k, 1024)


@triton.jit
def _scores(score_ptr, score_stride, place, number):
    """Scores as unsigned integers of the same order, and which of them may be chosen."""
    exist = place < number
    x = tl.minimum(_ordered(tl.load(score_ptr + place.to(tl.int64) * score_stride, mask=exist, other=0.0)), _HIGHEST)
    return x.to(tl.uint32, bitcast=True) ^ 0x80000000, exist & (x > _LOWEST)


@triton.jit
def _digit(counts, bins, left):
    """The highest digit that ``left`` scores or more reach (0 if none), and how many of the ``left`` have it."""
    reach = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    digit = tl.maximum(tl.sum((reach >= left).to(tl.int32), 0) - 1, 0)
    return digit, left - tl.sum(tl.where(bins > digit, counts, 0), 0)


@triton.jit
def _known(digit_ptr, rows, left, TURNS: tl.constexpr):
    """The first digits of the ``left``-th largest score of a row, and how many of the ``left`` begin with them."""
    known = tl.zeros([], tl.uint32)
    for turn in tl.static_range(TURNS):
        bins = tl.arange(0, 64 if turn < 2 else 1024)
        digit, left = _digit(tl.load(digit_ptr + turn * rows * _BINS + bins), bins, left)
        known = (known << (6 if turn < 2 else 10)) | digit.to(tl.uint32)
    return known, left


@triton.jit(do_not_specialize=[*_VARYING, "rows", "each", "chunks"])
def _count_digits(
    score_ptr,
    score_stride_b,
    score_stride_h,
    score_stride_n,
    count_ptr,
    count_stride,
    digit_ptr,
    above_ptr,
    heads,
    rows,
    number,
    k,
    each,
    chunks,
    TURN: tl.constexpr,
    TILE: tl.constexpr,
):
    """Adds to ``digit[TURN] [rows, 1024]`` how often each digit comes next among the scores that may still be the last
    one chosen. The last digits are counted for each chunk, in ``digit[3 + chunk]``, and in ``above [rows, chunks]`` the
    scores that are chosen whatever these are."""
    SHIFT: tl.constexpr = 26 - 6 * TURN if TURN < 2 else 30 - 10 * TURN
    BITS: tl.constexpr = 6 if TURN < 2 else 10
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    score_ptr += row // heads * score_stride_b + row % heads * score_stride_h
    allowed = tl.minimum(tl.load(count_ptr + row // heads * count_stride), k).to(tl.int32)
    known, _ = _known(digit_ptr + row * _BINS, rows, allowed, TURN)
    digit_ptr += ((TURN + chunk if TURN == 3 else TURN) * rows + row) * _BINS
    counts, above = tl.zeros([64], tl.int32), tl.zeros([TILE], tl.int32)
    for tile in tl.range(chunk * each, chunk * each + each):
        x, valid = _scores(score_ptr, score_stride_n, tile * TILE + tl.arange(0, TILE), number)
        if TURN > 0:
            if TURN == 3:
                above += (valid & (x >> (SHIFT + BITS) > known)).to(tl.int32)
            valid = valid & (x >> (SHIFT + BITS) == known)
        digit = ((x >> SHIFT) & ((1 << BITS) - 1)).to(tl.int32)
        if TURN < 2:
            counts += tl.histogram(digit, 64, mask=valid)
        else:
            tl.atomic_add(digit_ptr + digit, 1, mask=valid, sem="relaxed")
    if TURN < 2:
        tl.atomic_add(digit_ptr + tl.arange(0, 64), counts, mask=counts > 0, sem="relaxed")
    if TURN == 3:
        tl.store(above_ptr + row * chunks + chunk, tl.sum(above, 0))


@triton.jit(do_not_specialize=[*_VARYING, "rows", "each", "chunks"])
def _write_chosen(
    score_ptr,
    score_stride_b,
    score_stride_h,
    score_stride_n,
    count_ptr,
    count_stride,
    digit_ptr,
    above_ptr,
    heads,
    rows,
    number,
    k,
    each,
    chunks,
    found_ptr,
    TILE: tl.constexpr,
):
    """Writes ``found [rows, k]``: chunk after chunk, and -1 behind the last of them."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    score_ptr += row // heads * score_stride_b + row % heads * score_stride_h
    allowed = tl.minimum(tl.load(count_ptr + row // heads * count_stride), k).to(tl.int32)
    digit_ptr += row * _BINS
    known, left = _known(digit_ptr, rows, allowed, 3)

    bins, some = tl.arange(0, _BINS), tl.arange(0, 4)
    counts, before = tl.zeros([_BINS], tl.int32), tl.zeros([_BINS], tl.int32)
    higher = tl.zeros([], tl.int32)  # that are chosen in the chunks before this one
    for first in tl.range(0, chunks, 4):
        others = first + some
        of_chunks = digit_ptr + (3 + others.to(tl.int64))[:, None] * rows * _BINS + bins[None, :]
        found = tl.load(of_chunks, mask=(others < chunks)[:, None], other=0)
        counts += tl.sum(found, 0)
        before += tl.sum(tl.where((others < chunk)[:, None], found, 0), 0)
        higher += tl.sum(tl.load(above_ptr + row * chunks + others, mask=others < chunk, other=0), 0)
    digit, room = _digit(counts, bins, left)  # room for scores equal to the last one chosen
    higher += tl.sum(tl.where(bins > digit, before, 0), 0)
    equal = tl.sum(tl.where(bins == digit, before, 0), 0)
    kth = (known << 10) | digit.to(tl.uint32)

    found_ptr += row * k
    for tile in tl.range(chunk * each, chunk * each + each):
        place = tile * TILE + tl.arange(0, TILE)
        x, valid = _scores(score_ptr, score_stride_n, place, number)
        over, tie = valid & (x > kth), valid & (x == kth)
        both = tl.cumsum(over.to(tl.int32) + (tie.to(tl.int32) << 16), 0)
        rank = equal + (both >> 16)
        at = higher + (both & 0xFFFF) + tl.minimum(rank, room) - 1
        tl.store(found_ptr + at, place, mask=(over | (tie & (rank <= room))) & (at < allowed))
        higher += tl.sum(over.to(tl.int32), 0)
        equal += tl.sum(tie.to(tl.int32), 0)
    if chunk == chunks - 1:
        for first in tl.range(higher + tl.minimum(equal, room), k, TILE):
            places = first + tl.arange(0, TILE)
            tl.store(found_ptr + places, -1, mask=places < k)
