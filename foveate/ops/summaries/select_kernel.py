"""Triton kernel of :func:`attend_summaries`: selects the nodes to refine. Names as in ``score_kernel``."""

import triton
import triton.language as tl

from foveate.ops.select.kth_kernel import LOWEST, above_all, count_valid, find_kth, float_of, put_end
from foveate.ops.summaries.ranks_kernel import group_masses, node_masses

VARYING = ["num_q_heads", "num_kv_heads", "splits", "others", "rank_places", "list_stride_b", "list_stride_h"]
"""Arguments that change from step to step or from batch to batch, so that kernels are not specialised on them."""


@triton.jit(do_not_specialize=[*VARYING, "k", "gone_stride", "gone_places", "width"])
def select_nodes(
    rank_ptr,
    rank_lse_ptr,
    part_lse_ptr,
    recent_ptr,
    count_ptr,
    allowed_ptr,
    list_ptr,
    chosen_ptr,
    node_ptr,
    picked_ptr,
    gone_ptr,
    recent_strides,
    count_strides,
    list_stride_b,
    list_stride_h,
    num_q_heads,
    num_kv_heads,
    group,
    splits,
    others,
    rank_places,
    gone_stride,
    gone_places,
    width,
    k,
    prior,
    BRANCH: tl.constexpr,
    PRIOR: tl.constexpr,
    LAYER: tl.constexpr,
    SPLITS: tl.constexpr,
    OTHERS: tl.constexpr,
    HELD: tl.constexpr,
    GROUP: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Write the selection of each KV head, or one for all (``LAYER``), see :class:`Selection`.

    ``chosen [B, sets, k]`` gets the places of the chosen nodes, ascending, then -1; below the top level (``BRANCH``)
    ``node`` their numbers, likewise; ``picked [B, sets]`` how many they are; ``gone [B, sets, gone_places]``, rows
    ``gone_stride`` apart, which places are refined or unused. ``part_lse`` are the parts' log-sum-exps, see
    :func:`node_masses`. ``GROUP``: query heads of a KV head if they are few and there is no ``LAYER``, else 0. A
    program holds all nodes, at most ``HELD``.
    """
    count_stride_b, count_stride_h = count_strides
    recent_stride_b, recent_stride_h, recent_stride_n = recent_strides
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
            part_lse_ptr,
            recent_ptr,
            recent_stride_n,
            list_ptr,
            index,
            width,
            count,
            row * members,
            num_q_heads,
            splits,
            others,
            rank_places,
            prior,
            BRANCH,
            PRIOR,
            GROUP,
            SPLITS,
            OTHERS,
            AT_ONCE,
        )
    else:
        mass, node = node_masses(
            rank_ptr,
            rank_lse_ptr,
            part_lse_ptr,
            recent_ptr,
            recent_stride_h,
            recent_stride_n,
            list_ptr,
            index,
            count,
            row * members,
            members,
            group,
            num_q_heads,
            splits,
            others,
            rank_places,
            prior,
            BRANCH,
            PRIOR,
            LAYER,
            SPLITS,
            OTHERS,
        )
    x = tl.where(mass > float("-inf"), mass, float("-inf"))
    valid = count_valid(x)
    allowed = tl.minimum(tl.load(allowed_ptr + batch).to(tl.int32), k)
    kth, room, _ = find_kth(x, allowed, LOWEST + 1, valid, above_all(x))
    above, tie = x > float_of(kth), x == float_of(kth)
    seen = tl.cumsum((above.to(tl.int32) + (tie.to(tl.int32) << 16)), 0)  # either is at most 32,768
    ties = (seen.to(tl.uint32, bitcast=True) >> 16).to(tl.int32)
    chosen, place = above | (tie & (ties <= room)), (seen & 0xFFFF) + tl.minimum(ties, room) - 1
    picked = tl.minimum(valid, allowed)
    tl.store(chosen_ptr + row * k + place, index, mask=chosen)
    put_end(chosen_ptr + row * k, picked, k, 1024)
    if BRANCH:
        tl.store(node_ptr + row * k + place, node, mask=chosen)
        put_end(node_ptr + row * k, picked, k, 1024)
    tl.store(picked_ptr + row, picked)
    gone = gone_ptr + row * (gone_stride // 16 * 16) + index
    tl.store(gone, (chosen | (index >= count)).to(tl.int32), mask=index < gone_places // 16 * 16)
