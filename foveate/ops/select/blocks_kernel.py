"""Top-k of long rows whose blocks have known maxima: Triton kernels of :func:`topk_of_blocks`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.ops.dispatch import UnsupportedError
from foveate.ops.select.kth_kernel import (
    LOWEST,
    above_all,
    choose,
    count_valid,
    find_kth,
    find_kth_of_many,
    float_of,
    ordered,
    plain,
    put,
    put_end,
    read_scores,
    scores_at,
)

_HELD = 16384
"""The most scores of a row, or of its chosen blocks, that are kept in registers."""
_SHORT = 4096
"""The longest rows that are kept whole although a part of their blocks would do, which saves a launch."""
_TILE = tl.constexpr(4096)
"""Values of a tile, whose chosen ones are compacted and written together."""
_KEPT = 8192
"""The most scores that are kept of rows that do not fit."""
_CHUNK = 2048
"""Scores of such rows that a program looks at at once."""


def topk_of_blocks(
    scores: Tensor, maxima: Tensor, visible: Tensor, k: int, block: int, starts: Tensor | None = None
) -> Tensor:
    """See :func:`foveate.ops.select.blocks.topk_of_blocks`.

    A program owns a row, and looks for the k-th largest of values in its registers by counting how many reach a
    threshold, two of them at a time, five times or so. Short rows are kept whole. In longer rows it first chooses, in
    the same way, the k blocks whose maxima come first, and reads these alone. Each of them has a score that comes
    before every score of a block left out, so they hold the k first scores. (StreamIndex has no maxima and no such
    step.)

    Where k blocks, or all maxima of a row, are too many to keep, a program keeps the maxima of groups of blocks. At
    least k scores, and few more, reach the k-th largest of these. Blocks whose maximum reaches this bound are read
    once, and their scores that reach it are kept. Where these are too many, because scores tie or trend, they are read
    anew for each threshold. That costs time; the set is never wrong.
    """
    batch, rows, number = scores.shape
    blocks = maxima.shape[-1]
    if scores.dtype != torch.float32 or maxima.dtype != torch.float32:
        raise UnsupportedError(f"scores in {scores.dtype} with maxima in {maxima.dtype}")
    if block & (block - 1) or maxima.shape != (batch, rows, -(-number // block)) or visible.shape != (rows,):
        shapes = f"scores {tuple(scores.shape)}, maxima {tuple(maxima.shape)}, visible {tuple(visible.shape)}"
        raise ValueError(f"shapes do not fit blocks of {block}, a power of two: {shapes}")
    found = torch.empty(batch, rows, k, dtype=torch.int32, device=scores.device)
    visible, starts = visible.contiguous(), None if starts is None else starts.contiguous()
    if not number or not rows:
        return found.fill_(-1)
    padded = starts is not None
    few, some = number <= min(_SHORT, _HELD), k * block
    if few or (number <= _HELD and number <= some):
        return _short(scores, visible, starts, found, 1)
    if blocks <= _HELD and some <= _HELD:
        named = _short(maxima, visible, None, torch.empty_like(found), block)
        scores, apart, vector = _rows(scores)
        held = max(256, block, triton.next_power_of_2(some))
        _topk_of_named[rows, batch](
            scores, apart, visible, starts, named, found, rows, number, k,
            VECTOR=vector, BLOCK=block, HELD=held, PADDED=padded, num_warps=warps(held),
        )  # fmt: skip
        return found
    scores = scores.contiguous()
    listed = torch.empty(batch, rows, blocks, dtype=torch.int32, device=scores.device)
    room = min(triton.next_power_of_2(max(4 * k, _CHUNK)), _KEPT)
    kept, index = (torch.empty(batch, rows, room, dtype=x, device=scores.device) for x in (torch.float32, torch.int32))
    _topk_of_blocks[rows, batch](
        scores, maxima.contiguous(), visible, starts, listed, kept, index, found, rows, number, blocks, k,
        BLOCK=block, CHUNK=_CHUNK, GROUPS=min(triton.next_power_of_2(max(2 * k, _CHUNK)), _KEPT), ROOM=room,
        PADDED=padded, num_warps=8,
    )  # fmt: skip
    return found


def _short(scores: Tensor, visible: Tensor, starts: Tensor | None, found: Tensor, unit: int) -> Tensor:
    """The k largest of rows that are kept whole and have ``visible / unit`` scores; writes ``found [B, S, k]``."""
    batch, rows, number = scores.shape
    scores, apart, vector = _rows(scores)
    held = max(256, triton.next_power_of_2(number))
    _topk_of_short_rows[rows, batch](
        scores, apart, visible, starts, found, rows, number, found.shape[2],
        VECTOR=vector, UNIT=unit, HELD=held, PADDED=starts is not None, num_warps=warps(held),
    )  # fmt: skip
    return found


def warps(held: int) -> int:
    """Warps of a program that keeps ``held`` scores in its registers."""
    return 4 if held < 4096 else 8 if held <= 16384 else 16


def _rows(scores: Tensor) -> tuple[Tensor, int, int]:
    """Scores whose rows are one ``apart`` from the next, in vectors of 4 where all begin at 16 bytes, or of 1."""
    if scores.stride(2) != 1 or scores.stride(0) != scores.shape[1] * scores.stride(1):
        scores = scores.contiguous()
    vector = 1 if scores.stride(1) % 4 or scores.data_ptr() % 16 else 4
    return scores, scores.stride(1) // vector, vector


# Sizes change from call to call; unspecialised, one compiled kernel serves all of them.
@triton.jit(do_not_specialize=["apart", "rows", "number", "k"])
def _topk_of_short_rows(
    score_ptr,
    apart,
    visible_ptr, start_ptr, found_ptr,
    rows, number, k,
    VECTOR: tl.constexpr, UNIT: tl.constexpr, HELD: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The k largest of short rows: writes ``found [B, S, k]``, ascending and then -1. Rows of scores are ``apart *
    VECTOR`` from each other.

    A program owns a row and reads it once. If it holds more than ``2 * _TILE`` scores, it reads them a second time, in
    ascending order, to write the indices.

    Shapes: N = HELD scores, T = _TILE scores.
    """
    s = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64) * rows + s
    score_ptr += row * apart * VECTOR
    found_ptr += row * k
    visible = tl.minimum(tl.cdiv(tl.load(visible_ptr + s), UNIT), number).to(tl.int32)
    begin = 0
    if PADDED:
        begin = tl.load(start_ptr + tl.program_id(1)).to(tl.int32)

    # 1. Load the row and find its k-th largest score.
    index = tl.arange(0, HELD)  # [N]
    x = plain(read_scores(score_ptr, index, visible, VECTOR), (index >= begin) & (index < visible))  # [N]
    valid = count_valid(x)
    kth, room, crowded = find_kth(x, k, LOWEST + 1, valid, above_all(x))

    # 2. Write the indices of the chosen scores, and -1 behind them.
    if HELD <= 2 * _TILE:
        chosen, _ = choose(x, kth, room, crowded, 0)  # [N]
        put(found_ptr, 0, index, chosen)
    else:  # to read the row again is faster than to number all scores at once
        places, written, equal = tl.arange(0, _TILE), tl.zeros([], tl.int32), tl.zeros([], tl.int32)  # [T], scalars
        for first in tl.range(0, visible, _TILE):
            place = first + places  # [T]
            y = plain(read_scores(score_ptr, place, visible, VECTOR), (place >= begin) & (place < visible))  # [T]
            chosen, equal = choose(y, kth, room, crowded, equal)  # [T]
            put(found_ptr, written, place, chosen)
            written += tl.sum(chosen.to(tl.int32), 0)
    put_end(found_ptr, tl.minimum(valid, k), k, 1024)


@triton.jit
def _of_named(
    list_ptr, first, score_ptr, named, begin, visible, VECTOR: tl.constexpr, BLOCK: tl.constexpr, MANY: tl.constexpr
):
    """The scores of ``MANY`` of the blocks that are named, from the ``first`` name on: their indices ``[M, BLOCK]``,
    and the scores ``[M, BLOCK]``, :func:`plain`.

    Shapes: M = MANY blocks.
    """
    places = first + tl.arange(0, MANY)  # [M]
    block = tl.load(list_ptr + places, mask=places < named, other=-1)  # [M]
    index = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # [M, BLOCK]
    there = (block >= 0)[:, None] & (index < tl.cdiv(visible, VECTOR) * VECTOR)  # [M, BLOCK]
    x = tl.load(score_ptr + index, mask=there, other=float("-inf"))  # [M, BLOCK]
    return index, plain(x, (block >= 0)[:, None] & (index >= begin) & (index < visible))


# Sizes change from call to call; unspecialised, one compiled kernel serves all of them.
@triton.jit(do_not_specialize=["apart", "rows", "number", "k"])
def _topk_of_named(
    score_ptr,
    apart,
    visible_ptr, start_ptr, list_ptr, found_ptr,
    rows, number, k,
    VECTOR: tl.constexpr, BLOCK: tl.constexpr, HELD: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The k largest scores of the blocks that ``list [B, S, k]`` names, ascending and then -1: writes ``found [B, S,
    k]``. Rows of scores are ``apart * VECTOR`` from each other.

    A program owns a row. It reads all named blocks at once, and a second time in ascending order to write the indices.

    Shapes: N = HELD scores of L = HELD / BLOCK blocks; M = MANY blocks that are written at once.
    """
    s = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64) * rows + s
    score_ptr += row * apart * VECTOR
    list_ptr += row * k
    found_ptr += row * k
    visible = tl.minimum(tl.load(visible_ptr + s), number).to(tl.int32)
    begin = 0
    if PADDED:
        begin = tl.load(start_ptr + tl.program_id(1)).to(tl.int32)

    # 1. Load the named blocks. If k blocks have a score, k scores reach the least of their maxima, which bounds the
    # k-th.
    _, x = _of_named(list_ptr, 0, score_ptr, k, begin, visible, VECTOR, BLOCK, HELD // BLOCK)  # [L, BLOCK]
    best = tl.max(x, 1)  # [L]
    named = count_valid(best)
    bound = ordered(tl.min(tl.where(best > float("-inf"), best, float("inf")), 0))
    bound = tl.where(named == k, bound, LOWEST + 1)  # k scores reach it
    x = tl.reshape(x, [HELD])  # [N]

    # 2. Find the k-th largest score.
    valid, reach = count_valid(x), tl.sum((x >= float_of(bound)).to(tl.int32), 0)
    kth, room, crowded = find_kth(x, k, bound, reach, above_all(x))

    # 3. Walk over the named blocks and write the indices of the chosen scores, and -1 behind them.
    MANY: tl.constexpr = max(1, min(HELD, _TILE) // BLOCK)
    written, equal = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for first in tl.range(0, named, MANY):
        # [M, BLOCK], [M, BLOCK]
        index, y = _of_named(list_ptr, first, score_ptr, named, begin, visible, VECTOR, BLOCK, MANY)
        chosen, equal = choose(tl.reshape(y, [MANY * BLOCK]), kth, room, crowded, equal)  # [M * BLOCK]
        put(found_ptr, written, tl.reshape(index, [MANY * BLOCK]), chosen)
        written += tl.sum(chosen.to(tl.int32), 0)
    put_end(found_ptr, tl.minimum(valid, k), k, 1024)


# Sizes change from call to call; unspecialised, one compiled kernel serves all of them.
@triton.jit(do_not_specialize=["rows", "number", "blocks", "k"])
def _topk_of_blocks(
    score_ptr, max_ptr, visible_ptr, start_ptr, list_ptr, kept_ptr, index_ptr, found_ptr,
    rows, number, blocks, k,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr, ROOM: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The k largest scores of rows whose best blocks do not fit into registers: writes ``found [B, S, k]``, ascending
    and then -1. All tensors are contiguous; ``list [B, S, blocks]``, and ``kept`` and ``index [B, S, ROOM]``, are
    scratch memory.

    A program owns a row. It reads the maxima twice, and then the scores of blocks whose maximum reaches a bound, in
    ascending order: once, or once more for every two thresholds and to write, if too many scores reach the bound.

    Shapes: C = CHUNK scores, G = GROUPS groups of blocks, R = ROOM scores that are kept.
    """
    s = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64) * rows + s
    score_ptr += row * number
    max_ptr += row * blocks
    list_ptr += row * blocks
    kept_ptr += row * ROOM
    index_ptr += row * ROOM
    found_ptr += row * k
    visible = tl.minimum(tl.load(visible_ptr + s), number).to(tl.int32)
    some = (visible + BLOCK - 1) // BLOCK
    places = tl.arange(0, CHUNK)  # [C]
    begin = 0
    if PADDED:
        begin = tl.load(start_ptr + tl.program_id(1)).to(tl.int32)

    # 1. Find a bound that at least k scores reach, the k-th largest maximum of groups of blocks, and list the blocks
    # whose maximum reaches it.
    tops = tl.full([GROUPS], float("-inf"), tl.float32)  # [G]
    for first in tl.range(0, some, GROUPS):
        _, top = scores_at(max_ptr, list_ptr, first + tl.arange(0, GROUPS), some, 0, some, False, BLOCK)  # [G]
        tops = tl.maximum(tops, top)  # [G]
    most, nothing = tl.max(tops, 0), tl.zeros([], tl.int32)
    bound, _, _ = find_kth(tops, k, LOWEST + 1, count_valid(tops), above_all(tops))
    reached = float_of(bound)
    listed = nothing
    for first in tl.range(0, some, CHUNK):
        block, best = scores_at(max_ptr, list_ptr, first + places, some, 0, some, False, BLOCK)  # [C], [C]
        named = best >= reached  # [C]
        tl.store(list_ptr + listed + tl.cumsum(named.to(tl.int32), 0) - 1, block, mask=named)
        listed += tl.sum(named.to(tl.int32), 0)
    # Threads of the program read what other threads have written to memory.
    tl.debug_barrier()

    # 2. Keep the scores of these blocks that reach the bound, as long as there is room.
    count, kept = listed * BLOCK, nothing
    for first in tl.range(0, count, CHUNK):
        index, x = scores_at(score_ptr, list_ptr, first + places, count, begin, visible, True, BLOCK)  # [C], [C]
        reach = x >= reached  # [C]
        at = kept + tl.cumsum(reach.to(tl.int32), 0) - 1  # [C]
        tl.store(kept_ptr + at, x, mask=reach & (at < ROOM))
        tl.store(index_ptr + at, index, mask=reach & (at < ROOM))
        kept += tl.sum(reach.to(tl.int32), 0)
        most = tl.maximum(most, tl.max(x, 0))  # maxima may have missed a NaN
    tl.debug_barrier()

    # 3. Find the k-th of them, and write the indices of the chosen scores and -1 behind them.
    if kept <= ROOM:
        slots = tl.arange(0, ROOM)  # [R]
        x = tl.load(kept_ptr + slots, mask=slots < kept, other=float("-inf"))  # [R]
        kth, room, crowded = find_kth(x, k, bound, kept, ordered(most) + 1)
        chosen, equal = choose(x, kth, room, crowded, 0)  # [R]
        index = tl.load(index_ptr + slots, mask=chosen, other=0)  # [R]
        put(found_ptr, nothing, index, chosen)
    else:
        kth, room, crowded = find_kth_of_many(
            score_ptr, list_ptr, count, begin, visible, k, bound, kept, ordered(most) + 1, True, BLOCK, CHUNK
        )
        written, equal = nothing, nothing
        for first in tl.range(0, count, CHUNK):
            index, x = scores_at(score_ptr, list_ptr, first + places, count, begin, visible, True, BLOCK)  # [C], [C]
            chosen, equal = choose(x, kth, room, crowded, equal)  # [C]
            put(found_ptr, written, index, chosen)
            written += tl.sum(chosen.to(tl.int32), 0)
    put_end(found_ptr, tl.minimum(kept, k), k, CHUNK)
