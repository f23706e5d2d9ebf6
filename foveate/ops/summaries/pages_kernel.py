"""Functions of the Triton kernels of :func:`attend_summaries`: attention to the keys of refined pages."""

import triton
import triton.language as tl

from foveate.ops.gpu.softcap import capped
from foveate.ops.gpu.softmax import LOG2E, log_sums, online
from foveate.ops.summaries.score_kernel import shared_out


@triton.jit
def refined_tokens(
    q_ptr,
    k_ptr,
    v_ptr,
    weight_ptr,
    token_ptr,
    place_ptr,
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
    begin,
    end,
    picked,
    places,
    sinks,
    scaling,
    top,
    weight,
    out,
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
    """Add the keys of ``picked`` pages to a running softmax: tiles ``begin .. end - 1``.

    A page of ``WIDTH`` tokens has ``CHUNKS`` chunks of ``BLOCK_W`` tokens; a tile has ``BLOCK_N`` tokens of one or more
    chunks. ``KEEPS``: log-weights are stored in ``token``, 1: of each token, 2: of each chunk. With ``PRESERVE`` keys
    share the log-weight of their page in ``weight``. Pointers are offset to a row and KV head, except these two.
    """
    PAGES: tl.constexpr = max(1, BLOCK_N // BLOCK_W)
    dims, token, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, PAGES * BLOCK_W), tl.arange(0, out.shape[1])
    q_tile = heads[:, None] * q_stride_h + dims[None, :] * q_stride_d
    q = tl.load(q_ptr + q_tile, mask=exist[:, None] & (dims < DIM)[None, :], other=0.0)
    next_place = (begin * PAGES + token // BLOCK_W) // CHUNKS
    # loaded one tile ahead, so that the compiler can pipeline the loads of keys
    next_page = tl.load(page_ptr + next_place, mask=next_place < picked, other=0).to(tl.int32)
    for tile in tl.range(begin, end):
        piece = tile * PAGES + token // BLOCK_W
        place, inside = piece // CHUNKS, piece % CHUNKS * BLOCK_W + token % BLOCK_W
        page, next_place = next_page, (piece + PAGES) // CHUNKS
        next_page = tl.load(page_ptr + next_place, mask=next_place < picked, other=0).to(tl.int32)
        stored = (place < picked) & (inside < WIDTH)
        slot = (sinks + page * WIDTH + inside).to(tl.int64)
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
            parent = tl.load(place_ptr + mine, mask=mine < picked, other=0).to(tl.int32)
            of_parent = weight_ptr + q_heads[:, None] * places + parent[None, :]
            known = exist[:, None] & (mine < picked)[None, :]
            logits = shared_out(logits, tl.load(of_parent, mask=known, other=0.0), PAGES)
        if KEEPS == 1:
            at = q_heads[:, None] * places + (place * WIDTH + inside)[None, :]
            tl.store(token_ptr + at, logits, mask=exist[:, None] & stored[None, :])
        elif KEEPS:
            of_chunk = tile * PAGES + tl.arange(0, PAGES)
            total = log_sums(tl.reshape(logits, [logits.shape[0], PAGES, BLOCK_W]))
            kept = exist[:, None] & (of_chunk < picked * CHUNKS)[None, :]
            tl.store(token_ptr + q_heads[:, None] * places + of_chunk[None, :], total, mask=kept)
        top, weight, out = online(logits, v, top, weight, out)
    return top, weight, out
