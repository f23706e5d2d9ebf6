"""Top-k of long rows whose blocks have known maxima: Triton kernels of :func:`topk_of_blocks`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.ops._dispatch import UnsupportedError

_HELD = 16384
"""The most scores of a row, or of its chosen blocks, that are kept in registers."""
_SHORT = 4096
"""Rows that are kept whole, though less of them would do: that takes a launch less."""
_TILE = tl.constexpr(4096)
"""Values among which those that are chosen are written at once."""
_KEPT = 8192
"""The most scores that are kept of rows that do not fit."""
_CHUNK = 2048
"""Scores of such rows that a program looks at at once."""
_LOWEST = tl.constexpr(-2139095041)
_HIGHEST = tl.constexpr(0x7F800000)
"""What :func:`_ordered` makes of -inf and of inf."""


def topk_of_blocks(
    scores: Tensor, maxima: Tensor, visible: Tensor, k: int, block: int, starts: Tensor | None = None
) -> Tensor:
    """See :func:`foveate.ops.select.blocks.topk_of_blocks`.

    A program owns a row, and looks for the k-th largest of values in its registers by counting how many reach a
    threshold, two of them at a time, five times or so. Short rows it keeps whole. Of longer ones it first chooses
    blocks in the same way, the k whose maxima come first: each of them has a score that comes before all scores of a
    block that is left out, so that the k first scores are among theirs (StreamIndex needs no such step, having no
    maxima). Those alone are read.

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
        held = max(256, block, triton.next_power_of_2(some))
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
            HELD=held,
            PADDED=padded,
            num_warps=warps(held),
        )
        return found
    scores = scores.contiguous()
    listed = torch.empty(batch, rows, blocks, dtype=torch.int32, device=scores.device)
    room = min(triton.next_power_of_2(max(4 * k, _CHUNK)), _KEPT)
    kept, index = (torch.empty(batch, rows, room, dtype=x, device=scores.device) for x in (torch.float32, torch.int32))
    _topk_of_blocks[rows, batch](
        scores,
        maxima.contiguous(),
        visible,
        starts,
        listed,
        kept,
        index,
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
        num_warps=warps(held),
    )
    return found


def warps(held: int) -> int:
    """Warps of a program that keeps so many scores in its registers."""
    return 4 if held < 4096 else 8 if held <= 16384 else 16


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
def _float(x):
    """The float of which :func:`_ordered` made this."""
    return (x ^ ((x >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _log(x):
    """About the logarithm of a positive float, in units of 2^-23 octaves: it bends at powers of two."""
    return x.to(tl.int32, bitcast=True).to(tl.float32)


@triton.jit
def _between(low, high, reach_low, reach_high, k, turn):
    """Two thresholds between two, or one twice, around where the k-th is to be expected if the logarithm of the counts
    is linear: by a standard deviation of the count there; every fourth time at thirds, so that there is an end."""
    a, b = _float(low), _float(high)
    most, least, wanted = reach_low.to(tl.float32), reach_high.to(tl.float32), k.to(tl.float32)
    away = tl.minimum(wanted - least, most - wanted) + 0.5  # and then about the root of it, in two instructions
    away = ((away.to(tl.int32, bitcast=True) >> 1) + 0x1FBD1DF5).to(tl.float32, bitcast=True)
    few = most - least < 5
    more = tl.where(few, wanted + 0.5, tl.minimum(wanted + away, most - 0.5))
    less = tl.where(few, wanted + 0.5, tl.maximum(wanted - away, least + 0.5))
    top = _log(most)
    slope = (b - a) / (top - _log(tl.maximum(least, 0.5)))
    lower, higher = _ordered(a + slope * (top - _log(more))), _ordered(a + slope * (top - _log(less)))
    third, middle = ((high.to(tl.uint32) - low.to(tl.uint32)) // 3).to(tl.int32), (low & high) + ((low ^ high) >> 1)
    even = turn % 4 == 3
    lower = tl.where(even, low + third, lower)
    higher = tl.where(even, high - third, higher)
    return _inside(lower, low, high, middle), _inside(higher, low, high, middle)


@triton.jit
def _inside(at, low, high, otherwise):
    return tl.where((at > low) & (at < high), at, otherwise)


@triton.jit
def _drawn(x, k, HELD: tl.constexpr):
    """Two of the scores ``x [HELD]`` between which the k-th largest is likely to be, by a sample of them, as
    :func:`_ordered`; or such as no score is, where the sample does not tell."""
    SAMPLE: tl.constexpr = 64
    some = tl.reshape(x, [SAMPLE, HELD // SAMPLE])
    some = tl.max(tl.where(tl.arange(0, HELD // SAMPLE)[None, :] == 0, some, float("-inf")), 1)
    ahead = tl.sum((some[None, :] > some[:, None]).to(tl.int32), 1)
    share = k.to(tl.float32) / HELD
    away = 1.25 * tl.sqrt(SAMPLE * share * tl.maximum(1 - share, 0.0)) + 0.5
    last, first = tl.ceil(SAMPLE * share + away).to(tl.int32), tl.floor(SAMPLE * share - away).to(tl.int32)
    lower = tl.max(tl.where(ahead >= last, some, float("-inf")), 0)
    higher = tl.min(tl.where(ahead <= first, some, float("inf")), 0)
    return _ordered(lower), _ordered(higher)


@triton.jit
def _read(score_ptr, place, limit, VECTOR: tl.constexpr):
    """Scores before ``limit``, -inf elsewhere, and whatever is behind it in the ``VECTOR`` that it cuts: a mask that
    changes within one would have each score read by itself."""
    return tl.load(score_ptr + place, mask=place < tl.cdiv(limit, VECTOR) * VECTOR, other=float("-inf"))


@triton.jit
def _plain(x, there):
    """Scores of which NaN counts as inf, and -inf where there is none."""
    return tl.where(there, tl.where(x == x, x, float("inf")), float("-inf"))


@triton.jit
def _score(ptr, list_ptr, place, count, begin, limit, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """The scores in some places of the listed blocks, or of the row: indices, and the scores, :func:`_plain`."""
    index = place
    if LISTED:
        index = tl.load(list_ptr + place // BLOCK, mask=place < count, other=0) * BLOCK + place % BLOCK
    there = (place < count) & (index >= begin) & (index < limit)
    return index, _plain(tl.load(ptr + index, mask=there, other=float("-inf")), there)


@triton.jit
def _valid(x):
    return tl.sum((x > float("-inf")).to(tl.int32), 0)


@triton.jit
def _behind(x):
    """What is behind the highest score, as :func:`_ordered` has them."""
    return _ordered(tl.max(x, 0)) + 1


@triton.jit
def _narrowed(low, high, reach_low, reach_high, lower, higher, many, few, k):
    """Bounds of the k-th, when ``many`` scores reach a lower threshold between them and ``few`` a higher one."""
    high, reach_high = tl.where(few < k, higher, high), tl.where(few < k, few, reach_high)
    high, reach_high = tl.where(many < k, lower, high), tl.where(many < k, many, reach_high)
    low, reach_low = tl.where(many >= k, lower, low), tl.where(many >= k, many, reach_low)
    low, reach_low = tl.where(few >= k, higher, low), tl.where(few >= k, few, reach_low)
    return low, high, reach_low, reach_high


@triton.jit
def _kth(x, k, low, reach_low, high, spare=0):
    """A threshold that k of the scores ``x [HELD]`` (:func:`_plain`) reach, or else the k-th largest of them, as
    :func:`_ordered`; how many equal to the k-th are among the k; and whether more than k reach it.

    It counts how many scores reach two thresholds, which begin where a sample of x tells: five times or so.
    ``reach_low`` scores are at least ``low``, none ``high``, both :func:`_ordered`. If those are k or fewer, ``low``,
    and all of them. With ``spare`` it may be a score that up to so many more than k reach.
    """
    nothing = tl.zeros([], tl.int32)
    low, high, k, reach_high, turn = nothing + low, nothing + high, nothing + k, nothing, nothing
    lower, higher = _between(low, high, reach_low, reach_high, k, turn)
    if x.shape[0] <= 16384:  # of more there are no registers to spare
        drawn_lower, drawn_higher = _drawn(x, k, x.shape[0])
        lower, higher = _inside(drawn_lower, low, high, lower), _inside(drawn_higher, low, high, higher)
    while (reach_low > k + spare) & (low + 1 < high):
        lower, higher = tl.minimum(lower, higher), tl.maximum(lower, higher)
        both = tl.sum((x >= _float(lower)).to(tl.int32) + ((x >= _float(higher)).to(tl.int32) << 15), 0)
        many, few = both & 0x7FFF, both >> 15
        all_do = (many == 0) & (few > 0)  # few are no more than many: these are 32,768
        many, few = tl.where(all_do, 32768, many), few - all_do.to(tl.int32)
        low, high, reach_low, reach_high = _narrowed(low, high, reach_low, reach_high, lower, higher, many, few, k)
        turn += 1
        lower, higher = _between(low, high, reach_low, reach_high, k, turn)
    return low, tl.where(reach_low > k, k - reach_high, reach_low), reach_low > k


@triton.jit
def _kth_of_many(
    ptr,
    list_ptr,
    count,
    begin,
    limit,
    k,
    low,
    reach_low,
    high,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """:func:`_kth` of scores that are read anew for each two thresholds, see :func:`_score`."""
    nothing = tl.zeros([], tl.int32)
    low, high, k, reach_high, turn = nothing + low, nothing + high, nothing + k, nothing, nothing
    while (reach_low > k) & (low + 1 < high):
        lower, higher = _between(low, high, reach_low, reach_high, k, turn)
        lower, higher = tl.minimum(lower, higher), tl.maximum(lower, higher)
        many, few = tl.zeros([CHUNK], tl.int32), tl.zeros([CHUNK], tl.int32)
        for first in tl.range(0, count, CHUNK):
            _, x = _score(ptr, list_ptr, first + tl.arange(0, CHUNK), count, begin, limit, LISTED, BLOCK)
            many += (x >= _float(lower)).to(tl.int32)
            few += (x >= _float(higher)).to(tl.int32)
        low, high, reach_low, reach_high = _narrowed(
            low, high, reach_low, reach_high, lower, higher, tl.sum(many, 0), tl.sum(few, 0), k
        )
        turn += 1
    return low, tl.where(reach_low > k, k - reach_high, reach_low), reach_low > k


@triton.jit
def _chosen(x, kth, room, crowded, equal):
    """Those above the k-th, and the first ``room`` equal to it, ``equal`` having been seen; and how many now have."""
    kth, equal = _float(kth), tl.zeros([], tl.int32) + equal
    chosen, tie = x >= kth, x == kth
    if crowded:
        chosen = (x > kth) | (tie & (equal + tl.cumsum(tie.to(tl.int32), 0) <= room))
        equal += tl.sum(tie.to(tl.int32), 0)
    return chosen, equal


@triton.jit
def _put(found_ptr, written, index, chosen):
    """Writes what is chosen behind what is written."""
    tl.store(found_ptr + written + tl.cumsum(chosen.to(tl.int32), 0) - 1, index, mask=chosen)


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
    x = _plain(_read(score_ptr, index, visible, VECTOR), (index >= begin) & (index < visible))
    valid = _valid(x)
    kth, room, crowded = _kth(x, k, _LOWEST + 1, valid, _behind(x))
    if HELD <= 2 * _TILE:
        chosen, _ = _chosen(x, kth, room, crowded, 0)
        _put(found_ptr, 0, index, chosen)
    else:  # read again what has just been read: to number them all at once is slower
        places, written, equal = tl.arange(0, _TILE), tl.zeros([], tl.int32), tl.zeros([], tl.int32)
        for first in tl.range(0, visible, _TILE):
            place = first + places
            y = _plain(_read(score_ptr, place, visible, VECTOR), (place >= begin) & (place < visible))
            chosen, equal = _chosen(y, kth, room, crowded, equal)
            _put(found_ptr, written, place, chosen)
            written += tl.sum(chosen.to(tl.int32), 0)
    _end(found_ptr, tl.minimum(valid, k), k, 1024)


@triton.jit
def _of_named(
    list_ptr, first, score_ptr, named, begin, visible, VECTOR: tl.constexpr, BLOCK: tl.constexpr, MANY: tl.constexpr
):
    """Scores of ``MANY`` of the blocks that are named: indices, and the scores, :func:`_plain`; ``[MANY, BLOCK]``."""
    places = first + tl.arange(0, MANY)
    block = tl.load(list_ptr + places, mask=places < named, other=-1)
    index = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = (block >= 0)[:, None] & (index < tl.cdiv(visible, VECTOR) * VECTOR)
    x = tl.load(score_ptr + index, mask=there, other=float("-inf"))
    return index, _plain(x, (block >= 0)[:, None] & (index >= begin) & (index < visible))


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
    named = _valid(best)
    bound = _ordered(tl.min(tl.where(best > float("-inf"), best, float("inf")), 0))
    bound = tl.where(named == k, bound, _LOWEST + 1)  # k scores reach it
    x = tl.reshape(x, [HELD])
    valid, reach = _valid(x), tl.sum((x >= _float(bound)).to(tl.int32), 0)
    kth, room, crowded = _kth(x, k, bound, reach, _behind(x))
    MANY: tl.constexpr = max(1, min(HELD, _TILE) // BLOCK)
    written, equal = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for first in tl.range(0, named, MANY):
        index, y = _of_named(list_ptr, first, score_ptr, named, begin, visible, VECTOR, BLOCK, MANY)
        chosen, equal = _chosen(tl.reshape(y, [MANY * BLOCK]), kth, room, crowded, equal)
        _put(found_ptr, written, tl.reshape(index, [MANY * BLOCK]), chosen)
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
    tops = tl.full([GROUPS], float("-inf"), tl.float32)
    for first in tl.range(0, some, GROUPS):
        _, top = _score(max_ptr, list_ptr, first + tl.arange(0, GROUPS), some, 0, some, False, BLOCK)
        tops = tl.maximum(tops, top)
    most, nothing = tl.max(tops, 0), tl.zeros([], tl.int32)
    bound, _, _ = _kth(tops, k, _LOWEST + 1, _valid(tops), _behind(tops))
    reached = _float(bound)
    listed = nothing
    for first in tl.range(0, some, CHUNK):
        block, best = _score(max_ptr, list_ptr, first + places, some, 0, some, False, BLOCK)
        named = best >= reached
        tl.store(list_ptr + listed + tl.cumsum(named.to(tl.int32), 0) - 1, block, mask=named)
        listed += tl.sum(named.to(tl.int32), 0)
    tl.debug_barrier()

    # 2. Their scores that reach it, as far as there is room for them.
    count, kept = listed * BLOCK, nothing
    for first in tl.range(0, count, CHUNK):
        index, x = _score(score_ptr, list_ptr, first + places, count, begin, visible, True, BLOCK)
        reach = x >= reached
        at = kept + tl.cumsum(reach.to(tl.int32), 0) - 1
        tl.store(kept_ptr + at, x, mask=reach & (at < ROOM))
        tl.store(index_ptr + at, index, mask=reach & (at < ROOM))
        kept += tl.sum(reach.to(tl.int32), 0)
        most = tl.maximum(most, tl.max(x, 0))  # maxima may have missed a NaN
    tl.debug_barrier()

    # 3. The k-th of them, and the k first.
    if kept <= ROOM:
        slots = tl.arange(0, ROOM)
        x = tl.load(kept_ptr + slots, mask=slots < kept, other=float("-inf"))
        kth, room, crowded = _kth(x, k, bound, kept, _ordered(most) + 1)
        chosen, equal = _chosen(x, kth, room, crowded, 0)
        index = tl.load(index_ptr + slots, mask=chosen, other=0)
        _put(found_ptr, nothing, index, chosen)
    else:
        kth, room, crowded = _kth_of_many(
            score_ptr, list_ptr, count, begin, visible, k, bound, kept, _ordered(most) + 1, True, BLOCK, CHUNK
        )
        written, equal = nothing, nothing
        for first in tl.range(0, count, CHUNK):
            index, x = _score(score_ptr, list_ptr, first + places, count, begin, visible, True, BLOCK)
            chosen, equal = _chosen(x, kth, room, crowded, equal)
            _put(found_ptr, written, index, chosen)
            written += tl.sum(chosen.to(tl.int32), 0)
    _end(found_ptr, tl.minimum(kept, k), k, CHUNK)
