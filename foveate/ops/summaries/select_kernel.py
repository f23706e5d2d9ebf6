"""Triton kernel of :func:`attend_summaries`: selects the nodes to refine. Names as in ``score_kernel``."""

import triton
import triton.language as tl

from foveate.ops.gpu.softmax import LOWEST as LEAST
from foveate.ops.select.kth_kernel import LOWEST, above_all, count_valid, find_kth, float_of, put_end
from foveate.ops.summaries.score_kernel import VARYING, node_at, visited


@triton.jit
def _log_sums(lse_ptr, q_heads, exist, number, stride_head, stride_part, PARTS: tl.constexpr):
    """Log-sum-exps ``[G]`` over ``number`` parts, to the base 2, of query heads ``q_heads [G]``.

    Shapes: G = query heads, P = PARTS.
    """
    part = tl.arange(0, PARTS)  # [P]
    at = lse_ptr + q_heads[:, None] * stride_head + part[None, :].to(tl.int64) * stride_part  # [G, P]
    lse = tl.load(at, mask=exist[:, None] & (part < number)[None, :], other=float("-inf"))  # [G, P]
    top = tl.maximum(tl.max(lse, 1), LEAST)  # [G]
    return top + tl.log2(tl.sum(tl.exp2(lse - top[:, None]), 1))  # [G]


@triton.jit(do_not_specialize=[*VARYING, "splits", "others", "gone_places", "width", "k"])
def select_nodes(
    rank_ptr, rank_lse_ptr, part_lse_ptr, recent_ptr, count_ptr, allowed_ptr, list_ptr, chosen_ptr, node_ptr,
    picked_ptr, gone_ptr,
    recent_strides,
    num_kv_heads, places, list_places, gone_places, splits, others, width, k, prior,
    BRANCH: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr, OTHERS: tl.constexpr, HELD: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Selects the nodes to refine of one KV head in a row, see :class:`Selection`.

    A program owns a KV head of a row and holds all its ``count`` visited nodes, at most ``HELD``, in registers. It
    reads the ranks ``rank [B, Hq, places]`` of the group's heads once; if there are at most ``AT_ONCE`` ranks, it loads
    all of them together, before it knows ``count``.

    A node's mass is the mean over the group, mixed with its ``recent`` attention of weight ``prior``. A head's masses
    are normalised over the whole cover: ``rank_lse [B, Hq, splits]`` holds log-sum-exps of ranks, and
    ``part_lse [others, B, Hq]`` holds the log-sum-exps of the other parts of the cover. All are to the base 2. The
    program selects the nodes of largest mass, at most ``k`` and ``allowed [B]``, and of equal masses the first ones.

    It writes the places of the chosen nodes to ``chosen [B, Hkv, k]``, ascending, then -1; below the top level
    (``BRANCH``) their numbers to ``node``, in the same order; their count to ``picked [B, Hkv]``; and to
    ``gone [B, Hkv, gone_places]`` 1 at places that are refined or unused, of ``width`` places padded to 16.

    Shapes: G = MEMBERS, the power of two that holds the heads of a group; N = HELD places.
    """
    # 1. Unpack the constants and strides, and find the row and its query heads.
    recent_stride_b, recent_stride_h, recent_stride_n = recent_strides
    PRIOR: tl.constexpr = recent_ptr is not None
    MEMBERS: tl.constexpr = triton.next_power_of_2(GROUP)
    row = tl.program_id(0).to(tl.int64)
    member, index = tl.arange(0, MEMBERS), tl.arange(0, HELD)  # [G], [N]
    # arrays are padded to 16, since loads are vectorised only where a mask is constant over 16 bytes
    padded, places = tl.cdiv(width, 16) * 16, places // 16 * 16
    exist = member < GROUP  # [G]
    q_heads = row * GROUP + tl.where(exist, member, 0)  # [G]
    # 2. Load ranks and recent attention, and compute each head's log-sum-exp over the cover.
    if MEMBERS * HELD <= AT_ONCE:
        mask = exist[:, None] & (index < padded)[None, :]  # [G, N]
        ranks = tl.load(rank_ptr + q_heads[:, None] * places + index[None, :], mask=mask, other=float("-inf"))  # [G, N]
    if PRIOR:
        recent_ptr += row // num_kv_heads * recent_stride_b + row % num_kv_heads * recent_stride_h
    if PRIOR and not BRANCH:
        recent = tl.load(recent_ptr + index.to(tl.int64) * recent_stride_n, mask=index < width, other=0.0)  # [N]
    own = _log_sums(rank_lse_ptr, q_heads, exist, splits, splits, 1, SPLITS)  # [G]
    rest = _log_sums(part_lse_ptr, q_heads, exist, others, 1, tl.num_programs(0) * GROUP, OTHERS)  # [G]
    top = tl.maximum(tl.maximum(own, rest), LEAST)  # [G]
    lse = top + tl.log2(tl.exp2(own - top) + tl.exp2(rest - top))  # [G]
    # 3. Compute the mass of each node, the mean over the group; of many ranks head by head, to save registers.
    if MEMBERS * HELD <= AT_ONCE:
        mass = tl.sum(tl.where(exist[:, None], tl.exp2(ranks - lse[:, None]), 0.0), 0)  # [N]
    else:
        UNROLLED: tl.constexpr = min(GROUP, 16)
        mass = tl.zeros([HELD], tl.float32)  # [N]
        for turn in tl.range(0, GROUP, loop_unroll_factor=UNROLLED):
            of_head = tl.sum(tl.where(member == turn, lse, 0.0), 0)
            of_nodes = rank_ptr + (row * GROUP + turn) * places + index  # [N]
            mass += tl.exp2(tl.load(of_nodes, mask=index < padded, other=float("-inf")) - of_head)  # [N]
    count = visited(count_ptr, row, num_kv_heads, BRANCH)
    there = index < count  # [N]
    mass = mass / GROUP  # [N]
    node = node_at(index, there, list_ptr + row * list_places if BRANCH else list_ptr, BRANCH)  # [N]
    if PRIOR and BRANCH:
        recent = tl.load(recent_ptr + node.to(tl.int64) * recent_stride_n, mask=there, other=0.0)  # [N]
    if PRIOR:
        mass = mass + prior * (recent - mass)  # [N]

    # 4. Find the k-th largest mass, and choose the nodes above it and the first nodes that equal it.
    x = tl.where(there & (mass > float("-inf")), mass, float("-inf"))  # [N]
    valid = count_valid(x)
    allowed = tl.minimum(tl.load(allowed_ptr + row // num_kv_heads).to(tl.int32), k)
    kth, room, _ = find_kth(x, allowed, LOWEST + 1, valid, above_all(x))
    above, tie = x > float_of(kth), x == float_of(kth)  # [N], [N]
    # [N]; one scan counts both, in 16 bits each, as either is at most 32,768
    seen = tl.cumsum((above.to(tl.int32) + (tie.to(tl.int32) << 16)), 0)
    ties = (seen.to(tl.uint32, bitcast=True) >> 16).to(tl.int32)  # [N]
    chosen, place = above | (tie & (ties <= room)), (seen & 0xFFFF) + tl.minimum(ties, room) - 1  # [N], [N]
    # 5. Store the selection.
    picked = tl.minimum(valid, allowed)
    tl.store(chosen_ptr + row * k + place, index, mask=chosen)
    put_end(chosen_ptr + row * k, picked, k, 1024)
    if BRANCH:
        tl.store(node_ptr + row * k + place, node, mask=chosen)
        put_end(node_ptr + row * k, picked, k, 1024)
    tl.store(picked_ptr + row, picked)
    gone = gone_ptr + row * (gone_places // 16 * 16) + index  # [N]
    tl.store(gone, (chosen | ~there).to(tl.int32), mask=index < padded)
