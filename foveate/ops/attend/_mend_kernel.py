"""Attention to all summaries, mended where a few of them give way: Triton kernel of :func:`attend_summaries`."""

import triton
import triton.language as tl

from foveate.ops.attend._nodes_kernel import count_refined, finish, merged, refined_tokens
from foveate.ops.score.summaries_kernel import LOWEST, VARYING, online, write_part
from foveate.ops.select.summaries_kernel import first_few, group_masses

_VARYING = [
    "sinks",
    "rank_places",
    "before",
    "node_parts",
    "per",
    "units",
    "most",
    "page_places",
    "rank_splits",
    "width",
]
_STRIDES = [f"{name}_stride_{axis}" for name in ("list", "found", "picked", "gone") for axis in "bh"]


@triton.jit(do_not_specialize=[*VARYING, *_VARYING, "first", *_STRIDES])
def mend_nodes(
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
    chosen_ptr,
    page_ptr,
    picked_ptr,
    gone_ptr,
    end_ptr,
    weight_ptr,
    token_ptr,
    found_ptr,
    found_lse_ptr,
    arrived_ptr,
    out_ptr,
    lse_ptr,
    read_ptr,
    refined_ptr,
    q_stride_b,
    q_stride_h,
    q_stride_d,
    k_stride_b,
    k_stride_h,
    k_stride_l,
    k_stride_d,
    v_stride_b,
    v_stride_h,
    v_stride_l,
    v_stride_d,
    value_stride_b,
    value_stride_h,
    value_stride_n,
    value_stride_d,
    count_stride_b,
    count_stride_h,
    list_stride_b,
    list_stride_h,
    recent_stride_b,
    recent_stride_h,
    recent_stride_n,
    found_stride_b,
    found_stride_h,
    picked_stride_b,
    picked_stride_h,
    gone_stride_b,
    gone_stride_h,
    end_stride_b,
    end_stride_h,
    end_stride_n,
    batches,
    num_kv_heads,
    group,
    parts,
    splits,
    rank_splits,
    before,
    node_parts,
    per,
    units,
    most,
    width,
    sinks,
    places,
    rank_places,
    page_places,
    first,
    scaling,
    prior,
    WIDTH: tl.constexpr,
    BRANCH: tl.constexpr,
    PRIOR: tl.constexpr,
    FEW: tl.constexpr,
    GROUP: tl.constexpr,
    ROOM: tl.constexpr,
    HELD: tl.constexpr,
    HELD_AT_ONCE: tl.constexpr,
    SPLITS: tl.constexpr,
    OTHERS: tl.constexpr,
    PRESERVE: tl.constexpr,
    KEEPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Puts refined nodes right in attention to everything, which :func:`score_nodes` has left behind: ``before`` parts
    and ``per`` blocks of nodes in each of those behind them, in ``found [.., B, Hq, Dv]`` and ``found_lse``.

    The ``splits`` programs of a row share three kinds of work: the parts in which nothing is refined are merged, in
    ``units``; the blocks of the others are attended to once more, without what is refined; and the keys of refined
    pages are. What each has found goes behind the ``before + node_parts`` parts, and the last one to be ready merges
    that.

    Which nodes are refined say ``chosen [B, sets, most]``, ``page`` and ``picked``, see :func:`choose_nodes`; or
    (``FEW``) every program finds them out, ``FEW`` or fewer of ``width`` or fewer, and one writes it down, and what
    is ``gone``.

    ``KEEPS``: and what masses take, ``token [B, Hq, places]``, the log-weights of the tokens of refined pages.
    """
    row, part, split = tl.program_id(0) // parts, tl.program_id(0) % parts, tl.program_id(1)
    batch, head = (row // num_kv_heads).to(tl.int64), (row % num_kv_heads).to(tl.int64)
    member = part * BLOCK_M + tl.arange(0, BLOCK_M)
    exist = member < group
    heads = head * group + tl.where(exist, member, 0)
    all_rows = batches * num_kv_heads * group
    first_row = (batch * num_kv_heads + head) * group
    rows = first_row + tl.where(exist, member, 0)
    count = tl.load(count_ptr + batch * count_stride_b + head * count_stride_h).to(tl.int32)
    if BRANCH:
        count = count * BRANCH
        list_ptr += batch * list_stride_b + head * list_stride_h
    chosen_ptr += batch * found_stride_b + head * found_stride_h
    page_ptr += batch * found_stride_b + head * found_stride_h
    picked_ptr += batch * picked_stride_b + head * picked_stride_h
    writes = (split == 0) & (part == 0)

    few = tl.arange(0, ROOM)
    if FEW:
        allowed = tl.minimum(tl.load(allowed_ptr + batch).to(tl.int32), most)
        index = tl.arange(0, HELD)
        if PRIOR:
            recent_ptr += batch * recent_stride_b + head * recent_stride_h
        mass, _ = group_masses(
            rank_ptr,
            rank_lse_ptr,
            found_lse_ptr,
            recent_ptr,
            recent_stride_n,
            list_ptr,
            index,
            width,
            count,
            first_row,
            all_rows,
            rank_splits,
            before,
            rank_places,
            first,
            prior,
            BRANCH,
            PRIOR,
            GROUP,
            SPLITS,
            OTHERS,
            HELD_AT_ONCE,
        )
        few_places, order, picked = first_few(mass, allowed, FEW, ROOM)
        few_pages = few_places
        if BRANCH:
            above = tl.load(list_ptr + few_places // BRANCH, mask=few_places >= 0, other=0).to(tl.int32)
            few_pages = tl.where(few_places >= 0, above * BRANCH + few_places % BRANCH, -1)
        if writes:
            slot = tl.where(order >= 0, order, few)  # what is not used comes last
            tl.store(chosen_ptr + slot, few_places, mask=slot < most)
            if BRANCH:
                tl.store(page_ptr + slot, few_pages, mask=slot < most)
            tl.store(picked_ptr, picked)
            if KEEPS:
                gone = tl.sum((index[:, None] == few_places[None, :]).to(tl.int32), 1).to(tl.int8)
                gone_ptr += batch * gone_stride_b + head * gone_stride_h
                tl.store(gone_ptr + index, gone, mask=index < count)
    else:
        picked = tl.load(picked_ptr)
        order = tl.where(few < picked, few, -1)
        few_places = tl.load(chosen_ptr + few, mask=few < picked, other=-1).to(tl.int32)
        few_pages = tl.load(page_ptr + few, mask=few < picked, other=-1).to(tl.int32)

    blocks = tl.cdiv(count, BLOCK_N)
    mended = tl.where(few_places >= 0, before + few_places // (per * BLOCK_N), -1)
    found = before + node_parts
    there = before + tl.cdiv(blocks, per)
    each = tl.cdiv(there, units)
    partner = tl.arange(0, MEMBERS)
    for unit in tl.range(split, units, splits):
        head_row = first_row + part * BLOCK_M + partner
        counts = part * BLOCK_M + partner < group
        head_row = tl.where(counts, head_row, first_row)
        end = tl.minimum((unit + 1) * each, there)
        top, weight, out = merged(
            found_ptr,
            found_lse_ptr,
            head_row,
            counts,
            all_rows,
            unit * each,
            end,
            mended,
            AT_ONCE,
            VALUE_DIM,
            BLOCK_DV,
        )
        place = (found + unit).to(tl.int64) * all_rows + head_row
        write_part(found_ptr, found_lse_ptr, place, counts, top, weight, out, VALUE_DIM)

    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    lanes, value_dims = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_DV)
    value_ptr += batch * value_stride_b + head * value_stride_h
    turn = (split + splits - units % splits) % splits  # who merges most has least to do here
    for piece in tl.range(turn, picked * per, splits):
        chosen = tl.sum(tl.where(order == piece // per, few_places, 0), 0)
        of_part = chosen // (per * BLOCK_N)
        earlier = tl.sum(((order >= 0) & (order < piece // per) & (mended == before + of_part)).to(tl.int32), 0)
        place = (of_part * per + piece % per) * BLOCK_N + lanes
        stays = (place < count) & (earlier == 0)
        stays = stays & (tl.sum((place[:, None] == few_places[None, :]).to(tl.int32), 1) == 0)
        node = place
        if BRANCH:
            node = tl.load(list_ptr + place // BRANCH, mask=stays, other=0).to(tl.int32) * BRANCH + place % BRANCH
        known = exist[:, None] & stays[None, :]
        logits = tl.load(weight_ptr + rows[:, None] * places + place[None, :], mask=known, other=float("-inf"))
        v_mask = stays[:, None]
        if BLOCK_DV > VALUE_DIM:
            v_mask = v_mask & (value_dims < VALUE_DIM)[None, :]
        v_tile = (node.to(tl.int64) * value_stride_n)[:, None] + value_dims[None, :] * value_stride_d
        v = tl.load(value_ptr + v_tile, mask=v_mask, other=0.0)
        top, weight, out = online(logits, v, top, weight, out)

    if not WIDTH:
        end_ptr += batch * end_stride_b + head * end_stride_h
    PAGES: tl.constexpr = max(1, BLOCK_N // BLOCK_W)
    turn = (split + splits - (units + picked * per) % splits) % splits
    top, weight, out = refined_tokens(
        q_ptr + batch * q_stride_b,
        k_ptr + batch * k_stride_b + head * k_stride_h,
        v_ptr + batch * v_stride_b + head * v_stride_h,
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
        rows,
        exist,
        turn,
        tl.cdiv(picked * CHUNKS, PAGES),
        splits,
        picked,
        places,
        page_places,
        sinks,
        scaling,
        top,
        weight,
        out,
        True,
        WIDTH,
        PRESERVE,
        KEEPS,
        DIM,
        VALUE_DIM,
        BLOCK_D,
        BLOCK_N,
        BLOCK_W,
        CHUNKS,
    )
    own = (found + units + split).to(tl.int64) * all_rows + rows
    write_part(found_ptr, found_lse_ptr, own, exist, top, weight, out, VALUE_DIM)
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
    finish(
        found_ptr,
        found_lse_ptr,
        arrived_ptr,
        out_ptr,
        lse_ptr,
        first_row + part * BLOCK_M,
        tl.minimum(group - part * BLOCK_M, BLOCK_M),
        all_rows,
        found,
        found + units + splits,
        splits,
        MEMBERS,
        AT_ONCE,
        VALUE_DIM,
        BLOCK_DV,
    )
