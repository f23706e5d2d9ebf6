"""Top-k of long rows whose blocks have known maxima: Triton kernels of :func:`topk_of_blocks`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.ops._dispatch import UnsupportedError

_HELD = 16384
"""The most values of a row that are kept in registers."""
_SHORT = 4096
"""Rows that are kept whole, though less of them would do: that takes a launch less."""
_TILE = tl.constexpr(4096)
"""Values among which those that are chosen are written at once."""
_KEPT = 8192
"""The most values that are kept of longer ones."""
_CHUNK = 2048
"""Values that it looks at at once where it cannot keep them all."""
_NONE = tl.constexpr(-2147483648)
_LOWEST = tl.constexpr(-2139095041)
_HIGHEST = tl.constexpr(0x7F800000)
"""What :func:`_ordered` makes of -inf and of inf."""


def topk_of_blocks(
    scores: Tensor, maxima: Tensor, visible: Tensor, k: int, block: int, starts: Tensor | None = None
) -> Tensor:
    """See :func:`foveate.ops.select.blocks.topk_of_blocks`.

    A program owns a row, and looks for the k-th largest of values in its registers by counting how many reach a
    threshold, ten times or so. Short rows it keeps whole. Of longer ones it first chooses blocks in the same way, the k
    whose maxima come first: each of them has a score that comes before all scores of a block that is left out, so that
    the k first scores are among theirs (StreamIndex needs no such step, having no maxima). Those alone are read.

    Where k blocks are too many to be kept, or all of a row's maxima are, a program keeps the maxima of groups of
    blocks: the k-th largest of them is a bound that at least k scores reach, and few more; the blocks whose maximum
    reaches it are read once, and the scores that do are kept. Where those are too many, because scores tie or trend,
    they are read anew for each threshold: that costs time and never a wrong set.
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
        _topk_of_named[rows, batch](
            scores,
            apart,
            visible,
            starts,
            named,
            found,
            rows,
            number,
            k,
            VECTOR=vector,
            BLOCK=block,
            HELD=max(256, block, triton.next_power_of_2(some)),
            PADDED=padded,
            num_warps=8,
        )
        return found
    scores = scores.contiguous()
    listed = torch.empty(batch, rows, blocks, dtype=torch.int32, device=scores.device)
    room = min(triton.next_power_of_2(max(4 * k, _CHUNK)), _KEPT)
    kept = torch.empty(2, batch, rows, room, dtype=torch.int32, device=scores.device)
    _topk_of_blocks[rows, batch](
        scores,
        maxima.contiguous(),
        visible,
        starts,
        listed,
        kept[0],
        kept[1],
        found,
        rows,
        number,
        blocks,
        k,
        BLOCK=block,
        CHUNK=_CHUNK,
        GROUPS=min(triton.next_power_of_2(max(2 * k, _CHUNK)), _KEPT),
        ROOM=room,
        PADDED=padded,
        num_warps=8,
    )
    return found


def _short(scores: Tensor, visible: Tensor, starts: Tensor | None, found: Tensor, unit: int) -> Tensor:
    """The k first of rows that are kept whole, of ``visible / unit`` scores; writes ``found [B, S, k]``."""
    batch, rows, number = scores.shape
    scores, apart, vector = _rows(scores)
    held = max(256, triton.next_power_of_2(number))
    _topk_of_short_rows[rows, batch](
        scores,
        apart,
        visible,
        starts,
        found,
        rows,
        number,
        found.shape[2],
        VECTOR=vector,
        UNIT=unit,
        HELD=held,
        PADDED=starts is not None,
        num_warps=4 if held < 4096 else 8,
    )
    return found


def _rows(scores: Tensor) -> tuple[Tensor, int, int]:
    """Scores whose rows are one ``apart`` from the next, in vectors of 4 where all begin at 16 bytes, or of 1."""
    if scores.stride(2) != 1 or scores.stride(0) != scores.shape[1] * scores.stride(1):
        scores = scores.contiguous()
    vector = 1 if scores.stride(1) % 4 or scores.data_ptr() % 16 else 4
    return scores, scores.stride(1) // vector, vector


@triton.jit
def _ordered(x):
    """Floats as integers of the same order, -0.0 as 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _between(low, high, reach_low, reach_high, k, turn):
    """A threshold between two, where the k-th is to be expected if the logarithm of the counts is linear; every third
    time the middle, so that there is an end."""
    a = (low ^ ((low >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    b = (high ^ ((high >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    most, least = tl.log2(reach_low.to(tl.float32)), tl.log2(tl.maximum(reach_high.to(tl.float32), 0.5))
    guess = _ordered(a + (b - a) * (most - tl.log2(k.to(tl.float32) + 0.5)) / (most - least))
    middle = (low & high) + ((low ^ high) >> 1)
    return tl.where((turn % 3 < 2) & (guess > low) & (guess < high), guess, middle)


@triton.jit
def _read(score_ptr, place, limit, VECTOR: tl.constexpr):
    """Scores before ``limit``, -inf elsewhere, and whatever is behind it in the ``VECTOR`` that it cuts: a mask that
    changes within one would have each score read by itself."""
    return tl.load(score_ptr + place, mask=place < tl.cdiv(limit, VECTOR) * VECTOR, other=float("-inf"))


@triton.jit
def _order(x, there):
    """Scores as integers of the same order, none where there is no score or -inf; NaN counts as inf."""
    x = _ordered(tl.where(x != x, float("inf"), x))
    return tl.where(there & (x > _LOWEST), x, _NONE)


@triton.jit
def _score(ptr, list_ptr, place, count, begin, limit, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """The scores in some places of the listed blocks, or of the row: indices, and :func:`_ordered` or none. NaN counts
    as inf, whatever its sign. Integers are scores that are :func:`_ordered` already."""
    index = place
    if LISTED:
        index = tl.load(list_ptr + place // BLOCK, mask=place < count, other=0) * BLOCK + place % BLOCK
    there = (place < count) & (index >= begin) & (index < limit)
    if ptr.dtype.element_ty == tl.int32:
        x = tl.load(ptr + index, mask=there, other=_NONE)
    else:
        x = tl.load(ptr + index, mask=there, other=float("-inf"))
        x = _ordered(tl.where(x != x, float("inf"), x))
    return index, tl.where(there & (x > _LOWEST), x, _NONE)


@triton.jit
def _kth(
    x,
    ptr,
    list_ptr,
    count,
    begin,
    limit,
    k,
    low,
    reach_low,
    high,
    HOLDS: tl.constexpr,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The k-th largest of what is held in x, or else read again and again, and how many equal to it are among the k.

    ``reach_low`` values are at least ``low``, none ``high``. If those are k or fewer, ``low``, and all of them.
    """
    nothing = tl.zeros([], tl.int32)
    low, reach_high, turn = nothing + low, nothing, nothing
    while (reach_low > k) & (low + 1 < high):
        at = _between(low, high, reach_low, reach_high, k, turn)
        if HOLDS:
            reach = tl.sum((x >= at).to(tl.int32), 0)
        else:
            counts = tl.zeros([CHUNK], tl.int32)
            for first in tl.range(0, count, CHUNK):
                _, y = _score(ptr, list_ptr, first + tl.arange(0, CHUNK), count, begin, limit, LISTED, BLOCK)
                counts += (y >= at).to(tl.int32)
            reach = tl.sum(counts, 0)
        enough = reach >= k
        low, reach_low = tl.where(enough, at, low), tl.where(enough, reach, reach_low)
        high, reach_high = tl.where(enough, high, at), tl.where(enough, reach_high, reach)
        turn += 1
    return low, tl.where(reach_low > k, k - reach_high, reach_low), reach_low > k


@triton.jit
def _chosen(x, kth, room, crowded, equal):
    """Those above the k-th, and the first ``room`` equal to it, ``equal`` having been seen; and how many now have."""
    chosen, tie, equal = x >= kth, x == kth, tl.zeros([], tl.int32) + equal
    if crowded:
        chosen = (x > kth) | (tie & (equal + tl.cumsum(tie.to(tl.int32), 0) <= room))
        equal += tl.sum(tie.to(tl.int32), 0)
    return chosen, equal


@triton.jit
def _put(found_ptr, written, index, chosen, k):
    """Writes what is chosen behind what is written, and nothing behind the k-th place."""
    place = written + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(found_ptr + place, index, mask=chosen & (place < k))


@triton.jit
def _end(found_ptr, written, k, CHUNK: tl.constexpr):
    for first in tl.range(written, k, CHUNK):
        places = first + tl.arange(0, CHUNK)
        tl.store(found_ptr + places, -1, mask=places < k)


@triton.jit(do_not_specialize=["apart", "rows", "number", "k"])
def _topk_of_short_rows(
    score_ptr,
    apart,
    visible_ptr,
    start_ptr,
    found_ptr,
    rows,
    number,
    k,
    VECTOR: tl.constexpr,
    UNIT: tl.constexpr,
    HELD: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Writes ``found [B, S, k]``; rows of scores are ``apart * VECTOR`` from each other."""
    s = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64) * rows + s
    score_ptr += row * apart * VECTOR
    found_ptr += row * k
    visible = tl.minimum(tl.cdiv(tl.load(visible_ptr + s), UNIT), number).to(tl.int32)
    begin = 0
    if PADDED:
        begin = tl.load(start_ptr + tl.program_id(1)).to(tl.int32)
    index = tl.arange(0, HELD)
    x = _order(_read(score_ptr, index, visible, VECTOR), (index >= begin) & (index < visible))
    valid = tl.sum((x != _NONE).to(tl.int32), 0)
    kth, room, crowded = _kth(
        x,
        score_ptr,
        score_ptr,
        0,
        0,
        0,
        k,
        _LOWEST + 1,
        valid,
        tl.max(x, 0) + 1,
        HOLDS=True,
        LISTED=False,
        BLOCK=1,
        CHUNK=1,
    )
    if HELD <= _TILE:
        chosen, _ = _chosen(x, kth, room, crowded, 0)
        _put(found_ptr, 0, index, chosen, k)
    else:  # read again what has just been read: to number them all at once takes more registers than there are
        places, written, equal = tl.arange(0, _TILE), tl.zeros([], tl.int32), tl.zeros([], tl.int32)
        for first in tl.range(0, visible, _TILE):
            place = first + places
            y = _order(_read(score_ptr, place, visible, VECTOR), (place >= begin) & (place < visible))
            chosen, equal = _chosen(y, kth, room, crowded, equal)
            _put(found_ptr, written, place, chosen, k)
            written += tl.sum(chosen.to(tl.int32), 0)
    _end(found_ptr, tl.minimum(valid, k), k, 1024)


@triton.jit
def _of_named(
    list_ptr, first, score_ptr, named, begin, visible, VECTOR: tl.constexpr, BLOCK: tl.constexpr, MANY: tl.constexpr
):
    """Scores of ``MANY`` of the blocks that are named: indices, and the scores, :func:`_order`; ``[MANY, BLOCK]``."""
    places = first + tl.arange(0, MANY)
    block = tl.load(list_ptr + places, mask=places < named, other=-1)
    index = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = (block >= 0)[:, None] & (index < tl.cdiv(visible, VECTOR) * VECTOR)
    x = tl.load(score_ptr + index, mask=there, other=float("-inf"))
    return index, _order(x, (block >= 0)[:, None] & (index >= begin) & (index < visible))


@triton.jit(do_not_specialize=["apart", "rows", "number", "k"])
def _topk_of_named(
    score_ptr,
    apart,
    visible_ptr,
    start_ptr,
    list_ptr,
    found_ptr,
    rows,
    number,
    k,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Writes ``found [B, S, k]`` from the blocks of ``list [B, S, k]``, ascending and then -1, which hold them all."""
    s = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64) * rows + s
    score_ptr += row * apart * VECTOR
    list_ptr += row * k
    found_ptr += row * k
    visible = tl.minimum(tl.load(visible_ptr + s), number).to(tl.int32)
    begin = 0
    if PADDED:
        begin = tl.load(start_ptr + tl.program_id(1)).to(tl.int32)

    _, x = _of_named(list_ptr, 0, score_ptr, k, begin, visible, VECTOR, BLOCK, HELD // BLOCK)
    best = tl.max(x, 1)
    named = tl.sum((best != _NONE).to(tl.int32), 0)
    bound = tl.min(tl.where(best == _NONE, _HIGHEST, best), 0)  # k scores reach it, if there are k blocks
    bound = tl.where(named == k, bound, _LOWEST + 1)
    x = tl.reshape(x, [HELD])
    valid, reach = tl.sum((x != _NONE).to(tl.int32), 0), tl.sum((x >= bound).to(tl.int32), 0)
    kth, room, crowded = _kth(
        x,
        score_ptr,
        score_ptr,
        0,
        0,
        0,
        k,
        bound,
        reach,
        tl.max(x, 0) + 1,
        HOLDS=True,
        LISTED=False,
        BLOCK=1,
        CHUNK=1,
    )
    MANY: tl.constexpr = min(HELD, _TILE) // BLOCK
    written, equal = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for first in tl.range(0, named, MANY):
        index, y = _of_named(list_ptr, first, score_ptr, named, begin, visible, VECTOR, BLOCK, MANY)
        chosen, equal = _chosen(tl.reshape(y, [MANY * BLOCK]), kth, room, crowded, equal)
        _put(found_ptr, written, tl.reshape(index, [MANY * BLOCK]), chosen, k)
        written += tl.sum(chosen.to(tl.int32), 0)
    _end(found_ptr, tl.minimum(valid, k), k, 1024)


@triton.jit(do_not_specialize=["rows", "number", "blocks", "k"])
def _topk_of_blocks(
    score_ptr,
    max_ptr,
    visible_ptr,
    start_ptr,
    list_ptr,
    kept_ptr,
    index_ptr,
    found_ptr,
    rows,
    number,
    blocks,
    k,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,
    ROOM: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Writes ``found [B, S, k]``; all tensors are contiguous; ``list [B, S, blocks]`` and ``kept`` and ``index
    [B, S, ROOM]`` are room to work in."""
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
    places = tl.arange(0, CHUNK)
    begin = 0
    if PADDED:
        begin = tl.load(start_ptr + tl.program_id(1)).to(tl.int32)

    # 1. A bound that at least k scores reach: the k-th largest maximum of groups of blocks; and the blocks that do.
    tops = tl.full([GROUPS], _NONE, tl.int32)
    for first in tl.range(0, some, GROUPS):
        _, top = _score(max_ptr, list_ptr, first + tl.arange(0, GROUPS), some, 0, some, False, BLOCK)
        tops = tl.maximum(tops, top)
    valid, most = tl.sum((tops != _NONE).to(tl.int32), 0), tl.max(tops, 0)
    low, nothing = _LOWEST + 1, tl.zeros([], tl.int32)
    bound, _, _ = _kth(tops, max_ptr, list_ptr, 0, 0, 0, k, low, valid, most + 1, True, False, BLOCK, CHUNK)
    listed = nothing
    for first in tl.range(0, some, CHUNK):
        block, best = _score(max_ptr, list_ptr, first + places, some, 0, some, False, BLOCK)
        named = best >= bound
        tl.store(list_ptr + listed + tl.cumsum(named.to(tl.int32), 0) - 1, block, mask=named)
        listed += tl.sum(named.to(tl.int32), 0)
    tl.debug_barrier()

    # 2. Their scores that reach it, as far as there is room for them.
    count, kept = listed * BLOCK, nothing
    for first in tl.range(0, count, CHUNK):
        index, x = _score(score_ptr, list_ptr, first + places, count, begin, visible, True, BLOCK)
        reach = x >= bound
        at = kept + tl.cumsum(reach.to(tl.int32), 0) - 1
        tl.store(kept_ptr + at, x, mask=reach & (at < ROOM))
        tl.store(index_ptr + at, index, mask=reach & (at < ROOM))
        kept += tl.sum(reach.to(tl.int32), 0)
        most = tl.maximum(most, tl.max(x, 0))  # maxima may have missed a NaN
    tl.debug_barrier()

    # 3. The k-th of them, and the k first.
    if kept <= ROOM:
        slots = tl.arange(0, ROOM)
        x = tl.load(kept_ptr + slots, mask=slots < kept, other=_NONE)
        kth, room, crowded = _kth(
            x,
            score_ptr,
            list_ptr,
            0,
            0,
            0,
            k,
            bound,
            kept,
            most + 1,
            HOLDS=True,
            LISTED=False,
            BLOCK=BLOCK,
            CHUNK=CHUNK,
        )
        chosen, equal = _chosen(x, kth, room, crowded, 0)
        index = tl.load(index_ptr + slots, mask=chosen, other=0)
        _put(found_ptr, nothing, index, chosen, k)
    else:
        kth, room, crowded = _kth(
            places, score_ptr, list_ptr, count, begin, visible, k, bound, kept, most + 1, False, True, BLOCK, CHUNK
        )
        written, equal = nothing, nothing
        for first in tl.range(0, count, CHUNK):
            index, x = _score(score_ptr, list_ptr, first + places, count, begin, visible, True, BLOCK)
            chosen, equal = _chosen(x, kth, room, crowded, equal)
            _put(found_ptr, written, index, chosen, k)
            written += tl.sum(chosen.to(tl.int32), 0)
    _end(found_ptr, tl.minimum(kept, k), k, CHUNK)
