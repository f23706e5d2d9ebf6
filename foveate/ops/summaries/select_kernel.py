"""Which summaries give way to what is beneath them: Triton kernel of :func:`attend_summaries`' choice."""

import triton
import triton.language as tl

from foveate.ops.select.blocks_kernel import _LOWEST, _behind, _end, _float, _kth, _valid

_BOTTOM = tl.constexpr(-3.4e38)
LAST_PLACE = tl.constexpr(0x7FFFFFFF)
SLACK = tl.constexpr(1.0001)
"""What rounding may take from a bound of masses, and more."""
_COMPARED = tl.constexpr(128)
"""So many blocks or fewer are put in order at once, each compared with each; of more the first are found in turn."""

VARYING = ["rows", "num_kv_heads", "splits", "others", "rank_places", "list_stride_b", "list_stride_h", "first"]
"""What changes from step to step, or from batch to batch: no reason to compile anew."""


@triton.jit
def log_sum(x):
    """Logarithm of the sum, to the base 2."""
    top = tl.maximum(tl.max(x, 0), _BOTTOM)
    return top + tl.log2(tl.sum(tl.exp2(x - top), 0))


@triton.jit
def _share(
    rank_ptr,
    rank_lse_ptr,
    found_lse_ptr,
    row,
    index,
    there,
    rows,
    splits,
    others,
    rank_places,
    SPLITS: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """The masses of nodes that one head sees; see :func:`masses`."""
    some, parts = tl.arange(0, SPLITS), tl.arange(0, OTHERS)
    rank = tl.load(rank_ptr + row * (rank_places // 16 * 16) + index, mask=there, other=float("-inf"))
    lse = log_sum(tl.load(rank_lse_ptr + row * splits + some, mask=some < splits, other=float("-inf")))
    of_others = found_lse_ptr + parts.to(tl.int64) * rows + row
    rest = log_sum(tl.load(of_others, mask=parts < others, other=float("-inf")))
    top = tl.maximum(tl.maximum(lse, rest), _BOTTOM)
    return tl.exp2(rank - (top + tl.log2(tl.exp2(lse - top) + tl.exp2(rest - top))))


@triton.jit
def masses(
    rank_ptr,
    rank_lse_ptr,
    found_lse_ptr,
    recent_ptr,
    recent_stride_h,
    recent_stride_n,
    list_ptr,
    index,
    count,
    head,
    members,
    group,
    rows,
    splits,
    others,
    rank_places,
    first,
    prior,
    BRANCH: tl.constexpr,
    PRIOR: tl.constexpr,
    LAYER: tl.constexpr,
    SPLITS: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """Pooled masses of the nodes at ``index [HELD]``, -inf where none is, and their numbers.

    Of ``members`` query heads from ``head`` on, counted over the batch: their mean or (``LAYER``) the largest.
    ``rows`` query heads have the log-sum-exps ``rank_lse [rows, splits]`` and, of the rest of the cover, ``found_lse
    [others, rows]``.
    """
    there = index < count
    node = index
    if BRANCH:
        node = tl.load(list_ptr + index // BRANCH, mask=there, other=0).to(tl.int32) * BRANCH + index % BRANCH
    mass = tl.zeros(index.shape, tl.float32)
    for member in tl.range(0, members):
        share = _share(
            rank_ptr,
            rank_lse_ptr,
            found_lse_ptr,
            head + member,
            index,
            index < tl.cdiv(count, 16) * 16,  # which is as far as ranks are written
            rows,
            splits,
            others,
            rank_places,
            SPLITS,
            OTHERS,
        )
        mass = tl.maximum(mass, share) if LAYER else mass + share
    if not LAYER:
        mass = mass / members
    if PRIOR:
        recent_ptr += node.to(tl.int64) * recent_stride_n
        recent = tl.load(recent_ptr, mask=there, other=0.0)
        if LAYER:
            for kv_head in tl.range(1, members // group):
                recent = tl.maximum(recent, tl.load(recent_ptr + kv_head * recent_stride_h, mask=there, other=0.0))
        mass = mass + prior * (recent - mass)
    mass = tl.where(node < first, float("inf"), mass)
    return tl.where(there, mass, float("-inf")), node


@triton.jit
def _log_sums(lse_ptr, row, there, number, rows, stride_row, stride_part, PARTS: tl.constexpr):
    """Logarithms of sums over ``number`` parts, to the base 2, of some ``row [M]``."""
    part = tl.arange(0, PARTS)
    at = lse_ptr + row[:, None] * stride_row + part[None, :].to(tl.int64) * stride_part
    lse = tl.load(at, mask=there[:, None] & (part < number)[None, :], other=float("-inf"))
    top = tl.maximum(tl.max(lse, 1), _BOTTOM)
    return top + tl.log2(tl.sum(tl.exp2(lse - top[:, None]), 1))


@triton.jit
def all_log_sums(
    rank_lse_ptr, found_lse_ptr, row, exist, splits, others, rows, SPLITS: tl.constexpr, OTHERS: tl.constexpr
):
    """Logarithms of what some heads ``row [M]`` see of nodes and of the rest of the cover, to the base 2."""
    lse = _log_sums(rank_lse_ptr, row, exist, splits, rows, splits, 1, SPLITS)
    rest = _log_sums(found_lse_ptr, row, exist, others, rows, 1, rows, OTHERS)
    top = tl.maximum(tl.maximum(lse, rest), _BOTTOM)
    return top + tl.log2(tl.exp2(lse - top) + tl.exp2(rest - top))


@triton.jit
def group_masses(
    rank_ptr,
    rank_lse_ptr,
    found_lse_ptr,
    recent_ptr,
    recent_stride_n,
    list_ptr,
    index,
    places,
    count,
    head,
    rows,
    splits,
    others,
    rank_places,
    first,
    prior,
    BRANCH: tl.constexpr,
    PRIOR: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    OTHERS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """What :func:`masses` finds for ``GROUP`` heads of one KV head, in few steps one behind the other: everything is
    asked for at once, if it is ``AT_ONCE`` numbers or fewer, and before it is known how many of the ``places`` count.

    Rows of ranks, and places, are padded to 16: where a mask changes within 16 bytes each number is read by itself.
    """
    MEMBERS: tl.constexpr = triton.next_power_of_2(GROUP)
    HELD: tl.constexpr = index.shape[0]
    member, held = tl.arange(0, MEMBERS), index < tl.cdiv(places, 16) * 16
    rank_places = rank_places // 16 * 16
    row, exist = head + tl.where(member < GROUP, member, 0), member < GROUP
    if MEMBERS * HELD <= AT_ONCE:
        ranks = tl.load(
            rank_ptr + row[:, None] * rank_places + index[None, :],
            mask=exist[:, None] & held[None, :],
            other=float("-inf"),
        )
    if PRIOR and not BRANCH:
        recent = tl.load(recent_ptr + index.to(tl.int64) * recent_stride_n, mask=index < places, other=0.0)
    lse = all_log_sums(rank_lse_ptr, found_lse_ptr, row, exist, splits, others, rows, SPLITS, OTHERS)
    if MEMBERS * HELD <= AT_ONCE:
        mass = tl.sum(tl.where(exist[:, None], tl.exp2(ranks - lse[:, None]), 0.0), 0)
    else:
        mass = tl.zeros([HELD], tl.float32)
        for turn in tl.static_range(GROUP):
            of_head = tl.sum(tl.where(member == turn, lse, 0.0), 0)
            rank = tl.load(rank_ptr + (head + turn) * rank_places + index, mask=held, other=float("-inf"))
            mass += tl.exp2(rank - of_head)
    there = index < count
    mass, node = mass / GROUP, index
    if BRANCH:
        node = tl.load(list_ptr + index // BRANCH, mask=there, other=0).to(tl.int32) * BRANCH + index % BRANCH
        if PRIOR:
            recent = tl.load(recent_ptr + node.to(tl.int64) * recent_stride_n, mask=there, other=0.0)
    if PRIOR:
        mass = mass + prior * (recent - mass)
    mass = tl.where(node < first, float("inf"), mass)
    return tl.where(there, mass, float("-inf")), node


@triton.jit
def _key(mass, place):
    """What orders nodes by mass, of equals the first before the others; -1 where the mass is none, as of NaN."""
    bits = tl.abs(mass).to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(mass >= 0, (bits << 32) | (LAST_PLACE - place), -1)


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
    bound = tl.where(recent == float("inf"), recent, bound + prior * (recent - bound)) * SLACK
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
    first,
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
    mass = tl.where(node < first, float("inf"), mass)
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
    first,
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
            first,
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
                first,
                prior,
                BRANCH,
                PRIOR,
                GROUP,
                FEW,
            )
            last = tl.sum(tl.where(few == allowed - 1, keys, 0), 0)
            least = tl.where(last >= 0, (last >> 32).to(tl.int32).to(tl.float32, bitcast=True), 0.0)
            left = tl.max(bound, 0) >= least

    places = tl.where(keys >= 0, LAST_PLACE - (keys & LAST_PLACE), -1).to(tl.int32)
    smaller = (places[None, :] < places[:, None]) & (places[None, :] >= 0)
    order = tl.where(places < 0, -1, tl.sum(smaller.to(tl.int32), 1))
    return places, order, tl.sum((places >= 0).to(tl.int32), 0)


@triton.jit
def _enough(mass, x, limit):
    """How many of the heaviest leave at most ``limit`` in the others; ``x``: the masses, -inf where there is none."""
    low, high = tl.zeros([], tl.int32), _behind(x)
    there = x > float("-inf")
    while low + 1 < high:
        middle = low + (high - low) // 2
        fits = tl.sum(tl.where(there & (x < _float(middle)), mass, 0.0), 0) <= limit
        low, high = tl.where(fits, middle, low), tl.where(fits, high, middle)
    value = _float(low)
    left = tl.sum(tl.where(there & (x < value), mass, 0.0), 0)
    ties = tl.sum((x == value).to(tl.int32), 0)
    spared = tl.where(value > 0, tl.floor((limit - left) / tl.where(value > 0, value, 1.0)), ties.to(tl.float32))
    return tl.sum((x >= value).to(tl.int32), 0) - tl.minimum(spared, ties.to(tl.float32)).to(tl.int32)


@triton.jit(do_not_specialize=[*VARYING, "k", "gone_stride", "gone_places", "width"])
def select_nodes(
    rank_ptr,
    rank_lse_ptr,
    found_lse_ptr,
    recent_ptr,
    count_ptr,
    allowed_ptr,
    list_ptr,
    found_ptr,
    node_ptr,
    picked_ptr,
    gone_ptr,
    capped_ptr,
    recent_stride_b,
    recent_stride_h,
    recent_stride_n,
    count_stride_b,
    count_stride_h,
    list_stride_b,
    list_stride_h,
    rows,
    num_kv_heads,
    group,
    splits,
    others,
    rank_places,
    gone_stride,
    gone_places,
    width,
    first,
    k,
    prior,
    limit,
    RULE: tl.constexpr,
    BRANCH: tl.constexpr,
    PRIOR: tl.constexpr,
    LAYER: tl.constexpr,
    SPLITS: tl.constexpr,
    OTHERS: tl.constexpr,
    HELD: tl.constexpr,
    GROUP: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Writes of each KV head, or of the ``LAYER``: ``found [B, sets, k]``, the places of chosen nodes, ascending and -1
    behind; ``node``, their numbers, likewise (``BRANCH``); ``picked [B, sets]``, how many; ``gone int32 [B, sets,
    gone_places]``, rows ``gone_stride`` apart, which places no longer count, or never did; and ``capped [B, sets]``,
    whether more were wanted. ``GROUP``: the heads of a KV head, where these are few and choose for themselves."""
    sets = 1 if LAYER else num_kv_heads
    row = tl.program_id(0).to(tl.int64)
    batch, kv_head = row // sets, row % sets
    members = group * num_kv_heads if LAYER else group
    index = tl.arange(0, HELD)
    count = tl.load(count_ptr + batch * count_stride_b + kv_head * count_stride_h).to(tl.int32)
    if BRANCH:
        count = count * BRANCH
        list_ptr += batch * list_stride_b + kv_head * list_stride_h
    if PRIOR:
        recent_ptr += batch * recent_stride_b + kv_head * recent_stride_h
    if GROUP:
        mass, node = group_masses(
            rank_ptr,
            rank_lse_ptr,
            found_lse_ptr,
            recent_ptr,
            recent_stride_n,
            list_ptr,
            index,
            width,
            count,
            row * members,
            rows,
            splits,
            others,
            rank_places,
            first,
            prior,
            BRANCH,
            PRIOR,
            GROUP,
            SPLITS,
            OTHERS,
            AT_ONCE,
        )
    else:
        mass, node = masses(
            rank_ptr,
            rank_lse_ptr,
            found_lse_ptr,
            recent_ptr,
            recent_stride_h,
            recent_stride_n,
            list_ptr,
            index,
            count,
            row * members,
            members,
            group,
            rows,
            splits,
            others,
            rank_places,
            first,
            prior,
            BRANCH,
            PRIOR,
            LAYER,
            SPLITS,
            OTHERS,
        )
    x = tl.where(mass > float("-inf"), mass, float("-inf"))
    if RULE == 1:
        x = tl.where(mass > limit, x, float("-inf"))
    valid = _valid(x)
    allowed = tl.minimum(tl.load(allowed_ptr + batch).to(tl.int32), k)
    if RULE == 2:
        wanted = _enough(mass, x, limit)
        tl.store(capped_ptr + row, (wanted > allowed).to(tl.int32))
        allowed = tl.minimum(wanted, allowed)
    kth, room, _ = _kth(x, allowed, _LOWEST + 1, valid, _behind(x))
    above, tie = x > _float(kth), x == _float(kth)
    seen = tl.cumsum((above.to(tl.int32) + (tie.to(tl.int32) << 16)), 0)  # either is at most 32,768
    ties = (seen.to(tl.uint32, bitcast=True) >> 16).to(tl.int32)
    chosen, place = above | (tie & (ties <= room)), (seen & 0xFFFF) + tl.minimum(ties, room) - 1
    picked = tl.minimum(valid, allowed)
    tl.store(found_ptr + row * k + place, index, mask=chosen)
    _end(found_ptr + row * k, picked, k, 1024)
    if BRANCH:
        tl.store(node_ptr + row * k + place, node, mask=chosen)
        _end(node_ptr + row * k, picked, k, 1024)
    tl.store(picked_ptr + row, picked)
    gone = gone_ptr + row * (gone_stride // 16 * 16) + index
    tl.store(gone, (chosen | (index >= count)).to(tl.int32), mask=index < gone_places // 16 * 16)
