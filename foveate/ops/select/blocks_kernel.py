"""Top-k of long rows whose blocks have known maxima: Triton kernels of :func:`topk_of_blocks`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.ops._dispatch import UnsupportedError

_HELD = 16384
"""The longest rows that are kept in registers whole."""
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
    threshold, ten times or so. Short rows it keeps whole. Of long ones it keeps the maxima of groups of blocks: the
    k-th largest of them is a bound that at least k scores reach, and few more; the blocks whose maximum reaches it are
    read once, and the scores that do are kept. Where they are too many, because scores tie or trend, they are read
    anew for each threshold: that costs time and never a wrong set.
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
    scores, padded = scores.contiguous(), starts is not None
    if number <= _HELD:
        held = max(256, triton.next_power_of_2(number))
        _topk_of_short_rows[rows, batch](
            scores, visible, starts, found, rows, number, k, HELD=held, PADDED=padded, num_warps=4 if held < 4096 else 8
        )
        return found
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


@triton.jit(do_not_specialize=["rows", "number", "k"])
def _topk_of_short_rows(
    score_ptr, visible_ptr, start_ptr, found_ptr, rows, number, k, HELD: tl.constexpr, PADDED: tl.constexpr
):
    """Writes ``found [B, S, k]``; all tensors are contiguous."""
    s = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64) * rows + s
    found_ptr += row * k
    visible = tl.minimum(tl.load(visible_ptr + s), number).to(tl.int32)
    begin = 0
    if PADDED:
        begin = tl.load(start_ptr + tl.program_id(1)).to(tl.int32)
    index = tl.arange(0, HELD)
    _, x = _score(score_ptr + row * number, score_ptr, index, visible, begin, visible, False, 1)
    low, valid = _LOWEST + 1, tl.sum((x != _NONE).to(tl.int32), 0)
    kth, room, crowded = _kth(
        x, score_ptr, score_ptr, 0, 0, 0, k, low, valid, tl.max(x, 0) + 1, HOLDS=True, LISTED=False, BLOCK=1, CHUNK=1
    )
    chosen, _ = _chosen(x, kth, room, crowded, 0)
    _put(found_ptr, 0, index, chosen, k)
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
