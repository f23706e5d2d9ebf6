"""Functions of the Triton kernels of :func:`attend_summaries`: select few of many nodes by bounds on blocks of them."""

import triton
import triton.language as tl

_LAST_PLACE = tl.constexpr(0x7FFFFFFF)
_SLACK = tl.constexpr(1.0001)
"""Factor on bounds of masses that covers rounding."""
_COMPARED = tl.constexpr(128)
"""Up to this many blocks are sorted by comparing all pairs; of more, the first are found one after another."""


@triton.jit
def _key(mass, place):
    """int64 keys that order nodes by mass, equal masses by place, the first highest; -1 for NaN and negative masses."""
    bits = tl.abs(mass).to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(mass >= 0, (bits << 32) | (_LAST_PLACE - place), -1)


@triton.jit
def _bounds(
    bound_ptr, bound_places, lse, count, prior, GROUP: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Upper bounds on the masses of each block's nodes, ``[BLOCKS]``, -1 for blocks without nodes.

    They follow from ``bound``, see :func:`score_nodes`. The mass of a node, the mean over the heads, is at most the
    mean of the heads' largest masses in the block (``apart``). It is also at most the largest mass that a head has in
    the whole block times the largest sum over heads of a node's shares (``together``), which is tighter where no head
    puts much mass on the block. The bound is the smaller one.
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
    q_heads,
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
    """The ``allowed`` largest of ``keys [ROOM]``, see :func:`_key`, and those of the nodes at ``place``, where
    ``there``."""
    few = tl.arange(0, keys.shape[0])
    at = rank_ptr + q_heads[:, None] * (rank_places // 16 * 16) + place[None, :]
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
    """The ``allowed`` nodes of largest mass, at most ``FEW``, for ``GROUP`` heads of one KV head; of equals the first.

    ``lse [MEMBERS]``: each head's log-sum-exp over the whole cover. Up to ``AT_ONCE`` blocks of nodes are all compared.
    Of more, ``AT_ONCE`` blocks are read at a time, those with the largest bounds first, until no bound of the others
    reaches the smallest mass found so far. The result is exact (the threshold algorithm, Fagin et al. 2001).

    Returns:
        ``(places [ROOM], order [ROOM], number)``: places of the nodes, each one's index among them by ascending place,
        both -1 for none, and how many there are; ``ROOM`` is a power of two.
    """
    MEMBERS: tl.constexpr = triton.next_power_of_2(GROUP)
    member, few, some, block = tl.arange(0, MEMBERS), tl.arange(0, ROOM), tl.arange(0, AT_ONCE), tl.arange(0, BLOCKS)
    lanes = tl.arange(0, AT_ONCE * BLOCK_N)
    exist = member < GROUP
    q_heads = head + tl.where(exist, member, 0)
    keys = tl.full([ROOM], -1, tl.int64)
    if BLOCKS <= AT_ONCE:
        place = tl.arange(0, BLOCKS * BLOCK_N)
        keys = _heavier(
            keys,
            place,
            place < count,
            lse,
            q_heads,
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
                q_heads,
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
