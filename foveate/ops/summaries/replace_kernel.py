"""Triton kernel of :func:`attend_summaries` for few refined pages: replaces these in attention to all nodes.

Names as in ``score_kernel``; ``found_stride`` are the strides of ``chosen`` and ``page``, ``piece`` is the program's
slice of the output dims.
"""

import triton
import triton.language as tl

from foveate.ops.gpu.softmax import LOWEST, online, store_part
from foveate.ops.summaries.pages_kernel import count_refined, listed, refined_tokens
from foveate.ops.summaries.parts_kernel import merge_parts
from foveate.ops.summaries.ranks_kernel import all_log_sums
from foveate.ops.summaries.score_kernel import VARYING
from foveate.ops.summaries.select_few_kernel import heaviest_few

_GONE = tl.constexpr(1024)
"""Places of ``gone`` that a program writes at a time."""
_LOST = tl.constexpr(1.0)
"""Largest ratio of the subtracted mass to the mass that remains; above it the output is recomputed."""

_VARYING = [
    "sinks",
    "rank_places",
    "bound_places",
    "before",
    "per",
    "most",
    "page_places",
    "rank_splits",
    "gone_places",
]
_STRIDES = [f"{name}_stride_{axis}" for name in ("list", "chosen", "picked", "gone") for axis in "bh"]


@triton.jit(do_not_specialize=[*VARYING, *_VARYING, *_STRIDES])
def replace_refined(
    q_ptr,
    k_ptr,
    v_ptr,
    value_ptr,
    count_ptr,
    list_ptr,
    allowed_ptr,
    recent_ptr,
    rank_ptr,
    rank_lse_ptr,
    bound_ptr,
    chosen_ptr,
    page_ptr,
    picked_ptr,
    gone_ptr,
    end_ptr,
    weight_ptr,
    token_ptr,
    part_out_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    read_ptr,
    refined_ptr,
    q_strides,
    k_strides,
    v_strides,
    value_strides,
    recent_strides,
    count_strides,
    list_stride_b,
    list_stride_h,
    chosen_stride_b,
    chosen_stride_h,
    picked_stride_b,
    picked_stride_h,
    gone_stride_b,
    gone_stride_h,
    end_strides,
    batches,
    num_kv_heads,
    group,
    head_tiles,
    rank_splits,
    before,
    per,
    most,
    places,
    rank_places,
    bound_places,
    gone_places,
    sinks,
    page_places,
    scaling,
    prior,
    WIDTH: tl.constexpr,
    BRANCH: tl.constexpr,
    PRIOR: tl.constexpr,
    FEW: tl.constexpr,
    GROUP: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_AT_ONCE: tl.constexpr,
    SPLITS: tl.constexpr,
    OTHERS: tl.constexpr,
    PRESERVE: tl.constexpr,
    KEEPS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    AT_ONCE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Write ``out`` and ``lse``: attention to all entries, with refined nodes replaced by the keys of their pages.

    :func:`score_nodes` has written attention to all entries as parts, ``part_out [.., B, Hq, Dv]`` and ``part_lse``:
    first ``before`` parts of other keys, then one part of every ``per`` blocks of nodes. Each program owns ``BLOCK_S``
    dims of the output: it merges the parts, subtracts the refined nodes and attends to the keys of refined pages.

    Subtraction cancels if the refined nodes held nearly all the mass, as when summaries have far larger logits than
    their keys. Beyond the ratio ``_LOST`` the program starts again: it merges only the parts without a refined node,
    and attends to the nodes of the other parts that are not refined, ``BLOCK_R`` at a time.

    ``chosen [B, sets, most]``, ``page`` and ``picked`` are the selection, see :class:`Selection`. With ``FEW`` every
    program makes it by itself, at most ``FEW`` nodes of at most ``BLOCKS`` blocks; one program of a row writes it and,
    with ``KEEPS``, each a share of ``gone``. All programs of a row write the same ``lse``.

    ``KEEPS``: log-weights of refined pages are stored in ``token [B, Hq, places]``, see :func:`refined_tokens`.
    """
    q_stride_b, q_stride_h, q_stride_d = q_strides
    k_stride_b, k_stride_h, k_stride_l, k_stride_d = k_strides
    v_stride_b, v_stride_h, v_stride_l, v_stride_d = v_strides
    value_stride_b, value_stride_h, value_stride_n, value_stride_d = value_strides
    count_stride_b, count_stride_h = count_strides
    recent_stride_b, recent_stride_h, recent_stride_n = recent_strides
    end_stride_b, end_stride_h, end_stride_n = end_strides
    row, head_tile, piece = tl.program_id(0) // head_tiles, tl.program_id(0) % head_tiles, tl.program_id(1)
    batch, head = (row // num_kv_heads).to(tl.int64), (row % num_kv_heads).to(tl.int64)
    member = head_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    exist = member < group
    heads = head * group + tl.where(exist, member, 0)
    num_q_heads = batches * num_kv_heads * group
    first_q_head = (batch * num_kv_heads + head) * group
    q_heads = first_q_head + tl.where(exist, member, 0)
    count = tl.load(count_ptr + batch * count_stride_b + head * count_stride_h).to(tl.int32)
    if BRANCH:
        count = count * BRANCH
        list_ptr += batch * list_stride_b + head * list_stride_h
    chosen_ptr += batch * chosen_stride_b + head * chosen_stride_h
    page_ptr += batch * chosen_stride_b + head * chosen_stride_h
    picked_ptr += batch * picked_stride_b + head * picked_stride_h
    first_dim = piece * BLOCK_S
    part_out_ptr += first_dim
    writes = (piece == 0) & (head_tile == 0)

    few, of_part = tl.arange(0, ROOM), per * BLOCK_N
    none = tl.full([1], -1, tl.int32)
    number = before + tl.cdiv(count, of_part)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_S], tl.float32)
    top, weight, out = merge_parts(
        part_out_ptr, part_lse_ptr, q_heads, exist, num_q_heads, 0, number, none, top, weight, out, AT_ONCE, VALUE_DIM
    )
    if FEW:
        if rank_lse_ptr is not None:
            lse = all_log_sums(
                rank_lse_ptr, part_lse_ptr, q_heads, exist, rank_splits, before, num_q_heads, SPLITS, OTHERS
            )
        else:
            lse = top + tl.log2(weight)
        if PRIOR:
            recent_ptr += batch * recent_stride_b + head * recent_stride_h
        if BLOCKS > BLOCKS_AT_ONCE:
            bound_ptr += row.to(tl.int64) * (2 * GROUP + 2) * bound_places
        few_places, order, picked = heaviest_few(
            lse,
            rank_ptr,
            recent_ptr,
            recent_stride_n,
            bound_ptr,
            bound_places,
            list_ptr,
            count,
            tl.minimum(tl.load(allowed_ptr + batch).to(tl.int32), most),
            first_q_head,
            rank_places,
            prior,
            BRANCH,
            PRIOR,
            GROUP,
            FEW,
            ROOM,
            BLOCKS,
            BLOCK_N,
            BLOCKS_AT_ONCE,
        )
        few_pages = few_places
        if BRANCH:
            above = tl.load(list_ptr + few_places // BRANCH, mask=few_places >= 0, other=0).to(tl.int32)
            few_pages = tl.where(few_places >= 0, above * BRANCH + few_places % BRANCH, -1)
        if writes:
            slot = tl.where(order >= 0, order, few)  # unused entries, -1, come last
            tl.store(chosen_ptr + slot, few_places, mask=slot < most)
            if BRANCH:
                tl.store(page_ptr + slot, few_pages, mask=slot < most)
            tl.store(picked_ptr, picked)
        if KEEPS:
            gone_ptr += batch * gone_stride_b + head * gone_stride_h
            for begin in tl.range(piece * _GONE, gone_places, tl.num_programs(1) * _GONE):
                index = begin + tl.arange(0, _GONE)
                tl.store(gone_ptr + index, tl.zeros([_GONE], tl.int32), mask=index < gone_places // 16 * 16)
            tl.debug_barrier()  # the zeros are written before the ones
            mine = (few_places >= 0) & (few_places // _GONE % tl.num_programs(1) == piece)
            tl.store(gone_ptr + few_places, tl.full([ROOM], 1, tl.int32), mask=mine)
    else:
        picked = tl.load(picked_ptr)
        order = tl.where(few < picked, few, -1)
        few_places = tl.load(chosen_ptr + few, mask=few < picked, other=-1).to(tl.int32)
        few_pages = tl.load(page_ptr + few, mask=few < picked, other=-1).to(tl.int32)

    mended = tl.where(few_places >= 0, few_places // of_part, -1)
    lanes, value_dims = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_S)
    value_ptr += batch * value_stride_b + head * value_stride_h + first_dim * value_stride_d
    if not WIDTH:
        end_ptr += batch * end_stride_b + head * end_stride_h
    PAGES: tl.constexpr = max(1, BLOCK_N // BLOCK_W)
    anew, again = tl.zeros([], tl.int32), tl.full([], 1, tl.int32)
    while again > 0:
        top, weight, out = merge_parts(
            part_out_ptr,
            part_lse_ptr,
            q_heads,
            exist,
            num_q_heads,
            0,
            tl.where(anew > 0, number, 0),
            tl.where(mended >= 0, before + mended, -1),
            top,
            weight,
            out,
            AT_ONCE,
            VALUE_DIM,
        )
        lost = tl.zeros([BLOCK_M], tl.float32)
        for one in tl.static_range(ROOM):
            refined, its_page = tl.sum(tl.where(few == one, few_places, 0)), tl.sum(tl.where(few == one, few_pages, 0))
            takes = (refined >= 0) & (anew == 0)
            there = takes
            if BLOCK_S > VALUE_DIM:
                there = there & (value_dims < VALUE_DIM)
            share = tl.load(weight_ptr + q_heads * places + refined, mask=exist & takes, other=float("-inf"))
            share = tl.exp2(share - top)
            vector = value_ptr + its_page.to(tl.int64) * value_stride_n + value_dims * value_stride_d
            taken = tl.load(vector, mask=there, other=0.0).to(tl.float32)
            lost = lost + share
            out = out - share[:, None] * taken[None, :]
        weight = weight - lost
        for tile in tl.range(0, tl.where(anew > 0, tl.cdiv(picked * of_part, BLOCK_R), 0)):
            at = tile * BLOCK_R + lanes
            turn = at // of_part
            its_part = listed(turn, picked, mended, order, chosen_ptr, True)
            place = its_part * of_part + at % of_part
            earlier = (order >= 0)[None, :] & (order[None, :] < turn[:, None]) & (mended[None, :] == its_part[:, None])
            left_out = earlier | (place[:, None] == few_places[None, :])
            stays = (turn < picked) & (place < count) & (tl.sum(left_out.to(tl.int32), 1) == 0)
            node = place
            if BRANCH:
                node = tl.load(list_ptr + place // BRANCH, mask=stays, other=0).to(tl.int32) * BRANCH + place % BRANCH
            known = exist[:, None] & stays[None, :]
            logits = tl.load(weight_ptr + q_heads[:, None] * places + place[None, :], mask=known, other=float("-inf"))
            v_mask = stays[:, None]
            if BLOCK_S > VALUE_DIM:
                v_mask = v_mask & (value_dims < VALUE_DIM)[None, :]
            v_tile = (node.to(tl.int64) * value_stride_n)[:, None] + value_dims[None, :] * value_stride_d
            v = tl.load(value_ptr + v_tile, mask=v_mask, other=0.0)
            top, weight, out = online(logits, v, top, weight, out)
        highest = top
        top, weight, out = refined_tokens(
            q_ptr + batch * q_stride_b,
            k_ptr + batch * k_stride_b + head * k_stride_h,
            v_ptr + batch * v_stride_b + head * v_stride_h + first_dim * v_stride_d,
            end_ptr,
            weight_ptr,
            token_ptr,
            chosen_ptr,
            page_ptr,
            few_places,
            few_pages,
            order,
            q_stride_h,
            q_stride_d,
            k_stride_l,
            k_stride_d,
            v_stride_l,
            v_stride_d,
            end_stride_n,
            heads,
            q_heads,
            exist,
            0,
            tl.cdiv(picked * CHUNKS, PAGES),
            picked,
            places,
            page_places,
            sinks,
            scaling,
            top,
            weight,
            out,
            piece == 0,
            True,
            WIDTH,
            PRESERVE,
            KEEPS,
            SOFTCAP,
            DIM,
            VALUE_DIM,
            BLOCK_D,
            BLOCK_N,
            BLOCK_W,
            CHUNKS,
        )
        lost = lost * tl.exp2(highest - top)
        again = tl.max((exist & (anew == 0) & ~(lost <= weight * _LOST)).to(tl.int32), 0)
        if again > 0:
            top = tl.full([BLOCK_M], LOWEST, tl.float32)
            weight = tl.zeros([BLOCK_M], tl.float32)
            out = tl.zeros([BLOCK_M, BLOCK_S], tl.float32)
        anew = anew + 1
    store_part(out_ptr + first_dim, lse_ptr, q_heads, exist, top, weight, out, VALUE_DIM, NATURAL=True)
    if writes:
        count_refined(
            read_ptr + row,
            refined_ptr + row,
            end_ptr,
            end_stride_n,
            page_ptr,
            few_pages,
            order,
            picked,
            sinks,
            True,
            WIDTH,
            ROOM,
        )
