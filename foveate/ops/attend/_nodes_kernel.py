"""Attention over what is left of a cover, and its exact merge: Triton kernels of :func:`attend_summaries`."""

import triton
import triton.language as tl

from foveate.ops.score.summaries_kernel import LOG2E, LOWEST, VARYING, online, shared_out
from foveate.ops.select.summaries_kernel import first_few, masses


@triton.jit
def _listed(place, number, few, ptr, FEW: tl.constexpr, ROOM: tl.constexpr):
    """Entries of a list of ``number`` at some places: of ``few [ROOM]``, or in memory."""
    if FEW:
        return tl.sum(tl.where(place[:, None] == tl.arange(0, ROOM)[None, :], few[None, :], 0), 1)
    else:
        return tl.load(ptr + place, mask=place < number, other=0).to(tl.int32)


@triton.jit
def _span(page, known, end_ptr, end_stride, sinks, WIDTH: tl.constexpr):
    """First slot and length of pages; of ``WIDTH`` tokens each, or (0) as their ends say."""
    if WIDTH:
        start = sinks + page * WIDTH
        return start, tl.where(known, WIDTH, 0)
    else:
        last = page.to(tl.int64) * end_stride
        start = tl.load(end_ptr + last - end_stride, mask=known & (page > 0), other=0.0).to(tl.int32)
        start = tl.where(page > 0, start, sinks)
        return start, tl.where(known, tl.load(end_ptr + last, mask=known, other=0.0).to(tl.int32) - start, 0)


@triton.jit
def _merge(
    found_ptr,
    found_lse_ptr,
    out_ptr,
    lse_ptr,
    first_row,
    rows,
    members,
    number,
    MEMBERS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Merges what ``number`` programs have found for ``members`` heads from ``first_row`` on, always in one order.

    It was written by other programs of this launch, so that it must not be looked for in the first cache.
    """
    member, dims = tl.arange(0, MEMBERS), tl.arange(0, BLOCK_DV)
    exist = member < members
    row = first_row + tl.where(exist, member, 0)
    top, weight = tl.full([MEMBERS], LOWEST, tl.float32), tl.zeros([MEMBERS], tl.float32)
    out = tl.zeros([MEMBERS, BLOCK_DV], tl.float32)
    for first in tl.range(0, number, AT_ONCE):
        for turn in tl.static_range(AT_ONCE):
            part = (first + turn) * rows + row
            mask = exist & (first + turn < number)
            lse = tl.load(found_lse_ptr + part, mask=mask, other=float("-inf"), cache_modifier=".cg")
            tile = found_ptr + part[:, None] * VALUE_DIM + dims[None, :]
            found = tl.load(tile, mask=mask[:, None] & (dims < VALUE_DIM)[None, :], other=0.0, cache_modifier=".cg")
            higher = tl.maximum(top, lse)
            fade, share = tl.exp2(top - higher), tl.exp2(lse - higher)
            out, weight, top = out * fade[:, None] + found * share[:, None], weight * fade + share, higher
    lse = tl.where(weight == 0, float("-inf"), top + tl.log2(weight))
    out = out / tl.where(weight == 0, 1.0, weight)[:, None]
    tl.store(lse_ptr + row, lse / LOG2E, mask=exist)
    out_mask = exist[:, None] & (dims < VALUE_DIM)[None, :]
    tl.store(out_ptr + row[:, None] * VALUE_DIM + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=out_mask)


_VARYING = ["sinks", "rank_places", "before", "most", "nominees", "page_places", "rank_splits", "first"]
_STRIDES = [f"{name}_stride_{axis}" for name in ("list", "found", "picked", "gone") for axis in "bh"]


@triton.jit(do_not_specialize=[*VARYING, *_VARYING, *_STRIDES])
def attend_nodes(
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
    nominee_ptr,
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
    most,
    sinks,
    places,
    rank_places,
    nominees,
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
    NOMINATED: tl.constexpr,
    SPLITS: tl.constexpr,
    BEFORE: tl.constexpr,
    LAST: tl.constexpr,
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
    """Writes ``found [before + splits, B, Hq, Dv]`` and ``found_lse`` behind the ``before`` parts that are there.

    First the values of a level's nodes that are not refined (see :func:`score_nodes` for ``count``, ``list`` and
    ``weight``), then, in the ``LAST`` launch, the keys of refined pages, in ``CHUNKS`` of ``BLOCK_W`` places; and the
    program of a row that is ready last merges all parts.

    Which nodes are refined say ``chosen [B, sets, most]``, ``page``, ``picked`` and ``gone``, see :func:`choose_nodes`;
    or (``FEW``) every program finds them out, ``FEW`` or fewer, and one writes it down: among all nodes or, if there
    are many, among those ``NOMINATED``, see :func:`nominate_nodes`.

    ``KEEPS``: and what masses take, ``token [B, Hq, places]``, the log-weights of the tokens of refined pages.
    """
    row, part, split = tl.program_id(0) // parts, tl.program_id(0) % parts, tl.program_id(1)
    batch, head = (row // num_kv_heads).to(tl.int64), (row % num_kv_heads).to(tl.int64)
    member = part * BLOCK_M + tl.arange(0, BLOCK_M)
    exist = member < group
    heads = head * group + tl.where(exist, member, 0)
    total_rows = batches * num_kv_heads * group
    rows = batch * num_kv_heads * group + heads
    lanes, value_dims = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_DV)
    count = tl.load(count_ptr + batch * count_stride_b + head * count_stride_h).to(tl.int32)
    if BRANCH:
        count = count * BRANCH
        list_ptr += batch * list_stride_b + head * list_stride_h
    chosen_ptr += batch * found_stride_b + head * found_stride_h
    page_ptr += batch * found_stride_b + head * found_stride_h
    gone_ptr += batch * gone_stride_b + head * gone_stride_h
    picked_ptr += batch * picked_stride_b + head * picked_stride_h
    writes = (split == 0) & (part == 0)

    if FEW:
        index = tl.arange(0, HELD)
        if NOMINATED:
            nominated = index < nominees
            nominee_ptr += row.to(tl.int64) * nominees * 3
            mass = tl.load(nominee_ptr + index, mask=nominated, other=float("-inf"))
            nominee_ptr = nominee_ptr.to(tl.pointer_type(tl.int32)) + nominees
            candidates = tl.load(nominee_ptr + index, mask=nominated, other=-1)
            numbers = tl.load(nominee_ptr + nominees + index, mask=nominated, other=-1)
        else:
            if PRIOR:
                recent_ptr += batch * recent_stride_b + head * recent_stride_h
            mass, numbers = masses(
                rank_ptr,
                rank_lse_ptr,
                found_lse_ptr,
                recent_ptr,
                recent_stride_h,
                recent_stride_n,
                list_ptr,
                index,
                count,
                (batch * num_kv_heads + head) * group,
                group,
                group,
                total_rows,
                rank_splits,
                before,
                rank_places,
                first,
                prior,
                BRANCH,
                PRIOR,
                False,
                GROUP,
                SPLITS,
                BEFORE,
            )
            candidates = index
        allowed = tl.minimum(tl.load(allowed_ptr + batch).to(tl.int32), most)
        _, few_places, few_pages, picked = first_few(mass, numbers, candidates, allowed, FEW, ROOM)
        if writes:
            few = tl.arange(0, ROOM)
            tl.store(chosen_ptr + few, few_places, mask=few < most)
            if BRANCH:
                tl.store(page_ptr + few, few_pages, mask=few < most)
            tl.store(picked_ptr, picked)
    else:
        picked = tl.load(picked_ptr)
        few_places, few_pages = picked, picked

    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    blocks, tiles = tl.cdiv(count, BLOCK_N), 0
    if LAST:
        PAGES: tl.constexpr = max(1, BLOCK_N // BLOCK_W)
        tiles = tl.cdiv(picked * CHUNKS, PAGES)
    each = tl.cdiv(blocks + tiles, splits)
    begin, end = split * each, tl.minimum((split + 1) * each, blocks + tiles)

    value_ptr += batch * value_stride_b + head * value_stride_h
    weight_ptr += rows[:, None] * places
    next_place = begin * BLOCK_N + lanes  # what is not fed to matrix units is read one block ahead by hand
    next_logits = tl.load(
        weight_ptr + next_place[None, :], mask=exist[:, None] & (next_place < count)[None, :], other=0.0
    )
    next_gone = tl.load(gone_ptr + next_place, mask=next_place < count, other=1) if not FEW else next_place
    next_node = tl.load(list_ptr + next_place // BRANCH, mask=next_place < count, other=0) if BRANCH else next_place
    for block in tl.range(begin, tl.minimum(end, blocks)):
        place, logits, gone = block * BLOCK_N + lanes, next_logits, next_gone
        next_place = place + BLOCK_N
        ahead = next_place < count
        next_logits = tl.load(weight_ptr + next_place[None, :], mask=exist[:, None] & ahead[None, :], other=0.0)
        node, there = place, place < count
        if BRANCH:
            node = next_node.to(tl.int32) * BRANCH + place % BRANCH
            next_node = tl.load(list_ptr + next_place // BRANCH, mask=ahead, other=0)
        v_mask = there[:, None]
        if BLOCK_DV > VALUE_DIM:
            v_mask = v_mask & (value_dims < VALUE_DIM)[None, :]
        v_tile = (node.to(tl.int64) * value_stride_n)[:, None] + value_dims[None, :] * value_stride_d
        v = tl.load(value_ptr + v_tile, mask=v_mask, other=0.0)
        if FEW:
            stays = there & (tl.sum((place[:, None] == few_places[None, :]).to(tl.int32), 1) == 0)
            if KEEPS:
                tl.store(gone_ptr + place, 1 - stays.to(tl.int8), mask=there & (part == 0))
        else:
            stays = there & (gone == 0)
            next_gone = tl.load(gone_ptr + next_place, mask=ahead, other=1)
        logits = tl.where(exist[:, None] & stays[None, :], logits, float("-inf"))
        top, weight, out = online(logits, v, top, weight, out)

    if LAST:
        dims, token = tl.arange(0, BLOCK_D), tl.arange(0, PAGES * BLOCK_W)
        q_tile = batch * q_stride_b + heads[:, None] * q_stride_h + dims[None, :] * q_stride_d
        q = tl.load(q_ptr + q_tile, mask=exist[:, None] & (dims < DIM)[None, :], other=0.0)
        k_ptr += batch * k_stride_b + head * k_stride_h
        v_ptr += batch * v_stride_b + head * v_stride_h
        if not WIDTH:
            end_ptr += batch * end_stride_b + head * end_stride_h
        next_place = (tl.maximum(begin - blocks, 0) * PAGES + token // BLOCK_W) // CHUNKS
        next_page = _listed(next_place, picked, few_pages, page_ptr, FEW, ROOM)
        for tile in tl.range(tl.maximum(begin - blocks, 0), end - blocks):
            piece, page = tile * PAGES + token // BLOCK_W, next_page
            place, inside = piece // CHUNKS, piece % CHUNKS * BLOCK_W + token % BLOCK_W
            next_place = (piece + PAGES) // CHUNKS
            next_page = _listed(next_place, picked, few_pages, page_ptr, FEW, ROOM)
            start, width = _span(page, place < picked, end_ptr, end_stride_n, sinks, WIDTH)
            stored = inside < width
            slot = (start + inside).to(tl.int64)
            k_mask, v_mask = stored[:, None], stored[:, None]
            if BLOCK_D > DIM:
                k_mask = k_mask & (dims < DIM)[None, :]
            if BLOCK_DV > VALUE_DIM:
                v_mask = v_mask & (value_dims < VALUE_DIM)[None, :]
            k = tl.load(k_ptr + (slot * k_stride_l)[:, None] + dims[None, :] * k_stride_d, mask=k_mask, other=0.0)
            v_tile = (slot * v_stride_l)[:, None] + value_dims[None, :] * v_stride_d
            v = tl.load(v_ptr + v_tile, mask=v_mask, other=0.0)
            logits = tl.dot(q, tl.trans(k), input_precision="ieee") * (scaling * LOG2E)
            logits = tl.where(stored[None, :], logits, float("-inf"))
            if PRESERVE:
                mine = tile * PAGES + tl.arange(0, PAGES)
                parent = _listed(mine, picked, few_places, chosen_ptr, FEW, ROOM)
                known = exist[:, None] & (mine < picked)[None, :]
                logits = shared_out(logits, tl.load(weight_ptr + parent[None, :], mask=known, other=0.0), PAGES)
            if KEEPS:
                kept = (place < picked) & (inside < page_places)
                at = rows[:, None] * places + (place * page_places + inside)[None, :]
                tl.store(token_ptr + at, logits, mask=exist[:, None] & kept[None, :])
            top, weight, out = online(logits, v, top, weight, out)

    out = out / tl.where(weight == 0, 1.0, weight)[:, None]
    lse = tl.where(weight == 0, float("-inf"), top + tl.log2(weight))
    found = (before + split).to(tl.int64) * total_rows + rows
    out_mask = exist[:, None] & (value_dims < VALUE_DIM)[None, :]
    tl.store(found_ptr + found[:, None] * VALUE_DIM + value_dims[None, :], out, mask=out_mask)
    tl.store(found_lse_ptr + found, lse, mask=exist)

    if LAST:
        if writes:
            tokens = tl.zeros([PAGES * BLOCK_W], tl.int32)
            for chunk in tl.range(0, picked, PAGES * BLOCK_W):
                place = chunk + token
                page = _listed(place, picked, few_pages, page_ptr, FEW, ROOM)
                tokens += _span(page, place < picked, end_ptr, end_stride_n, sinks, WIDTH)[1]
            tl.store(read_ptr + row, tl.load(read_ptr + row) + tl.sum(tokens, 0))
            tl.store(refined_ptr + row, picked.to(tl.float32))
        tl.debug_barrier()  # all of this program is written before it counts as ready
        ready = tl.atomic_add(arrived_ptr + tl.program_id(0), 1, sem="acq_rel")
        if ready == splits - 1:
            _merge(
                found_ptr,
                found_lse_ptr,
                out_ptr,
                lse_ptr,
                (batch * num_kv_heads + head) * group + part * BLOCK_M,
                total_rows,
                tl.minimum(group - part * BLOCK_M, BLOCK_M),
                before + splits,
                MEMBERS,
                AT_ONCE,
                VALUE_DIM,
                BLOCK_DV,
            )


@triton.jit(
    do_not_specialize=["batches", "num_kv_heads", "places", "nodes", "tokens", "page_places", "last", *_STRIDES[4:]]
)
def pool_masses(
    weight_ptr,
    lse_ptr,
    gone_ptr,
    picked_ptr,
    count_ptr,
    slots_ptr,
    mass_ptr,
    gone_stride_b,
    gone_stride_h,
    picked_stride_b,
    picked_stride_h,
    count_stride_b,
    count_stride_h,
    batches,
    num_kv_heads,
    group,
    sinks,
    places,
    nodes,
    tokens,
    page_places,
    last,
    BRANCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes ``mass [B, Hkv, places]``, summed over the group, of the log-weights ``weight [B, Hq, places]``, to the
    base 2, and ``lse [B, Hq]``. ``nodes`` come first, those that are ``gone`` among them, from ``last`` on the
    ``count`` (see :func:`score_nodes`) of the last level; then sinks and tail, and from ``tokens`` on the tokens of
    refined pages, ``page_places`` for each."""
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // num_kv_heads, row % num_kv_heads
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length, start = tl.load(slots_ptr + batch), tl.load(slots_ptr + batches + batch)
    number = length - start + tl.where(start > 0, sinks, 0)
    picked = tl.load(picked_ptr + batch * picked_stride_b + head * picked_stride_h)
    gone_ptr += batch * gone_stride_b + head * gone_stride_h
    count = tl.load(count_ptr + batch * count_stride_b + head * count_stride_h).to(tl.int32)
    if BRANCH:
        count = count * BRANCH
    known = place < tl.minimum(nodes, last + count)
    stays = known & (tl.load(gone_ptr + place, mask=known, other=1) == 0)
    stays = stays | ((place >= nodes) & (place < nodes + number) & (place < tokens))
    stays = stays | ((place >= tokens) & (place < tokens + picked * page_places) & (place < places))
    mass = tl.zeros([BLOCK], tl.float32)
    for member in tl.range(0, group):
        of_head = row * group + member
        lse = tl.load(lse_ptr + of_head) * LOG2E
        mass += tl.exp2(tl.load(weight_ptr + of_head * places + place, mask=stays, other=float("-inf")) - lse)
    tl.store(mass_ptr + row * places + place, mass, mask=place < places)
