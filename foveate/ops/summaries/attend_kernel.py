"""Triton kernel of :func:`attend_summaries`: attends to the nodes that are not refined, and to refined pages.

Names as in ``score_kernel``.
"""

import triton
import triton.language as tl

from foveate.ops.gpu.softcap import capped
from foveate.ops.gpu.softmax import LOG2E, LOWEST, log_sums, merge, online, store_part
from foveate.ops.summaries.score_kernel import VARYING, node_at, visited


@triton.jit
def _finish(
    part_out_ptr, part_lse_ptr, arrived_ptr, out_ptr, lse_ptr,
    q_heads, exist, num_q_heads, parts, splits,
    AT_ONCE: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Merges the ``parts`` of query heads ``q_heads [M]``, in the last of the ``splits`` programs that arrive.

    The parts are merged in ascending order, ``AT_ONCE`` at a time, whichever program is last, so that repeats are equal
    bit for bit. The result goes to ``out [B, Hq, 1, Dv]`` and ``lse [B, Hq, 1]``, natural.

    Shapes: M = heads, P = AT_ONCE parts, DV = BLOCK_DV dimensions of values.
    """
    # 1. Count the program as arrived; the last one goes on.
    tl.debug_barrier()  # all threads have written before the program counts as ready
    ready = tl.atomic_add(arrived_ptr + tl.program_id(0), 1, sem="acq_rel")
    if ready == splits - 1:
        # 2. Start the running softmax.
        top, weight = tl.full(q_heads.shape, LOWEST, tl.float32), tl.zeros(q_heads.shape, tl.float32)  # [M], [M]
        out = tl.zeros([q_heads.shape[0], BLOCK_DV], tl.float32)  # [M, DV]
        dims, turn = tl.arange(0, BLOCK_DV), tl.arange(0, AT_ONCE)  # [DV], [P]
        # 3. Merge the parts.
        for first in tl.range(0, parts, AT_ONCE):
            part = first + turn  # [P]
            at = part.to(tl.int64)[:, None] * num_q_heads + q_heads[None, :]  # [P, M]
            mask = (part < parts)[:, None] & exist[None, :]  # [P, M]
            # The loads bypass the L1 cache, since other programs of this launch have written some of the parts.
            # [P, M]
            lse = tl.load(part_lse_ptr + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
            tile = part_out_ptr + at[:, :, None] * VALUE_DIM + dims[None, None, :]  # [P, M, DV]
            there = mask[:, :, None] & (dims < VALUE_DIM)[None, None, :]  # [P, M, DV]
            outs = tl.load(tile, mask=there, other=0.0, cache_modifier=".cg")  # [P, M, DV]
            top, weight, out = merge(outs, lse, top, weight, out)  # [M], [M], [M, DV]
        # 4. Normalise and store.
        store_part(out_ptr, lse_ptr, q_heads, exist, top, weight, out, VALUE_DIM, NATURAL=True)


@triton.jit(do_not_specialize=[*VARYING, "sinks", "before", "most", "gone_places"])
def attend_nodes(
    q_ptr, k_ptr, v_ptr, value_ptr, count_ptr, list_ptr, page_ptr, picked_ptr, gone_ptr, weight_ptr, token_ptr,
    part_out_ptr, part_lse_ptr, arrived_ptr, out_ptr, lse_ptr, read_ptr, refined_ptr,
    q_strides, k_strides, v_strides, value_strides,
    num_kv_heads, places, list_places, gone_places, most, before, sinks, scaling,
    WIDTH: tl.constexpr, BRANCH: tl.constexpr, LAST: tl.constexpr, GROUP: tl.constexpr, SOFTCAP: tl.constexpr,
    AT_ONCE: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attends to one level's visited nodes that are not refined and, in the ``LAST`` launch, to the keys of refined
    pages.

    A program owns up to ``BLOCK_M`` query heads of a KV head in a row, and one split of these nodes and pages. It reads
    the log-weights and values of its nodes once, in ascending order, and then the keys and values of its refined pages,
    with an online softmax in fp32. It writes one of the ``splits`` parts that this launch adds to
    ``part_out [before + splits, B, Hq, Dv]`` and ``part_lse``, to the base 2, after the ``before`` parts of earlier
    launches. In the ``LAST`` launch, the program of a row that finishes last merges all parts into ``out`` and ``lse``,
    ``AT_ONCE`` at a time.

    ``count``, ``list`` and ``weight`` are as in :func:`score_nodes`. ``page [B, Hkv, most]``, ``picked`` and
    ``gone [B, Hkv, gone_places]`` are the selection, see :class:`Selection`; a page has ``WIDTH`` tokens.

    Refined pages are read in tiles of ``BLOCK_N`` tokens: one or more chunks of ``BLOCK_W`` tokens, where a page has
    ``CHUNKS`` chunks. The log-weight of each chunk is stored in ``token [B, Hq, places]``, unless that is None.

    Shapes: M = BLOCK_M heads, N = BLOCK_N nodes or keys, D = BLOCK_D dimensions of keys, DV = BLOCK_DV dimensions of
    values, P = PAGES, the chunks of a tile.
    """
    # 1. Unpack the constants and strides, and find the heads and the split that the program owns.
    BLOCK_D: tl.constexpr = max(16, triton.next_power_of_2(DIM))
    BLOCK_DV: tl.constexpr = max(16, triton.next_power_of_2(VALUE_DIM))
    HEAD_TILES: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    BLOCK_W: tl.constexpr = min(BLOCK_N, triton.next_power_of_2(WIDTH))
    CHUNKS: tl.constexpr = (WIDTH + BLOCK_W - 1) // BLOCK_W
    PAGES: tl.constexpr = BLOCK_N // BLOCK_W
    q_stride_b, q_stride_h, q_stride_d = q_strides
    k_stride_b, k_stride_h, k_stride_l, k_stride_d = k_strides
    v_stride_b, v_stride_h, v_stride_l, v_stride_d = v_strides
    value_stride_b, value_stride_h, value_stride_n, value_stride_d = value_strides
    row, head_tile, split = tl.program_id(0) // HEAD_TILES, tl.program_id(0) % HEAD_TILES, tl.program_id(1)
    num_q_heads, splits = tl.num_programs(0) // HEAD_TILES * GROUP, tl.num_programs(1)
    batch, head = (row // num_kv_heads).to(tl.int64), (row % num_kv_heads).to(tl.int64)
    member = head_tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]
    exist = member < GROUP  # [M]
    heads = head * GROUP + tl.where(exist, member, 0)  # [M]
    q_heads = batch * num_kv_heads * GROUP + heads  # [M]
    lanes, value_dims = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_DV)  # [N], [DV]
    count, picked = visited(count_ptr, row, num_kv_heads, BRANCH), tl.load(picked_ptr + row)
    if BRANCH:
        list_ptr += row.to(tl.int64) * list_places
    gone_ptr += row.to(tl.int64) * gone_places

    # 2. Start the online softmax, and divide blocks of nodes and tiles of refined pages among the splits.
    top = tl.full([BLOCK_M], LOWEST, tl.float32)  # [M]
    weight = tl.zeros([BLOCK_M], tl.float32)  # [M]
    out = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)  # [M, DV]
    blocks = tl.cdiv(count, BLOCK_N)
    tiles = tl.cdiv(picked * CHUNKS, PAGES) if LAST else 0
    each = tl.cdiv(blocks + tiles, splits)
    begin, end = split * each, tl.minimum((split + 1) * each, blocks + tiles)

    # 3. Attend to the nodes that are not refined.
    value_ptr += batch * value_stride_b + head * value_stride_h
    logit_ptr = weight_ptr + q_heads[:, None] * (places // 16 * 16)  # [M, 1]; a multiple of 16, for the compiler
    padded = tl.cdiv(count, 16) * 16  # loads are vectorised only where a mask is constant over 16 bytes
    for block in tl.range(begin, tl.minimum(end, blocks)):
        place = block * BLOCK_N + lanes  # [N]
        there = place < count  # [N]
        # [M, N]
        logits = tl.load(logit_ptr + place[None, :], mask=exist[:, None] & (place < padded)[None, :], other=0.0)
        gone = tl.load(gone_ptr + place, mask=place < padded, other=1)  # [N]
        node = node_at(place, there, list_ptr, BRANCH)  # [N]
        v_mask = there[:, None]  # [N, 1]
        if BLOCK_DV > VALUE_DIM:
            v_mask = v_mask & (value_dims < VALUE_DIM)[None, :]  # [N, DV]
        v_tile = (node.to(tl.int64) * value_stride_n)[:, None] + value_dims[None, :] * value_stride_d  # [N, DV]
        v = tl.load(value_ptr + v_tile, mask=v_mask, other=0.0)  # [N, DV]
        logits = tl.where((there & (gone == 0))[None, :], logits, float("-inf"))  # [M, N]
        top, weight, out = online(logits, v, top, weight, out)  # [M], [M], [M, DV]

    # 4. Attend to the keys of refined pages.
    if LAST:
        k_ptr += batch * k_stride_b + head * k_stride_h
        v_ptr += batch * v_stride_b + head * v_stride_h
        page_ptr += row.to(tl.int64) * most
        dims = tl.arange(0, BLOCK_D)  # [D]
        q_tile = batch * q_stride_b + heads[:, None] * q_stride_h + dims[None, :] * q_stride_d  # [M, D]
        q = tl.load(q_ptr + q_tile, mask=exist[:, None] & (dims < DIM)[None, :], other=0.0)  # [M, D]
        first = tl.maximum(begin - blocks, 0)
        next_turn = (first * PAGES + lanes // BLOCK_W) // CHUNKS  # [N]
        # loaded one tile ahead, so that the compiler can pipeline the loads of keys
        next_page = tl.load(page_ptr + next_turn, mask=next_turn < picked, other=0).to(tl.int32)  # [N]
        for tile in tl.range(first, end - blocks):
            chunk = tile * PAGES + lanes // BLOCK_W  # [N]
            inside = chunk % CHUNKS * BLOCK_W + lanes % BLOCK_W  # [N]
            page, next_turn = next_page, (chunk + PAGES) // CHUNKS  # [N], [N]
            next_page = tl.load(page_ptr + next_turn, mask=next_turn < picked, other=0).to(tl.int32)  # [N]
            stored = (chunk // CHUNKS < picked) & (inside < WIDTH)  # [N]
            slot = (sinks + page * WIDTH + inside).to(tl.int64)  # [N]
            k_mask, v_mask = stored[:, None], stored[:, None]  # [N, 1], [N, 1]
            if BLOCK_D > DIM:
                k_mask = k_mask & (dims < DIM)[None, :]  # [N, D]
            if BLOCK_DV > VALUE_DIM:
                v_mask = v_mask & (value_dims < VALUE_DIM)[None, :]  # [N, DV]
            # [N, D]
            k = tl.load(k_ptr + (slot * k_stride_l)[:, None] + dims[None, :] * k_stride_d, mask=k_mask, other=0.0)
            v_tile = (slot * v_stride_l)[:, None] + value_dims[None, :] * v_stride_d  # [N, DV]
            v = tl.load(v_ptr + v_tile, mask=v_mask, other=0.0)  # [N, DV]
            logits = capped(tl.dot(q, tl.trans(k), input_precision="ieee") * (scaling * LOG2E), SOFTCAP)  # [M, N]
            logits = tl.where(stored[None, :], logits, float("-inf"))  # [M, N]
            if token_ptr is not None:
                of_chunk = tile * PAGES + tl.arange(0, PAGES)  # [P]
                total = log_sums(tl.reshape(logits, [BLOCK_M, PAGES, BLOCK_W]))  # [M, P]
                kept = exist[:, None] & (of_chunk < picked * CHUNKS)[None, :]  # [M, P]
                tl.store(token_ptr + q_heads[:, None] * places + of_chunk[None, :], total, mask=kept)
            top, weight, out = online(logits, v, top, weight, out)  # [M], [M], [M, DV]

    # 5. Store the part; in the last launch, also the numbers of keys read and of pages refined, and merge.
    part = (before + split).to(tl.int64) * num_q_heads + q_heads  # [M]
    store_part(part_out_ptr, part_lse_ptr, part, exist, top, weight, out, VALUE_DIM)
    if LAST:
        if (split == 0) & (head_tile == 0):
            tl.store(read_ptr + row, tl.load(read_ptr + row) + picked * WIDTH)
            tl.store(refined_ptr + row, picked.to(tl.float32))
        _finish(
            part_out_ptr, part_lse_ptr, arrived_ptr, out_ptr, lse_ptr, q_heads, exist, num_q_heads, before + splits,
            splits, AT_ONCE, VALUE_DIM, BLOCK_DV,
        )  # fmt: skip
