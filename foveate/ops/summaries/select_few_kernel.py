"""The few heaviest of many nodes, found by bounds of blocks of them: part of the Triton kernels of
:func:`attend_summaries`."""

import triton
import triton.language as tl

_LAST_PLACE = tl.constexpr(0x7FFFFFFF)
_SLACK = tl.constexpr(1.0001)
"""Factor on bounds of masses that covers rounding."""
_COMPARED = tl.constexpr(128)
"""With at most so many blocks, all are sorted at once, each compared with each; with more the first are found in turn.
"""


@triton.jit
def _key(mass, place):
    """What orders nodes by mass, of equals the first before the others; -1 where the mass is none, as of NaN."""
    bits = tl.abs(mass).to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(mass >= 0, (bits << 32) | (_LAST_PLACE - place), -1)


@triton.jit
def _bounds(
    bound_ptr, bound_places, lse, count, prior, GROUP: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """At least the largest mass of each block's nodes, and -1 where there are none; see :func:`score_nodes`.

    What a head sees in a node is at most what it sees in the block's largest. What a group's heads see in it is, with
    its shares of what they see in the block, at most the largest sum of such shares times the most that any sees in the
    block: which is close where no head sees much.
    """
    MEMBERS: tl.constexpr = lse.shape[0]
    member, block = tl.arange(0, MEMBERS), tl.arange(0, BLOCKS)
    exist, held = member < GROUP, block < bound_places
    of_heads = bound_ptr + member[:, None] * bound_places + block[None, :]
    both = exist[:, None] & held[None, :]
    peaks = tl.load(of_heads, mask=both, other=float("-inf"))
    totals = tl.load(of_heads + GROUP * bound_places, mask=both, other=0.0)
    shared = tl.load(bound_ptr + 2 * GROUP * bound_places + block, mask=held, other=0.0)
    recent = tl.load(bound_ptr + (2 * GROUP + 1) * bound_places + block, mask=held, other=0.0)
    largest = tl.where(exist[:, None], tl.exp2(peaks - lse[:, None]), 0.0)
    apart, together = tl.sum(largest, 0), tl.max(largest * totals, 0) * shared
    bound = tl.minimum(apart, together) / GROUP
    bound = tl.where(recent == float("inf"), recent, bound + prior * (recent - bound)) * _SLACK
    return tl.where((block * BLOCK_N < count) & (bound >= 0), bound, -1.0)


@triton.jit
def _heavier(
    keys,
    place,
    there,
    lse,
    row,
    exist,
    rank_ptr,
    rank_places,
    recent_ptr,
    recent_stride_n,
    list_ptr,
    count,
    allowed,
    prior,
    BRANCH: tl.constexpr,
    PRIOR: tl.constexpr,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
):
    """The ``allowed`` first of ``keys [ROOM]``, see :func:`_key`, and of those of the nodes that are ``there``."""
    few = tl.arange(0, keys.shape[0])
    at = rank_ptr + row[:, None] * (rank_places // 16 * 16) + place[None, :]
    written = place < tl.cdiv(count, 16) * 16
    ranks = tl.load(at, mask=exist[:, None] & written[None, :], other=float("-inf"))
    mass = tl.sum(tl.where(exist[:, None], tl.exp2(ranks - lse[:, None]), 0.0), 0) / GROUP
    node = place
    if BRANCH:
        node = tl.load(list_ptr + place // BRANCH, mask=there, other=0).to(tl.int32) * BRANCH + place % BRANCH
    if PRIOR:
        recent = tl.load(recent_ptr + node.to(tl.int64) * recent_stride_n, mask=there, other=0.0)
        mass = mass + prior * (recent - mass)
    fresh, chosen = tl.where(there, _key(mass, place), -1), tl.full(keys.shape, -1, tl.int64)
    for turn in tl.range(0, FEW):
        best = tl.maximum(tl.max(fresh, 0), tl.max(keys, 0))
        chosen = tl.where(few == tl.where(turn < allowed, turn, -1), best, chosen)
        fresh, keys = tl.where(fresh == best, -1, fresh), tl.where(keys == best, -1, keys)
    return chosen


@triton.jit
def heaviest_few(
    lse,
    rank_ptr,
    recent_ptr,
    recent_stride_n,
    bound_ptr,
    bound_places,
    list_ptr,
    count,
    allowed,
    head,
    rank_places,
    prior,
    BRANCH: tl.constexpr,
    PRIOR: tl.constexpr,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """The ``allowed`` heaviest nodes for ``GROUP`` heads of one KV head, at most ``FEW``, of equals the first ones; the
    log-sum-exp ``lse [MEMBERS]`` is that of all the heads see.

    Masses are looked at in few blocks alone where there are more than ``AT_ONCE`` of them: so many at a time, those
    with the largest bounds first, until no bound reaches the last of the heaviest (which is exact: the threshold
    algorithm of Fagin et al. 2001 stops in this way).

    Returns:
        ``(places [ROOM], their order by place [ROOM], how many)``, -1 for none; ``ROOM`` is a power of two.
    """
    MEMBERS: tl.constexpr = triton.next_power_of_2(GROUP)
    member, few, some, block = tl.arange(0, MEMBERS), tl.arange(0, ROOM), tl.arange(0, AT_ONCE), tl.arange(0, BLOCKS)
    lanes = tl.arange(0, AT_ONCE * BLOCK_N)
    exist = member < GROUP
    row = head + tl.where(exist, member, 0)
    keys = tl.full([ROOM], -1, tl.int64)
    if BLOCKS <= AT_ONCE:
        place = tl.arange(0, BLOCKS * BLOCK_N)
        keys = _heavier(
            keys,
            place,
            place < count,
            lse,
            row,
            exist,
            rank_ptr,
            rank_places,
            recent_ptr,
            recent_stride_n,
            list_ptr,
            count,
            allowed,
            prior,
            BRANCH,
            PRIOR,
            GROUP,
            FEW,
        )
    else:
        bound = _bounds(bound_ptr, bound_places, lse, count, prior, GROUP, BLOCKS, BLOCK_N)
        if BLOCKS <= _COMPARED:
            # no two are equal, and none is less than the bound
            bits = tl.maximum(bound, 0.0).to(tl.int32, bitcast=True)
            ranked = (bits + 2 * BLOCKS) // BLOCKS * BLOCKS - block
            turn_of = tl.sum((ranked[:, None] > ranked[None, :]).to(tl.int32), 0)
        left, turns = (allowed > 0) & (tl.max(bound, 0) >= 0), tl.zeros([], tl.int32)
        least = tl.zeros([], tl.float32)
        while left:
            which = tl.full([AT_ONCE], -1, tl.int32)
            if BLOCKS <= _COMPARED:
                now = (turn_of[:, None] == turns + some[None, :]) & (bound >= least)[:, None]
                which = tl.max(tl.where(now, block[:, None], -1), 0)
                turns = turns + AT_ONCE
                bound = tl.where(turn_of < turns, -1.0, bound)
            else:
                for turn in tl.static_range(AT_ONCE):
                    highest, best = tl.max(bound, 0, return_indices=True)
                    which = tl.where(some == tl.where(highest >= least, turn, -1), best, which)
                    bound = tl.where(block == best, -1.0, bound)
            of_block = tl.sum(tl.where((lanes // BLOCK_N)[:, None] == some[None, :], which[None, :], 0), 1)
            place = tl.maximum(of_block, 0) * BLOCK_N + lanes % BLOCK_N
            place = tl.max_contiguous(tl.multiple_of(place, BLOCK_N), BLOCK_N)
            keys = _heavier(
                keys,
                place,
                (of_block >= 0) & (place < count),
                lse,
                row,
                exist,
                rank_ptr,
                rank_places,
                recent_ptr,
                recent_stride_n,
                list_ptr,
                count,
                allowed,
                prior,
                BRANCH,
                PRIOR,
                GROUP,
                FEW,
            )
            last = tl.sum(tl.where(few == allowed - 1, keys, 0), 0)
            least = tl.where(last >= 0, (last >> 32).to(tl.int32).to(tl.float32, bitcast=True), 0.0)
            left = tl.max(bound, 0) >= least

    places = tl.where(keys >= 0, _LAST_PLACE - (keys & _LAST_PLACE), -1).to(tl.int32)
    smaller = (places[None, :] < places[:, None]) & (places[None, :] >= 0)
    order = tl.where(places < 0, -1, tl.sum(smaller.to(tl.int32), 1))
    return places, order, tl.sum((places >= 0).to(tl.int32), 0)
