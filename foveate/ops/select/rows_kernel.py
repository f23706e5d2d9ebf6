"""Top-k of rows of any length with a count for each: Triton kernels of :func:`topk_rows`."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.ops.dispatch import UnsupportedError
from foveate.ops.gpu.tiles import cdiv, multiprocessors, next_power_of_2
from foveate.ops.select.blocks_kernel import _HELD, warps
from foveate.ops.select.kth_kernel import (
    HIGHEST,
    LOWEST,
    above_all,
    count_valid,
    find_kth,
    find_kth_of_many,
    float_of,
    plain,
    put_end,
    read_scores,
    row_of,
    scores_of,
)
from foveate.ops.select.short_rows_kernel import VARYING, choose_of_short_row, topk_of_short_rows

_TILE = 2048
"""Scores that a program reads at once."""
_WARPS = 4
"""Warps of such a program."""
_RESIDENT = 16
"""Programs that a multiprocessor runs at a time."""
_MOST = 64
"""The most programs that share a row."""
_SAMPLES = 4096, 16384, 32768
"""Sample used to bracket a row's k-th score: in rows of up to 196,608 scores, of up to 524,288, and of more."""
_DEVIATIONS, _SLACK = tl.constexpr(4.5), tl.constexpr(3.0)
"""How far the two brackets are from the expected place in the sample: standard deviations, and scores."""
_SPARE = tl.constexpr(0.0625)
"""How much wider the brackets may be, which saves finding them exactly."""
_ROOM = 1 << 17
"""The most scores kept between the brackets: a megabyte a row, enough for rows of up to 4 million scores."""
_HOLDS = tl.constexpr(32768)
"""The most kept scores that fit into registers; more are read for each two thresholds, :data:`_AT_ONCE` at once."""
_AT_ONCE = tl.constexpr(8192)
_TALLIES, _KEPT = tl.constexpr(1), tl.constexpr(2)
"""What locates the chosen scores, see :func:`_settle`."""


def topk_rows(
    scores: Tensor, counts: Tensor, k: int, *, lengths: Tensor | None = None, dtype: torch.dtype = torch.int64
) -> Tensor:
    """See :func:`foveate.ops.select.reference.topk_rows`; NaN counts as inf.

    Short rows are kept in registers whole, see :func:`topk_of_blocks`. In longer rows a sample gives two scores that
    bracket the k-th, in all but one row of 10^5. Scores above both are counted, the few scores between them are kept,
    and the k-th is found among these. Each program then knows how many scores are chosen before its part of the row,
    and so the places of its own. Thus all scores are read twice. Room for kept scores grows with the row, up to
    :data:`_ROOM`. If the counts do not prove that the k-th is among the kept scores (many ties, an order that the
    sample does not show), the row is read again and again instead, which costs time and never a wrong set. Repeats are
    equal.

    Scores beyond a row's length are not read, and the programs of a row share the scores before it. A row that is short
    by its length is kept whole, too, and its programs in the other launches leave at once; a row without scores leaves
    all launches.
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
    if scores.stride(2) != 1:
        scores = scores.contiguous()
    apart = scores.stride()[:2]
    vector = 1 if apart[0] % 4 or apart[1] % 4 or scores.data_ptr() % 16 else 4
    ends = (None, 0) if lengths is None else (lengths, lengths.stride(0))
    rows_of_scores = (scores, apart[0] // vector, apart[1] // vector, counts, counts.stride(0), *ends)
    if number <= _HELD:
        held = max(256, next_power_of_2(number))
        topk_of_short_rows[(rows,)](
            *rows_of_scores, found, heads, number, k,
            VECTOR=vector, HELD=held, num_warps=warps(held),
        )  # fmt: skip
        return found
    fill = max(1, _RESIDENT * multiprocessors(scores.device) // rows)
    tiles = cdiv(number, _TILE)
    chunks = cdiv(tiles, cdiv(tiles, min(tiles, _MOST, fill)))
    sample, room = sizes(number, k)
    made = {"dtype": torch.int32, "device": scores.device}
    bounds, settled, count = torch.empty(2, rows, **made), torch.empty(3, rows, **made), torch.empty(rows, **made)
    tallies, index = torch.empty(2, rows, chunks, **made), torch.empty(rows, room, **made)
    kept = torch.empty(rows, room, dtype=torch.float32, device=scores.device)
    held = -1 if lengths is None else _HELD  # a row of its own length may be as short
    short = {"VECTOR": vector, "HELD": held}
    _bracket[(rows,)](
        *rows_of_scores, bounds, count, found, heads, rows, number, k,
        SAMPLE=sample, **short, num_warps=warps(max(sample, held)),
    )  # fmt: skip
    _keep_between[chunks, rows](
        *rows_of_scores, bounds, count, tallies, kept, index, heads, rows, number, k, chunks,
        TILE=_TILE, ROOM=room, **short, num_warps=_WARPS,
    )  # fmt: skip
    _settle[(rows,)](
        *rows_of_scores, bounds, tallies, kept, settled, heads, rows, number, k, chunks,
        CHUNKS=next_power_of_2(chunks), TILE=_TILE, ROOM=room, **short, num_warps=warps(room),
    )  # fmt: skip
    _write_chosen[chunks, rows](
        *rows_of_scores, tallies, kept, index, settled, found, heads, rows, number, k, chunks,
        CHUNKS=next_power_of_2(chunks), TILE=_TILE, ROOM=room, **short, num_warps=_WARPS,
    )  # fmt: skip
    return found


def sizes(number: int, k: int) -> tuple[int, int]:
    """Scores of the sample, and room for kept scores, in rows of ``number`` scores."""
    sample = _SAMPLES[(number > 3 << 16) + (number > 1 << 19)]
    share = min(k / number, 0.5)  # a row that chooses fewer keeps fewer
    away = _DEVIATIONS.value * math.sqrt(sample * share * (1 - share)) + _SLACK.value
    drawn = 2 * ((1 + _SPARE.value) * away + 2)  # between the two
    between = (drawn + _DEVIATIONS.value * math.sqrt(drawn)) * number / sample
    return sample, min(max(1024, next_power_of_2(math.ceil(between))), _ROOM)


@triton.jit(do_not_specialize=[*VARYING, "rows"])
def _bracket(
    score_ptr,
    stride_b, stride_h,
    count_ptr, count_stride, length_ptr, length_stride, bound_ptr, kept_count_ptr, found_ptr,
    heads, rows, number, k,
    SAMPLE: tl.constexpr, VECTOR: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Two scores that bracket the k-th largest of each row: writes ``bound [2, rows]``, as :func:`ordered`, and 0 to
    ``kept_count [rows]``. For a row of up to ``HELD`` scores it writes ``found [rows, k]`` instead; a row of half that
    length takes half of the registers.

    A program owns a row, the scores of one head in one row of the batch, and reads a sample of its scores, or the whole
    row if it is short.

    Shapes: S = SAMPLE scores.
    """
    row = tl.program_id(0).to(tl.int64)
    score_ptr, number, allowed = row_of(
        score_ptr, stride_b, stride_h, count_ptr, count_stride, length_ptr, length_stride, row, heads, number, k, VECTOR
    )

    # 1. Choose from a row that is short by its length; the other kernels leave this row alone.
    if HELD > 0:
        if number <= 0:
            put_end(found_ptr + row * k, 0, k, HELD // 2)
            return
        if number <= HELD // 2:
            choose_of_short_row(score_ptr, number, allowed, found_ptr + row * k, k, VECTOR, HELD // 2)
            return
        if number <= HELD:
            choose_of_short_row(score_ptr, number, allowed, found_ptr + row * k, k, VECTOR, HELD)
            return

    # 2. Draw a sample: one score of each of ``size`` equal parts of the row, at a place that changes from part to part,
    # so that a periodic order of the scores does no harm.
    drawn, size = tl.arange(0, SAMPLE), tl.minimum(number, SAMPLE)  # [S], scalar
    each = tl.maximum(number // tl.maximum(size, 1), 1)
    within = ((drawn * 40503 >> 5).to(tl.uint32) % each.to(tl.uint32)).to(tl.int32)  # [S]
    left = number - each * size  # 0 where size is not SAMPLE
    place = drawn * each + drawn * left // SAMPLE + within  # [S]
    x = plain(tl.load(score_ptr + place, mask=drawn < size, other=float("-inf")), drawn < size)  # [S]

    # 3. Find two scores of the sample, one on either side of the place where the k-th is expected.
    valid, behind = count_valid(x), above_all(x)
    share = allowed.to(tl.float32) / tl.maximum(number, 1)
    expected = share * size
    away = _DEVIATIONS * tl.sqrt(tl.maximum(expected * (1 - share), 0.0)) + _SLACK
    spare = tl.ceil(away * _SPARE).to(tl.int32)
    last, first = tl.ceil(expected + away).to(tl.int32), tl.floor(expected - away).to(tl.int32) - spare
    low, _, _ = find_kth(x, last, LOWEST + 1, valid, behind, spare)
    if first > 0:
        high, _, _ = find_kth(x, first, LOWEST + 1, valid, behind, spare)
    else:
        high = tl.zeros([], tl.int32) + HIGHEST

    # 4. Write the two brackets.
    tl.store(bound_ptr + row, low)
    tl.store(bound_ptr + rows + row, high)
    tl.store(kept_count_ptr + row, 0)


@triton.jit(do_not_specialize=[*VARYING, "rows", "chunks"])
def _keep_between(
    score_ptr,
    stride_b, stride_h,
    count_ptr, count_stride, length_ptr, length_stride, bound_ptr, kept_count_ptr, tally_ptr, kept_ptr, index_ptr,
    heads, rows, number, k, chunks,
    TILE: tl.constexpr, ROOM: tl.constexpr, VECTOR: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """The scores between the brackets: writes ``kept [rows, ROOM]``, in any order and at most ``ROOM`` of them; their
    places in the row, ``index [rows, ROOM]``; and ``tally [2, rows, chunks]``, how many scores of each chunk are above
    the brackets and between them.

    A program owns a chunk of a row, and reads it once, in ascending order, ``TILE`` scores at a time.

    Shapes: T = TILE scores.
    """
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    score_ptr, number, _ = row_of(
        score_ptr, stride_b, stride_h, count_ptr, count_stride, length_ptr, length_stride, row, heads, number, k, VECTOR
    )
    if number <= HELD:
        return

    # 1. Find the chunk.
    low, high = float_of(tl.load(bound_ptr + row)), float_of(tl.load(bound_ptr + rows + row))
    kept_ptr += row * ROOM
    index_ptr += row * ROOM
    above, inside = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    each = tl.cdiv(tl.cdiv(number, TILE), chunks)
    place, end = chunk * each * TILE + tl.arange(0, TILE), tl.minimum(number, (chunk + 1) * each * TILE)  # [T], scalar

    # 2. Walk over the chunk; the next scores are loaded ahead. Programs of a row take places for their scores from one
    # counter, so scores are kept in the order of arrival.
    following = read_scores(score_ptr, place, end, VECTOR)  # [T]
    for _ in tl.range(each):
        x, following = plain(following, place < number), read_scores(score_ptr, place + TILE, end, VECTOR)  # [T], [T]
        over = x > high  # [T]
        between = (x >= low) & (x <= high)  # [T]
        # [T]; two counts share an integer, 16 bits apart, so one scan gives both
        both = between.to(tl.int32) + (over.to(tl.int32) << 16)
        seen, all_of_it = tl.cumsum(both, 0), tl.sum(both, 0)  # [T], scalar
        some = all_of_it & 0xFFFF
        at = tl.atomic_add(kept_count_ptr + row, some, sem="relaxed") + (seen & 0xFFFF) - 1  # [T]
        there = between & (at < ROOM)  # [T]
        tl.store(kept_ptr + at, x, mask=there)
        tl.store(index_ptr + at, place, mask=there)
        above += all_of_it >> 16
        inside += some
        place += TILE

    # 3. Write the counts of the chunk.
    tl.store(tally_ptr + row * chunks + chunk, above)
    tl.store(tally_ptr + (rows + row) * chunks + chunk, inside)


@triton.jit(do_not_specialize=[*VARYING, "rows", "chunks"])
def _settle(
    score_ptr,
    stride_b, stride_h,
    count_ptr, count_stride, length_ptr, length_stride, bound_ptr, tally_ptr, kept_ptr, settled_ptr,
    heads, rows, number, k, chunks,
    CHUNKS: tl.constexpr, TILE: tl.constexpr, ROOM: tl.constexpr, VECTOR: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """The k-th score of each row: writes ``settled [3, rows]``: the threshold that :func:`find_kth` finds, how many
    scores equal to it are chosen, and what locates the chosen scores: the tallies (:data:`_TALLIES`), the scores that
    were kept (:data:`_KEPT`), or (0) only the row itself.

    A program owns a row. It reads the counts of all chunks, and then the kept scores; if the counts do not prove that
    the k-th is among these, it reads the row again for every two thresholds.

    Shapes: C = CHUNKS counts, R = ROOM scores that were kept, T = TILE scores.
    """
    row = tl.program_id(0).to(tl.int64)
    score_ptr, number, allowed = row_of(
        score_ptr, stride_b, stride_h, count_ptr, count_stride, length_ptr, length_stride, row, heads, number, k, VECTOR
    )
    if number <= HELD:
        return

    # 1. Add up the counts, which prove or do not prove that the k-th lies between the brackets.
    low, high = tl.load(bound_ptr + row), tl.load(bound_ptr + rows + row)
    every = tl.arange(0, CHUNKS)  # [C]
    above = tl.sum(tl.load(tally_ptr + row * chunks + every, mask=every < chunks, other=0), 0)
    kept = tl.sum(tl.load(tally_ptr + (rows + row) * chunks + every, mask=every < chunks, other=0), 0)
    proved = (above <= allowed) & ((allowed <= above + kept) | (low == LOWEST + 1))  # both counts are exact
    by = tl.where(low == high, _TALLIES, tl.where(kept <= ROOM, _KEPT, 0))

    # 2. Find the k-th: it is the bracket, or among the kept scores, or anywhere in the row.
    if proved & (low == high):
        last, room = low, tl.minimum(allowed - above, kept)
    elif proved & (kept <= ROOM):
        kept_ptr += row * ROOM
        if ROOM <= _HOLDS:
            slots = tl.arange(0, ROOM)  # [R]
            x = tl.load(kept_ptr + slots, mask=slots < kept, other=float("-inf"))  # [R]
            last, room, _ = find_kth(x, allowed - above, low, kept, high + 1)
        else:
            last, room, _ = find_kth_of_many(
                kept_ptr, kept_ptr, kept, 0, kept, allowed - above, low, kept, high + 1, False, 1, _AT_ONCE
            )
    else:
        places = tl.arange(0, TILE)  # [T]
        valid = tl.zeros([TILE], tl.int32)  # [T]
        for begin in tl.range(0, number, TILE):
            valid += (scores_of(score_ptr, begin + places, number, VECTOR) > float("-inf")).to(tl.int32)  # [T]
        valid, behind = tl.sum(valid, 0), tl.zeros([], tl.int32) + HIGHEST + 1
        last, room, _ = find_kth_of_many(
            score_ptr, score_ptr, number, 0, number, allowed, LOWEST + 1, valid, behind, False, 1, TILE
        )

    # 3. Write the threshold, the room for equal scores, and what locates the chosen scores.
    tl.store(settled_ptr + row, last)
    tl.store(settled_ptr + rows + row, room)
    tl.store(settled_ptr + 2 * rows + row, tl.where(proved, by, 0))


@triton.jit(do_not_specialize=[*VARYING, "rows", "chunks"])
def _write_chosen(
    score_ptr,
    stride_b, stride_h,
    count_ptr, count_stride, length_ptr, length_stride, tally_ptr, kept_ptr, index_ptr, settled_ptr, found_ptr,
    heads, rows, number, k, chunks,
    CHUNKS: tl.constexpr, TILE: tl.constexpr, ROOM: tl.constexpr, VECTOR: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """The indices of the chosen scores: writes ``found [rows, k]``, ascending and then -1.

    A program owns a chunk of a row. It first finds how many scores are chosen before the chunk, from counts, from the
    kept scores or from the row itself, see :func:`_settle`, and then reads the chunk once, in ascending order, ``TILE``
    scores at a time. The last program of a row also writes -1 after the chosen ones.

    Shapes: T = TILE scores, C = CHUNKS counts.
    """
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    score_ptr, number, allowed = row_of(
        score_ptr, stride_b, stride_h, count_ptr, count_stride, length_ptr, length_stride, row, heads, number, k, VECTOR
    )
    if number <= HELD:
        return
    last, room = float_of(tl.load(settled_ptr + row)), tl.load(settled_ptr + rows + row)
    each = tl.cdiv(tl.cdiv(number, TILE), chunks)
    begin, places = chunk * each * TILE, tl.arange(0, TILE)  # scalar, [T]

    # 1. Count the scores above the threshold before the chunk, and the scores equal to it.
    higher, equal = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)  # [T], [T]
    above, inside, every = tl.zeros([], tl.int32), tl.zeros([], tl.int32), tl.arange(0, CHUNKS)  # scalars, [C]
    by = tl.load(settled_ptr + 2 * rows + row)
    if by == 0:
        for first in tl.range(0, begin, TILE):
            x = scores_of(score_ptr, first + places, number, VECTOR)  # [T]
            higher += (x > last).to(tl.int32)  # [T]
            equal += (x == last).to(tl.int32)  # [T]
    else:
        above = tl.sum(tl.load(tally_ptr + row * chunks + every, mask=every < chunk, other=0), 0)
        tally_ptr += (rows + row) * chunks
        if by == _TALLIES:
            inside = tl.sum(tl.load(tally_ptr + every, mask=every < chunk, other=0), 0)
        else:
            kept = tl.sum(tl.load(tally_ptr + every, mask=every < chunks, other=0), 0)
            kept_ptr += row * ROOM
            index_ptr += row * ROOM
            for first in tl.range(0, kept, TILE):
                slots = first + places  # [T]
                x = tl.load(kept_ptr + slots, mask=slots < kept, other=float("-inf"))  # [T]
                index = tl.load(index_ptr + slots, mask=slots < kept, other=begin)  # [T]
                higher += ((x > last) & (index < begin)).to(tl.int32)  # [T]
                equal += ((x == last) & (index < begin)).to(tl.int32)  # [T]
    higher, equal = above + tl.sum(higher, 0), inside + tl.sum(equal, 0)

    # 2. Walk over the chunk; the next scores are loaded ahead.
    found_ptr += row * k
    place, end = begin + places, tl.minimum(number, begin + each * TILE)  # [T], scalar
    following = read_scores(score_ptr, place, end, VECTOR)  # [T]
    for _ in tl.range(each):
        x, following = plain(following, place < number), read_scores(score_ptr, place + TILE, end, VECTOR)  # [T], [T]
        over, tie = x > last, x == last  # [T], [T]
        # [T]; two counts share an integer, 16 bits apart, so one scan gives both
        both = over.to(tl.int32) + (tie.to(tl.int32) << 16)
        seen, all_of_it = tl.cumsum(both, 0), tl.sum(both, 0)  # [T], scalar
        rank = equal + (seen >> 16)  # [T]
        at = higher + (seen & 0xFFFF) + tl.minimum(rank, room) - 1  # [T]
        tl.store(found_ptr + at, place, mask=(over | (tie & (rank <= room))) & (at < allowed))
        higher += all_of_it & 0xFFFF
        equal += all_of_it >> 16
        place += TILE

    # 3. Write -1 to the places that remain.
    if chunk == chunks - 1:
        for first in tl.range(higher + tl.minimum(equal, room), k, TILE):
            tl.store(found_ptr + first + places, -1, mask=first + places < k)
