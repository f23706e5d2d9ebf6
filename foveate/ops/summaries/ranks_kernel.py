"""Functions of the Triton kernels of :func:`attend_summaries`: masses of nodes, by which they are selected."""

import triton
import triton.language as tl

from foveate.ops.gpu.softmax import LOWEST


@triton.jit
def log_sum(x):
    """Log-sum-exp of ``x [N]``, to the base 2."""
    top = tl.maximum(tl.max(x, 0), LOWEST)
    return top + tl.log2(tl.sum(tl.exp2(x - top), 0))


@triton.jit
def _share(
    rank_ptr,
    rank_lse_ptr,
    part_lse_ptr,
    q_head,
    index,
    there,
    num_q_heads,
    splits,
    others,
    rank_places,
    SPLITS: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """The masses of nodes in the softmax of query head ``q_head``; see :func:`node_masses`."""
    some, parts = tl.arange(0, SPLITS), tl.arange(0, OTHERS)
    rank = tl.load(rank_ptr + q_head * (rank_places // 16 * 16) + index, mask=there, other=float("-inf"))
    lse = log_sum(tl.load(rank_lse_ptr + q_head * splits + some, mask=some < splits, other=float("-inf")))
    of_others = part_lse_ptr + parts.to(tl.int64) * num_q_heads + q_head
    rest = log_sum(tl.load(of_others, mask=parts < others, other=float("-inf")))
    top = tl.maximum(tl.maximum(lse, rest), LOWEST)
    return tl.exp2(rank - (top + tl.log2(tl.exp2(lse - top) + tl.exp2(rest - top))))


@triton.jit
def node_masses(
    rank_ptr,
    rank_lse_ptr,
    part_lse_ptr,
    recent_ptr,
    recent_stride_h,
    recent_stride_n,
    list_ptr,
    index,
    count,
    head,
    members,
    group,
    num_q_heads,
    splits,
    others,
    rank_places,
    prior,
    BRANCH: tl.constexpr,
    PRIOR: tl.constexpr,
    LAYER: tl.constexpr,
    SPLITS: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """``(mass, node)``: masses of the nodes at places ``index [HELD]``, -inf at unused ones, and their numbers.

    Masses are pooled over ``members`` query heads from number ``head`` on: their mean or, for a ``LAYER``, the largest;
    then averaged with the recent attention, which has weight ``prior``. A head's mass is normalised over the whole
    cover: ``rank_lse [num_q_heads, splits]`` are log-sum-exps of ranks, ``part_lse [others, num_q_heads]`` those of the
    rest.
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
            part_lse_ptr,
            head + member,
            index,
            index < tl.cdiv(count, 16) * 16,  # ranks are written that far
            num_q_heads,
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
    return tl.where(there, mass, float("-inf")), node


@triton.jit
def _log_sums(lse_ptr, q_heads, there, number, num_q_heads, stride_head, stride_part, PARTS: tl.constexpr):
    """Log-sum-exps over ``number`` parts, to the base 2, of query heads ``q_heads [M]``."""
    part = tl.arange(0, PARTS)
    at = lse_ptr + q_heads[:, None] * stride_head + part[None, :].to(tl.int64) * stride_part
    lse = tl.load(at, mask=there[:, None] & (part < number)[None, :], other=float("-inf"))
    top = tl.maximum(tl.max(lse, 1), LOWEST)
    return top + tl.log2(tl.sum(tl.exp2(lse - top[:, None]), 1))


@triton.jit
def all_log_sums(
    rank_lse_ptr, part_lse_ptr, q_heads, exist, splits, others, num_q_heads, SPLITS: tl.constexpr, OTHERS: tl.constexpr
):
    """Log-sum-exps of nodes and the rest of the cover together, to the base 2, of query heads ``q_heads [M]``."""
    lse = _log_sums(rank_lse_ptr, q_heads, exist, splits, num_q_heads, splits, 1, SPLITS)
    rest = _log_sums(part_lse_ptr, q_heads, exist, others, num_q_heads, 1, num_q_heads, OTHERS)
    top = tl.maximum(tl.maximum(lse, rest), LOWEST)
    return top + tl.log2(tl.exp2(lse - top) + tl.exp2(rest - top))


@triton.jit
def group_masses(
    rank_ptr,
    rank_lse_ptr,
    part_lse_ptr,
    recent_ptr,
    recent_stride_n,
    list_ptr,
    index,
    places,
    count,
    head,
    num_q_heads,
    splits,
    others,
    rank_places,
    prior,
    BRANCH: tl.constexpr,
    PRIOR: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    OTHERS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """:func:`node_masses` for the ``GROUP`` heads of one KV head, with few dependent loads: if there are at most
    ``AT_ONCE`` ranks, all are loaded together, and all ``places`` before ``count`` of them is known.

    ``places`` and the arrays of ranks are padded to 16, since loads are vectorised only where a mask is constant over
    16 bytes.
    """
    MEMBERS: tl.constexpr = triton.next_power_of_2(GROUP)
    HELD: tl.constexpr = index.shape[0]
    member, held = tl.arange(0, MEMBERS), index < tl.cdiv(places, 16) * 16
    rank_places = rank_places // 16 * 16
    q_heads, exist = head + tl.where(member < GROUP, member, 0), member < GROUP
    if MEMBERS * HELD <= AT_ONCE:
        ranks = tl.load(
            rank_ptr + q_heads[:, None] * rank_places + index[None, :],
            mask=exist[:, None] & held[None, :],
            other=float("-inf"),
        )
    if PRIOR and not BRANCH:
        recent = tl.load(recent_ptr + index.to(tl.int64) * recent_stride_n, mask=index < places, other=0.0)
    lse = all_log_sums(rank_lse_ptr, part_lse_ptr, q_heads, exist, splits, others, num_q_heads, SPLITS, OTHERS)
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
    return tl.where(there, mass, float("-inf")), node
