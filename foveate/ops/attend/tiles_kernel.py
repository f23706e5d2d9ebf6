"""Keys chosen for tiles of queries, read in place: Triton kernel of :func:`attend_tiles`."""

import importlib

import torch
import triton
import triton.language as tl

from foveate.ops.attend.attended import Attended
from foveate.ops.dispatch import UnsupportedError
from foveate.ops.gpu.block_table import FLOATS, arguments, block_size
from foveate.ops.gpu.softcap import capped, constant
from foveate.ops.gpu.softmax import LOG2E, LOWEST, log_sum_exp
from foveate.ops.gpu.tiles import Tile, tile_of_width

_TILES = {
    64: Tile(128, 64, num_warps=8, num_stages=3),
    128: Tile(128, 64, num_warps=8, num_stages=2),
    256: Tile(64, 32, num_warps=8, num_stages=2),
}
"""The tile by the larger of head and value dim, padded. Each tile fits into 99 KB of shared memory."""

_TILE_FP32 = Tile(16, 32, num_warps=8, num_stages=1)
"""The tile for fp32, which is multiplied without tensor cores."""

_HOPPER = True
"""Whether Hopper GPUs run the kernel written for them."""


def tile_for(dtype: torch.dtype, dim: int, rows: int) -> Tile:
    """The tile for ``dim``, the larger of head and value dim, at most 256, and ``rows`` query rows that share keys."""
    tile = tile_of_width(_TILES, dim)
    if dtype == torch.float32:
        tile = _TILE_FP32 if dim <= 128 else _TILE_FP32._replace(block_n=16)
    block_m = min(tile.block_m, max(16, triton.next_power_of_2(rows)))
    return tile._replace(block_m=block_m, num_warps=tile.num_warps if block_m > 32 else 4)


def attend_tiles(q, kv, indices, *, tile, logits, offset=0, starts, counts, heads=None, out=None, need_lse=False):
    """See :func:`foveate.ops.attend.tiles.attend_tiles`.

    The queries of one tile and of all heads of a GQA group lie side by side as rows and share programs. A program reads
    the keys chosen for the tile and then the tile's own keys, with an online softmax, so repeats are equal bit for bit.
    fp32 is multiplied in full precision. New output is laid out as ``[B, Lq, Hq, Dv]``.
    """
    k, v, block_table = kv.k, kv.v, kv.block_table
    batch, num_heads, length, dim = q.shape
    num_kv_heads, _, value_dim = v.shape[1:]
    if not q.dtype == k.dtype == v.dtype or q.dtype not in FLOATS:
        raise UnsupportedError(f"queries in {q.dtype} with keys in {k.dtype} and values in {v.dtype}")
    if max(dim, value_dim) > max(_TILES):
        raise UnsupportedError(f"head dims above {max(_TILES)}")
    lead, group = offset % tile, num_heads // num_kv_heads
    tiles = triton.cdiv(lead + length, tile)
    starts, counts = starts.contiguous(), counts.contiguous()
    out = q.new_empty(batch, length, num_heads, value_dim).transpose(1, 2) if out is None else out
    lse = q.new_empty(batch, num_heads, length, dtype=torch.float32) if need_lse else None
    own = _HOPPER and logits.softcap is None and block_table is None and q.is_cuda
    if own and torch.cuda.get_device_capability(q.device) == (9, 0):
        hopper = importlib.import_module("foveate.ops.attend.tiles_hopper_kernel")
        if hopper.fits(q, k, v, tile=tile, scaling=logits.scaling):
            own = {"tile": tile, "logits": logits, "offset": offset, "heads": heads}
            return hopper.attend_tiles(q, k, v, indices, starts, counts, out, lse, **own)
    block = tile_for(q.dtype, max(dim, value_dim), group * tile)
    parts = triton.cdiv(group * tile, block.block_m)
    _attend_tiles[tiles * parts, batch * num_kv_heads](
        q, k, v, indices, starts, counts, heads, logits.sinks, *arguments(block_table), out, lse,
        q.stride(), k.stride(), v.stride(), indices.stride(), out.stride()[:3],
        0 if logits.sinks is None else logits.sinks.stride(0),
        num_kv_heads, group, tile, tiles, parts, length, offset, logits.scaling * LOG2E.value,
        BLOCK_SIZE=block_size(block_table, k), SOFTCAP=constant(logits.softcap),
        **block.sizes(dim, value_dim) | block.options,
    )  # fmt: skip
    return Attended(out, lse)


@triton.jit(do_not_specialize=["table_stride", "num_kv_heads", "group", "tile", "tiles", "parts", "length", "offset"])
def _attend_tiles(
    q_ptr, k_ptr, v_ptr, index_ptr, start_ptr, count_ptr, heads_ptr, sink_ptr, table_ptr, table_stride, out_ptr,
    lse_ptr, q_strides, k_strides, v_strides, index_strides, out_strides, sink_stride,
    num_kv_heads, group, tile, tiles, parts, length, offset, scale,
    BLOCK_SIZE: tl.constexpr, SOFTCAP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention of ``BLOCK_M`` rows of one tile over the keys chosen for the tile and the tile's own keys.

    A program owns ``BLOCK_M`` rows of one tile and KV head. Row r of a tile is query ``r % tile`` of the group's head
    ``r // tile``. The last tiles, which have the most keys, have the lowest program numbers and start first. The
    program writes its rows of ``out [B, Hq, Lq, Dv]``, whose last stride is 1, and of ``lse [B, Hq, Lq]``, contiguous
    and natural, unless ``lse`` is None.

    It reads the chosen keys in the order of the list and then the tile's own keys in ascending order, with an online
    softmax in fp32. Every row sees every chosen key; the causal mask applies to the tile's own keys only. ``scale``
    includes log2(e), so logits are to the base 2.

    - ``index``: the chosen keys of all tiles, one tile after the other.
    - ``start [T + 1]``: where the list of each tile begins in ``index``, and where the last list ends.
    - ``count [B, Hkv, T]``: how many places of its list each tile uses.
    - ``heads [Hkv]``: the head whose lists each KV head reads; None: its own.

    Shapes: M = BLOCK_M rows, N = BLOCK_N keys, D = BLOCK_D dimensions of keys, DV = BLOCK_DV dimensions of values.
    """
    # 1. Unpack the strides, and find the tile, the KV head and the rows that the program owns.
    q_stride_b, q_stride_h, q_stride_l, q_stride_d = q_strides
    k_stride_b, k_stride_h, k_stride_l, k_stride_d = k_strides
    v_stride_b, v_stride_h, v_stride_l, v_stride_d = v_strides
    index_stride_b, index_stride_h, index_stride_k = index_strides
    out_stride_b, out_stride_h, out_stride_l = out_strides
    t, part = tiles - 1 - tl.program_id(0) // parts, tl.program_id(0) % parts
    batch, head = (tl.program_id(1) // num_kv_heads).to(tl.int64), (tl.program_id(1) % num_kv_heads).to(tl.int64)
    rows = part * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]
    places, dims, value_dims = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)  # [N], [D], [DV]
    query = t * tile - offset % tile + rows % tile  # [M]
    exist = (rows < group * tile) & (query >= 0) & (query < length)  # [M]
    query, member = tl.where(exist, query, 0).to(tl.int64), tl.where(exist, rows // tile, 0).to(tl.int64)  # [M], [M]
    start, end = offset - offset % tile + t * tile, offset + length
    own = start + rows % tile  # [M]
    # 2. Load the queries, and move the pointers to the batch entry, the KV head and the tile's list of keys.
    q_ptr += batch * q_stride_b + head * group * q_stride_h
    q_tile = (member * q_stride_h + query * q_stride_l)[:, None] + dims[None, :] * q_stride_d  # [M, D]
    q = tl.load(q_ptr + q_tile, mask=exist[:, None] & (dims < DIM)[None, :], other=0.0)  # [M, D]
    if BLOCK_SIZE:
        table_ptr += batch * table_stride
        k_ptr += head * k_stride_h
        v_ptr += head * v_stride_h
    else:
        k_ptr += batch * k_stride_b + head * k_stride_h
        v_ptr += batch * v_stride_b + head * v_stride_h
    source = head if heads_ptr is None else tl.load(heads_ptr + head)
    index_ptr += batch * index_stride_b + source * index_stride_h + tl.load(start_ptr + t) * index_stride_k
    used = tl.load(count_ptr + (batch * num_kv_heads + source) * tiles + t)
    # 3. Start the online softmax; an attention sink is a logit without a value.
    top = tl.full([BLOCK_M], LOWEST, tl.float32)  # [M]
    weight = tl.zeros([BLOCK_M], tl.float32)  # [M]
    out = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)  # [M, DV]
    if sink_ptr is not None:
        sinks = tl.load(sink_ptr + (head * group + member) * sink_stride).to(tl.float32)  # [M]
        top = tl.maximum(top, sinks * LOG2E)  # [M]
        weight = tl.where(top > LOWEST, 1.0, weight)  # [M]
    # 4. Read the blocks of chosen keys, and then the blocks of the tile's own keys.
    for of_tile in tl.static_range(2):  # 0: the chosen keys, 1: the tile's own keys
        for first in tl.range(0, tl.minimum(tile, end - start) if of_tile else used, BLOCK_N):
            # 4a. Find the keys of the block and their slots.
            if of_tile:
                keys = start + first + places  # [N]
                stored = (first + places < tile) & (keys < end)  # [N]
            else:
                stored = first + places < used  # [N]
                keys = tl.load(index_ptr + (first + places) * index_stride_k, mask=stored, other=0)  # [N]
            slots = tl.where(stored, keys, 0).to(tl.int64)  # [N]
            if BLOCK_SIZE:
                in_block = tl.load(table_ptr + slots // BLOCK_SIZE, mask=stored, other=0).to(tl.int64)  # [N]
                slots = slots % BLOCK_SIZE  # [N]
            # 4b. Load the keys, compute the logits and hide keys after a row's own position.
            k_tile = slots[None, :] * k_stride_l + dims[:, None] * k_stride_d  # [D, N]
            if BLOCK_SIZE:
                k_tile += in_block[None, :] * k_stride_b  # [D, N]
            k = tl.load(k_ptr + k_tile, mask=stored[None, :] & (dims < DIM)[:, None], other=0.0)  # [D, N]
            logits = capped(tl.dot(q, k, input_precision="ieee") * scale, SOFTCAP)  # [M, N]
            seen = stored[None, :] & (rows >= 0)[:, None]  # [M, N]
            if of_tile:
                seen = seen & (keys[None, :] <= own[:, None])  # [M, N]
            logits = tl.where(seen, logits, float("-inf"))  # [M, N]
            # 4c. Rescale the running softmax, load the values and add them.
            higher = tl.maximum(top, tl.max(logits, 1))  # [M]
            p = tl.exp2(logits - higher[:, None])  # [M, N]
            fade = tl.exp2(top - higher)  # [M]
            v_tile = slots[:, None] * v_stride_l + value_dims[None, :] * v_stride_d  # [N, DV]
            if BLOCK_SIZE:
                v_tile += in_block[:, None] * v_stride_b  # [N, DV]
            v = tl.load(v_ptr + v_tile, mask=stored[:, None] & (value_dims < VALUE_DIM)[None, :], other=0.0)  # [N, DV]
            out = tl.dot(p.to(v.dtype), v, out * fade[:, None], input_precision="ieee")  # [M, DV]
            weight = weight * fade + tl.sum(p, 1)  # [M]
            top = higher  # [M]
    # 5. Store the log-sum-exp, normalise the output and store it.
    if lse_ptr is not None:
        lse_row = (batch * num_kv_heads + head) * group + member  # [M]
        tl.store(lse_ptr + lse_row * length + query, log_sum_exp(top, weight, NATURAL=True), mask=exist)
    out = out / tl.where(weight == 0, 1.0, weight)[:, None]  # [M, DV]
    out_ptr += batch * out_stride_b + head * group * out_stride_h
    out_tile = (member * out_stride_h + query * out_stride_l)[:, None] + value_dims[None, :]  # [M, DV]
    out_mask = exist[:, None] & (value_dims < VALUE_DIM)[None, :]  # [M, DV]
    tl.store(out_ptr + out_tile, out.to(out_ptr.dtype.element_ty), mask=out_mask)
