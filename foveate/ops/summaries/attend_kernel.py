"""Attention over what is left of a cover, and its exact merge: Triton kernels of :func:`attend_summaries`."""

import triton
import triton.language as tl

from foveate.ops._softcap_kernel import capped
from foveate.ops.summaries.score_kernel import LOG2E, LOWEST, VARYING, log_sums, online, shared_out, write_part


@triton.jit
def listed(place, number, few, order, ptr, FEW: tl.constexpr):
    """Entries of a list of ``number`` at some places: of ``few [ROOM]``, whose ``order`` says where each is, or in
    memory."""
    if FEW:
        return tl.sum(tl.where(place[:, None] == order[None, :], few[None, :], 0), 1)
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
def refined_tokens(
    q_ptr,
    k_ptr,
    v_ptr,
    end_ptr,
    weight_ptr,
    token_ptr,
    place_ptr,
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
    begin,
    end,
    picked,
    places,
    page_places,
    sinks,
    scaling,
    top,
    weight,
    out,
    keeps,
    FEW: tl.constexpr,
    WIDTH: tl.constexpr,
    PRESERVE: tl.constexpr,
    KEEPS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """An online softmax, with tiles ``begin`` to ``end`` of the keys of ``picked`` pages; a page has ``CHUNKS`` of
    ``BLOCK_W`` places. ``KEEPS``: log-weights are stored, by programs that are to: 1, of all tokens; 2, of chunks.
    Pointers are those of a row and KV head, but for ``weight`` and ``token``."""
    PAGES: tl.constexpr = max(1, BLOCK_N // BLOCK_W)
    dims, token, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, PAGES * BLOCK_W), tl.arange(0, out.shape[1])
    q_tile = heads[:, None] * q_stride_h + dims[None, :] * q_stride_d
    q = tl.load(q_ptr + q_tile, mask=exist[:, None] & (dims < DIM)[None, :], other=0.0)
    if not FEW:  # read one tile ahead, so that reading keys ahead is left to the compiler
        next_page = listed((begin * PAGES + token // BLOCK_W) // CHUNKS, picked, few_pages, order, page_ptr, FEW)
    for tile in tl.range(begin, end):
        piece = tile * PAGES + token // BLOCK_W
        place, inside = piece // CHUNKS, piece % CHUNKS * BLOCK_W + token % BLOCK_W
        if FEW:
            page = listed(place, picked, few_pages, order, page_ptr, FEW)
        else:
            page = next_page
            next_page = listed((piece + PAGES) // CHUNKS, picked, few_pages, order, page_ptr, FEW)
        start, width = _span(page, place < picked, end_ptr, end_stride_n, sinks, WIDTH)
        stored = inside < width
        slot = (start + inside).to(tl.int64)
        k_mask, v_mask = stored[:, None], stored[:, None]
        if BLOCK_D > DIM:
            k_mask = k_mask & (dims < DIM)[None, :]
        if out.shape[1] > VALUE_DIM:
            v_mask = v_mask & (value_dims < VALUE_DIM)[None, :]
        k = tl.load(k_ptr + (slot * k_stride_l)[:, None] + dims[None, :] * k_stride_d, mask=k_mask, other=0.0)
        v_tile = (slot * v_stride_l)[:, None] + value_dims[None, :] * v_stride_d
        v = tl.load(v_ptr + v_tile, mask=v_mask, other=0.0)
        logits = capped(tl.dot(q, tl.trans(k), input_precision="ieee") * (scaling * LOG2E), SOFTCAP)
        logits = tl.where(stored[None, :], logits, float("-inf"))
        if PRESERVE:
            mine = tile * PAGES + tl.arange(0, PAGES)
            parent = listed(mine, picked, few_places, order, place_ptr, FEW)
            of_parent = weight_ptr + rows[:, None] * places + parent[None, :]
            known = exist[:, None] & (mine < picked)[None, :]
            logits = shared_out(logits, tl.load(of_parent, mask=known, other=0.0), PAGES)
        if KEEPS == 1:
            kept = (place < picked) & (inside < page_places) & keeps
            at = rows[:, None] * places + (place * page_places + inside)[None, :]
            tl.store(token_ptr + at, logits, mask=exist[:, None] & kept[None, :])
        elif KEEPS:
            of_chunk = tile * PAGES + tl.arange(0, PAGES)
            total = log_sums(tl.reshape(logits, [logits.shape[0], PAGES, BLOCK_W]))
            kept = exist[:, None] & ((of_chunk < picked * CHUNKS) & keeps)[None, :]
            tl.store(token_ptr + rows[:, None] * places + of_chunk[None, :], total, mask=kept)
        top, weight, out = online(logits, v, top, weight, out)
    return top, weight, out


@triton.jit
def merged(
    found_ptr,
    found_lse_ptr,
    row,
    exist,
    rows,
    begin,
    end,
    left_out,
    top,
    weight,
    out,
    AT_ONCE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Adds parts ``begin`` to ``end`` of ``found [.., rows, Dv]`` without those that are ``left_out [ROOM]``, always in
    one order, to an online softmax ``top``, ``weight`` and ``out [M, Dv]`` of each ``row [M]``.

    They may have been written by other programs of this launch: they must not be looked for in the first cache.
    """
    dims, turn = tl.arange(0, out.shape[1]), tl.arange(0, AT_ONCE)
    for first in tl.range(begin, end, AT_ONCE):
        part = first + turn
        counts = (part < end) & (tl.sum((part[:, None] == left_out[None, :]).to(tl.int32), 1) == 0)
        at, mask = part.to(tl.int64)[:, None] * rows + row[None, :], counts[:, None] & exist[None, :]
        lse = tl.load(found_lse_ptr + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
        tile = found_ptr + at[:, :, None] * VALUE_DIM + dims[None, None, :]
        there = mask[:, :, None] & (dims < VALUE_DIM)[None, None, :]
        found = tl.load(tile, mask=there, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(top, tl.max(lse, 0))
        fade, share = tl.exp2(top - higher), tl.exp2(lse - higher[None, :])
        out = out * fade[:, None] + tl.sum(found * share[:, :, None], 0)
        weight, top = weight * fade + tl.sum(share, 0), higher
    return top, weight, out


@triton.jit
def finish(
    found_ptr,
    found_lse_ptr,
    arrived_ptr,
    out_ptr,
    lse_ptr,
    row,
    exist,
    rows,
    begin,
    end,
    splits,
    AT_ONCE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Merges parts ``begin`` to ``end`` of some heads, once all ``splits`` programs have written theirs."""
    tl.debug_barrier()  # all of this program is written before it counts as ready
    ready = tl.atomic_add(arrived_ptr + tl.program_id(0), 1, sem="acq_rel")
    if ready == splits - 1:
        none = tl.full([1], -1, tl.int32)
        top, weight = tl.full(row.shape, LOWEST, tl.float32), tl.zeros(row.shape, tl.float32)
        out = tl.zeros([row.shape[0], BLOCK_DV], tl.float32)
        top, weight, out = merged(
            found_ptr, found_lse_ptr, row, exist, rows, begin, end, none, top, weight, out, AT_ONCE, VALUE_DIM
        )
        write_part(out_ptr, lse_ptr, row, exist, top, weight, out, VALUE_DIM, NATURAL=True)


@triton.jit
def count_refined(
    read_ptr,
    refined_ptr,
    end_ptr,
    end_stride_n,
    page_ptr,
    few_pages,
    order,
    picked,
    sinks,
    FEW: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds the tokens of refined pages to what was read of a row and KV head, and writes how many pages they are."""
    if WIDTH:
        tokens = picked * WIDTH
    else:
        of_pages = tl.zeros([BLOCK], tl.int32)
        for chunk in tl.range(0, picked, BLOCK):
            place = chunk + tl.arange(0, BLOCK)
            page = listed(place, picked, few_pages, order, page_ptr, FEW)
            of_pages += _span(page, place < picked, end_ptr, end_stride_n, sinks, WIDTH)[1]
        tokens = tl.sum(of_pages, 0)
    tl.store(read_ptr, tl.load(read_ptr) + tokens)
    tl.store(refined_ptr, picked.to(tl.float32))


_VARYING = ["sinks", "before", "page_places"]
_STRIDES = [f"{name}_stride_{axis}" for name in ("list", "found", "picked", "gone") for axis in "bh"]


@triton.jit(do_not_specialize=[*VARYING, *_VARYING, *_STRIDES])
def attend_nodes(
    q_ptr,
    k_ptr,
    v_ptr,
    value_ptr,
    count_ptr,
    list_ptr,
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
    before,
    sinks,
    places,
    page_places,
    scaling,
    WIDTH: tl.constexpr,
    BRANCH: tl.constexpr,
    LAST: tl.constexpr,
    PRESERVE: tl.constexpr,
    KEEPS: tl.constexpr,
    SOFTCAP: tl.constexpr,
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
    program of a row that is ready last merges all parts. Which nodes are refined say ``chosen [B, sets, most]``,
    ``page``, ``picked`` and ``gone``, see :func:`select_nodes`.

    ``KEEPS``: and what masses take, ``token [B, Hq, places]``, see :func:`refined_tokens`.
    """
    row, part, split = tl.program_id(0) // parts, tl.program_id(0) % parts, tl.program_id(1)
    batch, head = (row // num_kv_heads).to(tl.int64), (row % num_kv_heads).to(tl.int64)
    member = part * BLOCK_M + tl.arange(0, BLOCK_M)
    exist = member < group
    heads = head * group + tl.where(exist, member, 0)
    all_rows = batches * num_kv_heads * group
    rows = batch * num_kv_heads * group + heads
    lanes, value_dims = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_DV)
    count = tl.load(count_ptr + batch * count_stride_b + head * count_stride_h).to(tl.int32)
    picked = tl.load(picked_ptr + batch * picked_stride_b + head * picked_stride_h)
    if BRANCH:
        count = count * BRANCH
        list_ptr += batch * list_stride_b + head * list_stride_h
    chosen_ptr += batch * found_stride_b + head * found_stride_h
    page_ptr += batch * found_stride_b + head * found_stride_h
    gone_ptr += batch * gone_stride_b + head * gone_stride_h

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
    logit_ptr = weight_ptr + rows[:, None] * (places // 16 * 16)  # which it is a multiple of
    padded = tl.cdiv(count, 16) * 16  # masks that change within 16 bytes would have each number read by itself
    for block in tl.range(begin, tl.minimum(end, blocks)):
        place = block * BLOCK_N + lanes
        node, there = place, place < count
        logits = tl.load(logit_ptr + place[None, :], mask=exist[:, None] & (place < padded)[None, :], other=0.0)
        gone = tl.load(gone_ptr + place, mask=place < padded, other=1)
        if BRANCH:
            node = tl.load(list_ptr + place // BRANCH, mask=there, other=0).to(tl.int32) * BRANCH + place % BRANCH
        v_mask = there[:, None]
        if BLOCK_DV > VALUE_DIM:
            v_mask = v_mask & (value_dims < VALUE_DIM)[None, :]
        v_tile = (node.to(tl.int64) * value_stride_n)[:, None] + value_dims[None, :] * value_stride_d
        v = tl.load(value_ptr + v_tile, mask=v_mask, other=0.0)
        logits = tl.where((there & (gone == 0))[None, :], logits, float("-inf"))
        top, weight, out = online(logits, v, top, weight, out)

    if LAST:
        if not WIDTH:
            end_ptr += batch * end_stride_b + head * end_stride_h
        none = tl.full([1], -1, tl.int32)
        top, weight, out = refined_tokens(
            q_ptr + batch * q_stride_b,
            k_ptr + batch * k_stride_b + head * k_stride_h,
            v_ptr + batch * v_stride_b + head * v_stride_h,
            end_ptr,
            weight_ptr,
            token_ptr,
            chosen_ptr,
            page_ptr,
            none,
            none,
            none,
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
            tl.maximum(begin - blocks, 0),
            end - blocks,
            picked,
            places,
            page_places,
            sinks,
            scaling,
            top,
            weight,
            out,
            True,
            False,
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

    found = (before + split).to(tl.int64) * all_rows + rows
    write_part(found_ptr, found_lse_ptr, found, exist, top, weight, out, VALUE_DIM)
    if LAST:
        if (split == 0) & (part == 0):
            count_refined(
                read_ptr + row,
                refined_ptr + row,
                end_ptr,
                end_stride_n,
                page_ptr,
                none,
                none,
                picked,
                sinks,
                False,
                WIDTH,
                PAGES * BLOCK_W,
            )
        finish(
            found_ptr,
            found_lse_ptr,
            arrived_ptr,
            out_ptr,
            lse_ptr,
            rows,
            exist,
            all_rows,
            0,
            before + splits,
            splits,
            AT_ONCE,
            VALUE_DIM,
            BLOCK_DV,
        )
