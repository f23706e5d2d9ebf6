"""Triton kernel of :func:`attend_summaries`: attends to the nodes that are not refined and to refined pages.

Names as in ``score_kernel``; ``chosen_stride`` are the strides of ``chosen`` and ``page``.
"""

import triton
import triton.language as tl

from foveate.ops.gpu.softmax import LOWEST, online, store_part
from foveate.ops.summaries.pages_kernel import refined_tokens
from foveate.ops.summaries.parts_kernel import finish
from foveate.ops.summaries.score_kernel import VARYING

_VARYING = ["sinks", "before"]
_STRIDES = [f"{name}_stride_{axis}" for name in ("list", "chosen", "picked", "gone") for axis in "bh"]


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
    weight_ptr,
    token_ptr,
    part_out_ptr,
    part_lse_ptr,
    arrived_ptr,
    out_ptr,
    lse_ptr,
    read_ptr,
    refined_ptr,
    q_strides,
    k_strides,
    v_strides,
    value_strides,
    count_strides,
    list_stride_b,
    list_stride_h,
    chosen_stride_b,
    chosen_stride_h,
    picked_stride_b,
    picked_stride_h,
    gone_stride_b,
    gone_stride_h,
    batches,
    num_kv_heads,
    group,
    head_tiles,
    splits,
    before,
    places,
    sinks,
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
    """Write ``splits`` parts ``part_out [before + splits, B, Hq, Dv]`` and ``part_lse``, after the ``before`` parts of
    earlier launches.

    The parts are attention to a level's visited nodes that are not refined (``count``, ``list`` and ``weight`` as in
    :func:`score_nodes`) and, in the ``LAST`` launch, to the keys of refined pages (:func:`refined_tokens`); there the
    program of a row that finishes last merges all parts into ``out`` and ``lse``. ``chosen [B, sets, most]``, ``page``,
    ``picked`` and ``gone`` are the selection, see :class:`Selection`.

    ``KEEPS``: log-weights of refined pages are stored in ``token [B, Hq, places]``, see :func:`refined_tokens`.
    """
    q_stride_b, q_stride_h, q_stride_d = q_strides
    k_stride_b, k_stride_h, k_stride_l, k_stride_d = k_strides
    v_stride_b, v_stride_h, v_stride_l, v_stride_d = v_strides
    value_stride_b, value_stride_h, value_stride_n, value_stride_d = value_strides
    count_stride_b, count_stride_h = count_strides
    row, head_tile, split = tl.program_id(0) // head_tiles, tl.program_id(0) % head_tiles, tl.program_id(1)
    batch, head = (row // num_kv_heads).to(tl.int64), (row % num_kv_heads).to(tl.int64)
    member = head_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    exist = member < group
    heads = head * group + tl.where(exist, member, 0)
    num_q_heads = batches * num_kv_heads * group
    q_heads = batch * num_kv_heads * group + heads
    lanes, value_dims = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_DV)
    count = tl.load(count_ptr + batch * count_stride_b + head * count_stride_h).to(tl.int32)
    picked = tl.load(picked_ptr + batch * picked_stride_b + head * picked_stride_h)
    if BRANCH:
        count = count * BRANCH
        list_ptr += batch * list_stride_b + head * list_stride_h
    chosen_ptr += batch * chosen_stride_b + head * chosen_stride_h
    page_ptr += batch * chosen_stride_b + head * chosen_stride_h
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
    logit_ptr = weight_ptr + q_heads[:, None] * (places // 16 * 16)  # a multiple of 16, for the compiler
    padded = tl.cdiv(count, 16) * 16  # loads are vectorised only where a mask is constant over 16 bytes
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
        top, weight, out = refined_tokens(
            q_ptr + batch * q_stride_b,
            k_ptr + batch * k_stride_b + head * k_stride_h,
            v_ptr + batch * v_stride_b + head * v_stride_h,
            weight_ptr,
            token_ptr,
            chosen_ptr,
            page_ptr,
            q_stride_h,
            q_stride_d,
            k_stride_l,
            k_stride_d,
            v_stride_l,
            v_stride_d,
            heads,
            q_heads,
            exist,
            tl.maximum(begin - blocks, 0),
            end - blocks,
            picked,
            places,
            sinks,
            scaling,
            top,
            weight,
            out,
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

    part = (before + split).to(tl.int64) * num_q_heads + q_heads
    store_part(part_out_ptr, part_lse_ptr, part, exist, top, weight, out, VALUE_DIM)
    if LAST:
        if (split == 0) & (head_tile == 0):
            tl.store(read_ptr + row, tl.load(read_ptr + row) + picked * WIDTH)
            tl.store(refined_ptr + row, picked.to(tl.float32))
        finish(
            part_out_ptr,
            part_lse_ptr,
            arrived_ptr,
            out_ptr,
            lse_ptr,
            q_heads,
            exist,
            num_q_heads,
            before + splits,
            splits,
            AT_ONCE,
            VALUE_DIM,
            BLOCK_DV,
        )
