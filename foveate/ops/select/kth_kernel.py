"""The k-th largest of scores by counting how many reach a threshold: functions that the kernels of selection share.

A program that calls them owns a row of scores, or a part of a row. Scores are fp32 ``[N]``; thresholds and bounds are
int32 scalars, see :func:`ordered`.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-2139095041)
HIGHEST = tl.constexpr(0x7F800000)
"""What :func:`ordered` makes of -inf and of inf."""


@triton.jit
def ordered(x):
    """Floats as integers of the same order, -0.0 as 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def float_of(x):
    """The inverse of :func:`ordered`."""
    return (x ^ ((x >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _log(x):
    """About the logarithm of a positive float, in units of 2^-23 octaves: its bits as an integer. It is linear between
    powers of two."""
    return x.to(tl.int32, bitcast=True).to(tl.float32)


@triton.jit
def _between(low, high, reach_low, reach_high, k, turn):
    """Two thresholds (or one twice) between ``low`` and ``high``, a standard deviation of the count on either side of
    where the k-th would be if the logarithm of the counts were linear. Every fourth turn takes thirds, so the search
    ends. All values are scalars."""
    # 1. Choose the counts that the thresholds shall have: a standard deviation around k, or k itself if few scores are
    # left.
    a, b = float_of(low), float_of(high)
    most, least, wanted = reach_low.to(tl.float32), reach_high.to(tl.float32), k.to(tl.float32)
    away = tl.minimum(wanted - least, most - wanted) + 0.5  # then about its square root, in two instructions
    away = ((away.to(tl.int32, bitcast=True) >> 1) + 0x1FBD1DF5).to(tl.float32, bitcast=True)
    few = most - least < 5
    more = tl.where(few, wanted + 0.5, tl.minimum(wanted + away, most - 0.5))
    less = tl.where(few, wanted + 0.5, tl.maximum(wanted - away, least + 0.5))

    # 2. Interpolate linearly between the bounds in the logarithm of the count.
    top = _log(most)
    slope = (b - a) / (top - _log(tl.maximum(least, 0.5)))
    lower, higher = ordered(a + slope * (top - _log(more))), ordered(a + slope * (top - _log(less)))

    # 3. Take thirds of the interval in every fourth turn, and the middle for a threshold that falls outside.
    third, middle = ((high.to(tl.uint32) - low.to(tl.uint32)) // 3).to(tl.int32), (low & high) + ((low ^ high) >> 1)
    even = turn % 4 == 3
    lower = tl.where(even, low + third, lower)
    higher = tl.where(even, high - third, higher)
    return _inside(lower, low, high, middle), _inside(higher, low, high, middle)


@triton.jit
def _inside(at, low, high, otherwise):
    """``at`` where it lies between the bounds, ``otherwise`` where it does not."""
    return tl.where((at > low) & (at < high), at, otherwise)


@triton.jit
def _drawn(x, k, HELD: tl.constexpr):
    """Two of the scores ``x [N]``, as :func:`ordered`, which the k-th largest is likely to be between, from a sample of
    64. Where the sample does not say, a bound lies outside of all scores.

    Shapes: S = SAMPLE, N = HELD.
    """
    SAMPLE: tl.constexpr = 64
    some = tl.reshape(x, [SAMPLE, HELD // SAMPLE])  # [S, N/S]
    # [S]; the first of each N/S scores
    some = tl.max(tl.where(tl.arange(0, HELD // SAMPLE)[None, :] == 0, some, float("-inf")), 1)
    ahead = tl.sum((some[None, :] > some[:, None]).to(tl.int32), 1)  # [S]
    share = k.to(tl.float32) / HELD
    away = 1.25 * tl.sqrt(SAMPLE * share * tl.maximum(1 - share, 0.0)) + 0.5
    last, first = tl.ceil(SAMPLE * share + away).to(tl.int32), tl.floor(SAMPLE * share - away).to(tl.int32)
    lower = tl.max(tl.where(ahead >= last, some, float("-inf")), 0)
    higher = tl.min(tl.where(ahead <= first, some, float("inf")), 0)
    return ordered(lower), ordered(higher)


@triton.jit
def read_scores(score_ptr, place, limit, VECTOR: tl.constexpr):
    """Scores ``[N]`` before ``limit``, and -inf after it. The group of ``VECTOR`` scores that ``limit`` cuts is read
    whole, because a mask that changes within a vector makes every score a load of its own."""
    return tl.load(score_ptr + place, mask=place < tl.cdiv(limit, VECTOR) * VECTOR, other=float("-inf"))


@triton.jit
def plain(x, there):
    """Loaded scores ``[N]``: NaN becomes inf, and scores out of range become -inf."""
    return tl.where(there, tl.where(x == x, x, float("inf")), float("-inf"))


@triton.jit
def scores_at(ptr, list_ptr, place, count, begin, limit, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """The scores at some places of the listed blocks (``LISTED``), or of the row: their indices ``[N]``, and the scores
    ``[N]``, :func:`plain`."""
    index = place  # [N]
    if LISTED:
        index = tl.load(list_ptr + place // BLOCK, mask=place < count, other=0) * BLOCK + place % BLOCK  # [N]
    there = (place < count) & (index >= begin) & (index < limit)  # [N]
    return index, plain(tl.load(ptr + index, mask=there, other=float("-inf")), there)


@triton.jit
def count_valid(x):
    """How many of the scores ``x [N]`` are above -inf: only these may be chosen."""
    return tl.sum((x > float("-inf")).to(tl.int32), 0)


@triton.jit
def above_all(x):
    """The integer after the highest of the scores ``x [N]``, as :func:`ordered`: no score reaches it."""
    return ordered(tl.max(x, 0)) + 1


@triton.jit
def _narrowed(low, high, reach_low, reach_high, lower, higher, many, few, k):
    """Bounds of the k-th, after ``many`` scores reached a lower threshold between them and ``few`` a higher one."""
    high, reach_high = tl.where(few < k, higher, high), tl.where(few < k, few, reach_high)
    high, reach_high = tl.where(many < k, lower, high), tl.where(many < k, many, reach_high)
    low, reach_low = tl.where(many >= k, lower, low), tl.where(many >= k, many, reach_low)
    low, reach_low = tl.where(few >= k, higher, low), tl.where(few >= k, few, reach_low)
    return low, high, reach_low, reach_high


@triton.jit
def find_kth(x, k, low, reach_low, high, spare=0):
    """The k-th largest of the scores ``x [N]`` (:func:`plain`).

    It counts how many scores reach two thresholds at a time, about five times; the first two come from a sample of x.
    ``reach_low`` scores are at least ``low`` and none is at least ``high``, both :func:`ordered`. If ``reach_low`` is k
    or less, the result is ``low`` and all of these scores. With ``spare`` the threshold may be a score that up to
    ``spare`` more than k reach.

    Returns a threshold that k scores reach, or else the k-th largest of them, as :func:`ordered`; how many scores equal
    to the k-th are among the k; and whether more than k reach it.
    """
    # 1. Choose the first two thresholds. With more than 16,384 scores there are no registers to spare for a sample.
    nothing = tl.zeros([], tl.int32)
    low, high, k, reach_high, turn = nothing + low, nothing + high, nothing + k, nothing, nothing
    lower, higher = _between(low, high, reach_low, reach_high, k, turn)
    if x.shape[0] <= 16384:
        drawn_lower, drawn_higher = _drawn(x, k, x.shape[0])
        lower, higher = _inside(drawn_lower, low, high, lower), _inside(drawn_higher, low, high, higher)

    # 2. Count and narrow the bounds, until k scores reach the lower one or no score is between them. Both counts share
    # an integer, 15 bits apart, so one sum gives both.
    while (reach_low > k + spare) & (low + 1 < high):
        lower, higher = tl.minimum(lower, higher), tl.maximum(lower, higher)
        both = tl.sum((x >= float_of(lower)).to(tl.int32) + ((x >= float_of(higher)).to(tl.int32) << 15), 0)
        many, few = both & 0x7FFF, both >> 15
        all_do = (many == 0) & (few > 0)  # 32,768 scores reach the lower one: too many for 15 bits
        many, few = tl.where(all_do, 32768, many), few - all_do.to(tl.int32)
        low, high, reach_low, reach_high = _narrowed(low, high, reach_low, reach_high, lower, higher, many, few, k)
        turn += 1
        lower, higher = _between(low, high, reach_low, reach_high, k, turn)
    return low, tl.where(reach_low > k, k - reach_high, reach_low), reach_low > k


@triton.jit
def find_kth_of_many(
    ptr,
    list_ptr,
    count, begin, limit, k, low, reach_low, high,
    LISTED: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """:func:`find_kth` of more scores than registers hold: for each two thresholds it reads all ``count`` scores again,
    in ascending order, see :func:`scores_at`.

    Shapes: C = CHUNK scores that are read at once.
    """
    nothing = tl.zeros([], tl.int32)
    low, high, k, reach_high, turn = nothing + low, nothing + high, nothing + k, nothing, nothing
    while (reach_low > k) & (low + 1 < high):
        lower, higher = _between(low, high, reach_low, reach_high, k, turn)
        lower, higher = tl.minimum(lower, higher), tl.maximum(lower, higher)
        many, few = tl.zeros([CHUNK], tl.int32), tl.zeros([CHUNK], tl.int32)  # [C], [C]
        for first in tl.range(0, count, CHUNK):
            _, x = scores_at(ptr, list_ptr, first + tl.arange(0, CHUNK), count, begin, limit, LISTED, BLOCK)  # [C]
            many += (x >= float_of(lower)).to(tl.int32)  # [C]
            few += (x >= float_of(higher)).to(tl.int32)  # [C]
        low, high, reach_low, reach_high = _narrowed(
            low, high, reach_low, reach_high, lower, higher, tl.sum(many, 0), tl.sum(few, 0), k
        )
        turn += 1
    return low, tl.where(reach_low > k, k - reach_high, reach_low), reach_low > k


@triton.jit
def choose(x, kth, room, crowded, equal):
    """Which of the scores ``x [N]`` are chosen: all scores above the k-th, and the first ``room`` scores equal to it,
    counting the ``equal`` ones that came before x. Also returns how many equal scores have come with x."""
    kth, equal = float_of(kth), tl.zeros([], tl.int32) + equal
    chosen, tie = x >= kth, x == kth  # [N], [N]
    if crowded:
        chosen = (x > kth) | (tie & (equal + tl.cumsum(tie.to(tl.int32), 0) <= room))  # [N]
        equal += tl.sum(tie.to(tl.int32), 0)
    return chosen, equal


@triton.jit
def put(found_ptr, written, index, chosen):
    """Writes the chosen entries of ``index [N]`` without gaps, to the places of a row from ``written`` on."""
    tl.store(found_ptr + written + tl.cumsum(chosen.to(tl.int32), 0) - 1, index, mask=chosen)


@triton.jit
def put_end(found_ptr, written, k, CHUNK: tl.constexpr):
    """Writes -1 to the last places of a row, from ``written`` on, for which there was no key."""
    for first in tl.range(written, k, CHUNK):
        places = first + tl.arange(0, CHUNK)  # [CHUNK]
        tl.store(found_ptr + places, -1, mask=places < k)


@triton.jit
def row_of(
    score_ptr,
    stride_b, stride_h,
    count_ptr, count_stride, length_ptr,
    length_stride,
    row, heads, number, k,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """Where the scores of a row begin, how many they are, and how many of them are chosen: none if the count is
    negative."""
    if length_ptr is not None:
        number = tl.maximum(tl.minimum(number, tl.load(length_ptr + row // heads * length_stride).to(tl.int32)), 0)
    allowed = tl.maximum(tl.minimum(tl.load(count_ptr + row // heads * count_stride), k), 0).to(tl.int32)
    return score_ptr + (row // heads * stride_b + row % heads * stride_h) * VECTOR, number, allowed


@triton.jit
def scores_of(score_ptr, place, number, VECTOR: tl.constexpr):
    """The scores ``[N]`` at some places of a row of ``number`` scores, see :func:`plain`."""
    return plain(read_scores(score_ptr, place, number, VECTOR), place < number)
