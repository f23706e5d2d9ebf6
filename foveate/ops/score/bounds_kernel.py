"""Bounds of the logits in boxes, for a group of heads at a time: Triton kernel of :func:`largest_logit`."""

import torch
import triton
import triton.language as tl

from foveate.ops.dispatch import UnsupportedError
from foveate.ops.gpu.block_table import FLOATS
from foveate.ops.gpu.tiles import Tile, capability, multiprocessors, split, split_of_row
from foveate.ops.score.kept_logits_kernel import per_head

_LARGEST = 256
"""The largest head dim."""
_HEADS = 64
"""The most heads of a program."""
_RESIDENT = 2
"""Programs that a multiprocessor runs at a time."""
_VARYING = ["length_stride_b", "length_stride_h", "num_kv_heads", "parts", "number", "room"]
"""What changes from step to step, or from batch to batch: no reason to compile anew."""


def tile_for(dtype: torch.dtype, dim: int, group: int, capability: int) -> Tile:
    """Heads and boxes of a program: three blocks of 16 KB of either corner under way on Hopper, two of 8 KB elsewhere.

    Queries are held twice, as their positive and as their negative entries. Many heads leave less room for boxes.
    """
    heads, hopper = min(_HEADS, max(16, triton.next_power_of_2(group))), capability >= 9
    if dtype == torch.float32:  # multiplied without tensor cores
        return Tile(16, 16, num_warps=8 if dim > 64 else 4, num_stages=1)
    boxes = (128 if dim <= 64 else 64 if dim <= 128 else 32) // (1 if hopper else 2)
    if heads == 64:
        return Tile(heads, max(16, boxes // 2), num_warps=4, num_stages=2)
    return Tile(heads, boxes, num_warps=4, num_stages=4 if hopper and heads < 32 and dim <= 128 else 3)


def largest_logit(rows, low, high, scaling, *, lengths=None):
    """See :func:`foveate.ops.score.nodes.largest_logit`.

    The heads of a group share a program, so that a corner is read once. Boxes that a row does not have are not read.
    Products are summed in fp32, and fp32 is multiplied in full precision. Repeats are equal bit for bit.
    """
    batch, num_kv_heads, group, dim = rows.shape
    number = low.shape[2]
    if not rows.dtype == low.dtype == high.dtype or rows.dtype not in FLOATS:
        raise UnsupportedError(f"queries in {rows.dtype} with corners in {low.dtype} and {high.dtype}")
    if dim > _LARGEST:
        raise UnsupportedError(f"head dims above {_LARGEST}")
    if not low.shape == high.shape == (batch, num_kv_heads, number, dim):
        shapes = {"rows": rows, "low": low, "high": high}
        raise ValueError("shapes do not fit: " + ", ".join(f"{name} {tuple(x.shape)}" for name, x in shapes.items()))
    tile = tile_for(rows.dtype, dim, group, capability(rows.device))
    parts, blocks = triton.cdiv(group, tile.block_m), triton.cdiv(number, tile.block_n)
    lengths = None if lengths is None else per_head(lengths, num_kv_heads)
    padded = triton.cdiv(number, 16) * 16  # rows begin at 64 bytes, so that stores move vectors
    bounds = torch.empty(batch, num_kv_heads, group, padded, dtype=torch.float32, device=rows.device)
    if bounds.numel():
        room = _RESIDENT * multiprocessors(rows.device)
        splits, _ = split(batch * num_kv_heads * parts, blocks, room)
        _largest_logit[batch * num_kv_heads * parts, splits](
            rows, low, high, lengths, bounds,
            *rows.stride(), *low.stride(), *high.stride(), *((0, 0) if lengths is None else lengths.stride()),
            num_kv_heads, group, parts, number, padded, room, scaling,
            BOUNDED=lengths is not None, **tile.sizes(dim), **tile.options,
        )  # fmt: skip
    return bounds[..., :number]


@triton.jit(do_not_specialize=_VARYING)
def _largest_logit(
    q_ptr, low_ptr, high_ptr, length_ptr, bound_ptr,
    q_stride_b, q_stride_h, q_stride_g, q_stride_d, low_stride_b, low_stride_h, low_stride_l, low_stride_d,
    high_stride_b, high_stride_h, high_stride_l, high_stride_d, length_stride_b, length_stride_h,
    num_kv_heads, group, parts, number, padded, room, scale,
    BOUNDED: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The largest logit that a key in a box can have: ``(max(q, 0) . high + min(q, 0) . low) * scale``. Writes ``bound
    [B, Hkv, G, padded]``, contiguous, and -inf at places after the boxes within the last block.

    A program owns up to ``BLOCK_M`` heads of a group in one row of the batch and one split of the row's boxes. It reads
    the boxes in ascending order, both corners of each once. ``length`` (``BOUNDED``) counts the boxes that the row has;
    nothing is written after the block of the last one.

    Shapes: M = BLOCK_M heads, N = BLOCK_N boxes, D = BLOCK_D, which holds the head dim ``DIM``.
    """
    row, part, split = tl.program_id(0) // parts, tl.program_id(0) % parts, tl.program_id(1)
    batch, head = (row // num_kv_heads).to(tl.int64), (row % num_kv_heads).to(tl.int64)
    member = part * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]
    exist = member < group  # [M]
    member = tl.where(exist, member, 0)  # [M]; heads beyond the group repeat head 0, so that all addresses are valid
    dims, places = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)  # [D], [N]

    # 1. Find the blocks of this split. A shorter row shares its blocks among fewer programs; the others leave.
    there, here = number, tl.cdiv(number, BLOCK_N)
    each = tl.cdiv(here, tl.num_programs(1))
    if BOUNDED:
        length = tl.load(length_ptr + batch * length_stride_b + head * length_stride_h)
        there = tl.minimum(number, length.to(tl.int32))
        here = tl.cdiv(there, BLOCK_N)
        used, each = split_of_row(here, tl.num_programs(0), tl.num_programs(1), room)
        if split >= used:
            return

    # 2. Load the queries of the group, and take their positive and negative entries apart. NaN stays in both.
    q_ptr += batch * q_stride_b + head * q_stride_h
    q_tile = member[:, None] * q_stride_g + dims[None, :] * q_stride_d  # [M, D]
    q = tl.load(q_ptr + q_tile, mask=exist[:, None] & (dims < DIM)[None, :], other=0.0)  # [M, D]
    upward, downward = tl.where(q < 0, tl.zeros_like(q), q), tl.where(q > 0, tl.zeros_like(q), q)  # [M, D], [M, D]
    low_ptr += batch * low_stride_b + head * low_stride_h
    high_ptr += batch * high_stride_b + head * high_stride_h
    first = batch * num_kv_heads + head
    out_ptr = bound_ptr + (first * group + member)[:, None] * padded + places[None, :]  # [M, N]

    # 3. Walk over the blocks of boxes.
    for block in tl.range(split * each, tl.minimum((split + 1) * each, here)):
        place = block * BLOCK_N + places  # [N]
        box, stored = place.to(tl.int64), place < there  # [N], [N]
        mask = stored[:, None]  # [N, 1]
        if BLOCK_D > DIM:
            mask = mask & (dims < DIM)[None, :]  # [N, D]
        # [N, D]
        high = tl.load(high_ptr + (box * high_stride_l)[:, None] + dims[None, :] * high_stride_d, mask=mask, other=0.0)
        bound = tl.dot(upward, tl.trans(high), input_precision="ieee")  # [M, N]
        # [N, D]
        low = tl.load(low_ptr + (box * low_stride_l)[:, None] + dims[None, :] * low_stride_d, mask=mask, other=0.0)
        bound = tl.dot(downward, tl.trans(low), bound, input_precision="ieee") * scale  # [M, N]
        bound = tl.where(stored[None, :], bound, float("-inf"))  # [M, N]
        tl.store(out_ptr + block * BLOCK_N, bound, mask=exist[:, None] & (place < padded)[None, :])
