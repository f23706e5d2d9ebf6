"""Attention of queries that each have their own selection of keys, and a window, in one launch: Triton kernel of
:func:`attend_selected`."""

import importlib

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.ops.attend.attended import Attended
from foveate.ops.attend.selected import check
from foveate.ops.attend.splits_kernel import merge_splits
from foveate.ops.dispatch import UnsupportedError
from foveate.ops.gpu.block_table import FLOATS
from foveate.ops.gpu.softmax import LOG2E, LOWEST, accumulate, exponentials, log_sum_exp, normalised
from foveate.ops.gpu.tiles import Tile, multiprocessors, padded

_LARGEST = 576
"""The largest head dim."""
_HEADS = 64
"""The most heads of a program."""
_HOPPER = True
"""Whether Hopper gets the kernel written for it."""


def tile_for(dtype: torch.dtype, dim: int, heads: int, capability: int, shared: bool) -> Tile:
    """Heads and keys of a program; ``dim`` is the larger of head and value dim, and ``heads`` share keys.

    Hopper holds two blocks of keys beside 64 heads of 512 in shared memory; others have 99 KB for less. ``shared``:
    values are keys.
    """
    rows = min(_HEADS, max(16, triton.next_power_of_2(heads)))
    if dtype == torch.float32:  # multiplied without tensor cores
        return Tile(16, 16, num_warps=8 if dim > 128 else 4, num_stages=1)
    if capability < 9:
        if dim > 256:
            return Tile(min(rows, 32), 32 if shared and dim == 512 else 16, num_warps=8, num_stages=2)
        return Tile(rows, 32, num_warps=4, num_stages=2)
    if dim > 256:
        return Tile(rows, 64 if shared else 32, num_warps=8 if rows > 32 else 4, num_stages=2)
    if dim > 128:
        return Tile(rows, 32, num_warps=4, num_stages=2)
    return Tile(rows, 64, num_warps=4, num_stages=3)


def attend_selected(q, kv, indices, *, scaling, recent=None, window=0, offset=0, sinks=None):
    """See :func:`foveate.ops.attend.selected.attend_selected`.

    A program owns heads of one query that share a KV head, and walks over the selected keys and then over the window,
    with an online softmax (FlashAttention, Dao 2023, arXiv:2307.08691). Where values are keys, a key is read once. With
    few queries the keys are split among programs, and a second launch merges the programs' outputs. Repeats are equal
    bit for bit, and fp32 is multiplied in full precision. The output is laid out as ``[B, Lq, Hq, Dv]``.
    """
    indices = check(q, kv, indices, recent, window, offset, sinks)
    if indices.dtype.itemsize < 4:  # the window's positions are written in the dtype of the indices
        indices = indices.int()
    k, v = kv.k, kv.v
    batch, num_heads, length, dim = q.shape
    num_kv_heads, _, value_dim = v.shape[1:]
    of_window = (recent.k, recent.v) if window else (k, v)
    if any(x.dtype != q.dtype for x in (k, v, *of_window)) or q.dtype not in FLOATS:
        raise UnsupportedError(f"queries in {q.dtype} with keys in {k.dtype} and values in {v.dtype}")
    if max(dim, value_dim) > _LARGEST:
        raise UnsupportedError(f"head dims above {_LARGEST}")

    block_d = max(16, 1 << dim.bit_length() - 1)
    rest = padded(dim - block_d) if dim > block_d else 0
    block_dv = padded(value_dim)
    shared = block_dv == block_d and same_memory(k, v) and same_memory(*of_window)
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (8, 0)
    roomy = 9 if capability[0] in (9, 10) else 8  # 12 has the shared memory of 8
    if _HOPPER and capability == (9, 0):
        hopper = importlib.import_module("foveate.ops.attend.selected_hopper_kernel")
        if hopper.fits(q, k, of_window[0], value_dim, shared, indices.shape[3] + window):
            return hopper.attend_selected(
                q, k, of_window[0], indices, scaling=scaling, window=window, offset=offset, sinks=sinks
            )

    out = q.new_empty(batch, length, num_heads, value_dim).transpose(1, 2)
    lse = q.new_empty(batch, num_heads, length, dtype=torch.float32)
    if not out.numel():
        return Attended(out, lse)
    group = num_heads // num_kv_heads
    tile = tile_for(q.dtype, max(dim, value_dim), group, roomy, shared)
    programs, room = batch * length * num_kv_heads, multiprocessors(q.device)
    blocks = triton.cdiv(indices.shape[3], tile.block_n) + triton.cdiv(window, tile.block_n)
    if programs * blocks * triton.cdiv(group, tile.block_m) < room:  # so that more of it is in use
        tile = tile_for(q.dtype, max(dim, value_dim), 1, roomy, shared)
        blocks = triton.cdiv(indices.shape[3], tile.block_n) + triton.cdiv(window, tile.block_n)
    parts = triton.cdiv(group, tile.block_m)
    each = max(1, triton.cdiv(blocks, max(1, room // (programs * parts))))
    splits = max(1, triton.cdiv(blocks, each))
    found = (out, lse)
    if splits > 1:
        found = (
            q.new_empty(splits * batch, length, num_heads, value_dim, dtype=torch.float32).transpose(1, 2),
            q.new_empty(splits * batch, num_heads, length, dtype=torch.float32),
        )
    _attend_selected[length * parts, batch * num_kv_heads, splits](
        q, k, v, *of_window, indices, sinks if splits == 1 else None, *found,
        q.stride(), k.stride(), v.stride(), *(x.stride() for x in of_window),
        (indices.stride(0), indices.stride(1) if indices.shape[1] > 1 else 0, *indices.stride()[2:]),
        found[0].stride()[:3], 0 if sinks is None else sinks.stride(0),
        batch, num_kv_heads, group, parts, length, indices.shape[3], window, offset, each, scaling * LOG2E.value,
        SHARED=shared, **tile.sizes(dim, value_dim) | {"BLOCK_D": block_d, "BLOCK_REST": rest}, **tile.options,
    )  # fmt: skip
    if splits > 1:
        merge_splits[length * num_heads, batch](
            *found, sinks, None, out, lse,
            *found[0].stride()[:3], *out.stride()[:3], 0 if sinks is None else sinks.stride(0),
            batch, num_heads, length, splits, 1,
            SINKS=sinks is not None, VALUE_DIM=value_dim, BLOCK_DV=block_dv,
            BLOCK=min(16, triton.next_power_of_2(splits)), num_warps=4,
        )  # fmt: skip
    return Attended(out, lse)


def same_memory(k: Tensor, v: Tensor) -> bool:
    """Whether values are the first dimensions of their keys, in the same memory."""
    return k.data_ptr() == v.data_ptr() and k.stride() == v.stride() and v.shape[3] <= k.shape[3]


@triton.jit(do_not_specialize=["batches", "num_kv_heads", "parts", "length", "selected", "window", "offset", "each"])
def _attend_selected(
    q_ptr, k_ptr, v_ptr, recent_k_ptr, recent_v_ptr, index_ptr, sink_ptr, out_ptr, lse_ptr,
    q_strides, k_strides, v_strides, recent_k_strides, recent_v_strides, index_strides, out_strides, sink_stride,
    batches, num_kv_heads, group, parts, length, selected, window, offset, each, scale,
    SHARED: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention of one query over one split of its selected keys and its window.

    A program owns up to ``BLOCK_M`` heads of a GQA group at one query, and one split of their keys. It writes its rows
    of ``out [splits * B, Hq, Lq, Dv]``, whose last stride is 1, and of ``lse [splits * B, Hq, Lq]``, contiguous and
    natural.

    The program counts blocks of keys first over the selection ``index [B, Hkv or 1, Lq, K]``, -1 for none, and then
    over the window, from its oldest key to the query's own. It reads ``each`` of these blocks once, in ascending order,
    with an online softmax in fp32. With ``SHARED`` values are the first dimensions of their keys and are not read
    again.

    A head's dimensions are multiplied in two parts: the largest power of two in the head dim (``BLOCK_D``), and the
    remaining ``BLOCK_REST`` dimensions, padded; 576 dimensions are 512 and 64, where padding to 1024 would nearly
    double the work. ``scale`` includes log2(e), so logits are to the base 2.

    Shapes: M = BLOCK_M heads, N = BLOCK_N keys, D = BLOCK_D dimensions, R = BLOCK_REST remaining dimensions, DV =
    BLOCK_DV dimensions of values.
    """
    # 1. Unpack the strides, and find the query, heads, row and split that the program owns.
    q_stride_b, q_stride_h, q_stride_l, q_stride_d = q_strides
    k_stride_b, k_stride_h, k_stride_l, k_stride_d = k_strides
    v_stride_b, v_stride_h, v_stride_l, v_stride_d = v_strides
    recent_k_stride_b, recent_k_stride_h, recent_k_stride_l, recent_k_stride_d = recent_k_strides
    recent_v_stride_b, recent_v_stride_h, recent_v_stride_l, recent_v_stride_d = recent_v_strides
    index_stride_b, index_stride_h, index_stride_l, index_stride_k = index_strides
    out_stride_b, out_stride_h, out_stride_l = out_strides
    query, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    batch, head = (tl.program_id(1) // num_kv_heads).to(tl.int64), (tl.program_id(1) % num_kv_heads).to(tl.int64)
    split = tl.program_id(2)
    member = part * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]
    exist = member < group  # [M]
    heads = head * group + tl.where(exist, member, 0)  # [M]
    places, dims, value_dims = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)  # [N], [D], [DV]

    # 2. Load the queries, and move the pointers to the row and the KV head.
    q_ptr += batch * q_stride_b + query.to(tl.int64) * q_stride_l
    q_mask = exist[:, None]  # [M, 1]
    if BLOCK_D > DIM:
        q_mask = q_mask & (dims < DIM)[None, :]  # [M, D]
    q = tl.load(q_ptr + heads[:, None] * q_stride_h + dims[None, :] * q_stride_d, mask=q_mask, other=0.0)  # [M, D]
    if BLOCK_REST:
        more = BLOCK_D + tl.arange(0, BLOCK_REST)  # [R]
        q_tile = heads[:, None] * q_stride_h + more[None, :] * q_stride_d  # [M, R]
        q_more = tl.load(q_ptr + q_tile, mask=exist[:, None] & (more < DIM)[None, :], other=0.0)  # [M, R]
    k_ptr += batch * k_stride_b + head * k_stride_h
    v_ptr += batch * v_stride_b + head * v_stride_h
    recent_k_ptr += batch * recent_k_stride_b + head * recent_k_stride_h
    recent_v_ptr += batch * recent_v_stride_b + head * recent_v_stride_h
    index_ptr += batch * index_stride_b + head * index_stride_h + query.to(tl.int64) * index_stride_l
    oldest = offset + query + 1 - window

    # 3. Start the online softmax.
    top = tl.full([BLOCK_M], LOWEST, tl.float32)  # [M]
    weight = tl.zeros([BLOCK_M], tl.float32)  # [M]
    out = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)  # [M, DV]
    # 4. Read the blocks of keys, of the selection and then of the window.
    of_selection = tl.cdiv(selected, BLOCK_N)
    end = tl.minimum((split + 1) * each, of_selection + tl.cdiv(window, BLOCK_N))
    for block in tl.range(split * each, end):
        # 4a. Find the slots of the keys. A block lies either in the selection or in the window.
        chosen = block < of_selection
        place = block * BLOCK_N + places  # [N]
        keys = tl.load(index_ptr + place * index_stride_k, mask=place < selected, other=-1)  # [N]
        place = tl.where(chosen, 0, place - of_selection * BLOCK_N)  # [N]
        keys = tl.where(chosen, keys, tl.where(place < window, oldest + place, -1).to(keys.dtype))  # [N]
        stored = keys >= 0  # [N]
        slots = tl.where(stored, keys, 0).to(tl.int64)  # [N]

        # 4b. Load the keys and compute the logits.
        k_base, k_step = tl.where(chosen, k_ptr, recent_k_ptr), tl.where(chosen, k_stride_l, recent_k_stride_l)
        k_rows = k_base + (slots * k_step)[:, None]  # [N, 1]
        k_along = tl.where(chosen, k_stride_d, recent_k_stride_d)
        k_mask = stored[:, None]  # [N, 1]
        if BLOCK_D > DIM:
            k_mask = k_mask & (dims < DIM)[None, :]  # [N, D]
        k = tl.load(k_rows + dims[None, :] * k_along, mask=k_mask, other=0.0)  # [N, D]
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")  # [M, N]
        if BLOCK_REST:
            k_mask = stored[:, None] & (more < DIM)[None, :]  # [N, R]
            k_more = tl.load(k_rows + more[None, :] * k_along, mask=k_mask, other=0.0)  # [N, R]
            logits = tl.dot(q_more, tl.trans(k_more), logits, input_precision="ieee")  # [M, N]
        logits = tl.where(stored[None, :], logits * scale, float("-inf"))  # [M, N]
        # 4c. Rescale the running softmax, load the values unless they are keys, and add them.
        top, p, fade = exponentials(logits, top)  # [M], [M, N], [M]
        if SHARED:
            v = k  # [N, DV]
        else:
            v_base, v_step = tl.where(chosen, v_ptr, recent_v_ptr), tl.where(chosen, v_stride_l, recent_v_stride_l)
            v_along = tl.where(chosen, v_stride_d, recent_v_stride_d)
            v_tile = (slots * v_step)[:, None] + value_dims[None, :] * v_along  # [N, DV]
            v_mask = stored[:, None]  # [N, 1]
            if BLOCK_DV > VALUE_DIM:
                v_mask = v_mask & (value_dims < VALUE_DIM)[None, :]  # [N, DV]
            v = tl.load(v_base + v_tile, mask=v_mask, other=0.0)  # [N, DV]
        weight, out = accumulate(p, v, fade, weight, out)  # [M], [M, DV]

    # 5. Add the attention sinks, each a logit without a value.
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + heads * sink_stride).to(tl.float32) * LOG2E  # [M]
        higher = tl.maximum(top, sink)  # [M]
        fade = tl.exp2(top - higher)  # [M]
        out = out * fade[:, None]  # [M, DV]
        weight = weight * fade + tl.exp2(sink - higher)  # [M]
        top = higher  # [M]
    # 6. Normalise and store.
    out, lse = normalised(weight, out), log_sum_exp(top, weight, NATURAL=True)  # [M, DV], [M]
    row = split * batches + batch
    out_ptr += row * out_stride_b + query.to(tl.int64) * out_stride_l
    out_mask = exist[:, None]  # [M, 1]
    if BLOCK_DV > VALUE_DIM:
        out_mask = out_mask & (value_dims < VALUE_DIM)[None, :]  # [M, DV]
    tl.store(
        out_ptr + heads[:, None] * out_stride_h + value_dims[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=out_mask,
    )
    tl.store(lse_ptr + (row * num_kv_heads * group + heads) * length + query, lse, mask=exist)
