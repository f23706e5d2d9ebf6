"""The box of the newest page: Triton kernel of :func:`bound_newest`."""

import triton
import triton.language as tl

from foveate.ops.dispatch import UnsupportedError
from foveate.ops.gpu.block_table import FLOATS, arguments, block_size

_MOST = 64
"""Keys that a program reads at a time."""


def bound_newest(kv, low, high, page_size):
    """See :func:`foveate.ops.compress.boxes.bound_newest`. One launch; a program owns a row and a KV head."""
    kv.check_each_length()
    keys, block_table, lengths = kv.k, kv.block_table, kv.lengths
    batch, heads, dim = len(low), keys.shape[1], keys.shape[3]
    if keys.dtype not in FLOATS:
        raise UnsupportedError(f"keys in {keys.dtype}")
    if block_table is not None:
        block_table.check_rows(low)
    shape = (len(keys) if block_table is None else batch, heads, low.shape[2], dim)
    if low.dtype != keys.dtype or high.dtype != keys.dtype or not low.shape == high.shape == shape:
        raise ValueError(f"corners {tuple(low.shape)} in {low.dtype} do not fit keys {tuple(keys.shape)}")
    if batch * heads:
        _bound_newest[batch * heads,](
            keys, low, high, lengths, *arguments(block_table),
            *keys.stride(), *low.stride(), *high.stride(), lengths.stride(0),
            heads, page_size,
            BLOCK_SIZE=block_size(block_table, keys), DIM=dim, BLOCK_D=triton.next_power_of_2(dim),
            BLOCK=min(_MOST, triton.next_power_of_2(page_size)), num_warps=4,
        )  # fmt: skip


_VARYING = [f"{x}_stride_{axis}" for x in ("key", "low", "high") for axis in "bh"]


@triton.jit(do_not_specialize=[*_VARYING, "length_stride", "table_stride", "heads", "page_size"])
def _bound_newest(
    key_ptr, low_ptr, high_ptr, length_ptr, table_ptr,
    table_stride, key_stride_b, key_stride_h, key_stride_s, key_stride_d,
    low_stride_b, low_stride_h, low_stride_p, low_stride_d, high_stride_b, high_stride_h, high_stride_p, high_stride_d,
    length_stride,
    heads, page_size,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the box of the page that holds a row's newest key.

    A program owns a KV head of a row. It reads the page's keys up to the row's ``length [B]`` once, in ascending order,
    and writes one page of ``low`` and ``high [B, Hkv, P, D]``, the smallest and the largest entry of each dimension.

    Shapes: S = BLOCK keys, D = BLOCK_D dimensions.
    """
    # 1. Find the row, the KV head and the page.
    row = tl.program_id(0)
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    length = tl.load(length_ptr + batch * length_stride)
    page, dims, places = (length - 1) // page_size, tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)  # scalar, [D], [S]
    if BLOCK_SIZE:
        table_ptr += batch * table_stride
        key_ptr += head * key_stride_h + dims[None, :] * key_stride_d  # [1, D]
    else:
        key_ptr += batch * key_stride_b + head * key_stride_h + dims[None, :] * key_stride_d  # [1, D]
    # 2. Read the keys and keep the bounds of each dimension.
    low, high = tl.full([BLOCK_D], float("inf"), tl.float32), tl.full([BLOCK_D], float("-inf"), tl.float32)  # [D], [D]
    for first in tl.range(page * page_size, length, BLOCK):
        slot = first + places  # [S]
        there = (slot < length)[:, None] & (dims < DIM)[None, :]  # [S, D]
        key_rows = key_ptr
        if BLOCK_SIZE:
            in_block = tl.load(table_ptr + slot // BLOCK_SIZE, mask=slot < length, other=0).to(tl.int64)  # [S]
            slot = slot % BLOCK_SIZE  # [S]
            key_rows += (in_block * key_stride_b)[:, None]
        keys = tl.load(key_rows + slot[:, None] * key_stride_s, mask=there, other=0.0).to(tl.float32)  # [S, D]
        low = tl.minimum(low, tl.min(tl.where(there, keys, float("inf")), 0))  # [D]
        high = tl.maximum(high, tl.max(tl.where(there, keys, float("-inf")), 0))  # [D]
    # 3. Store the bounds.
    low_ptr += batch * low_stride_b + head * low_stride_h + page * low_stride_p + dims * low_stride_d
    high_ptr += batch * high_stride_b + head * high_stride_h + page * high_stride_p + dims * high_stride_d
    tl.store(low_ptr, low.to(low_ptr.dtype.element_ty), mask=dims < DIM)
    tl.store(high_ptr, high.to(high_ptr.dtype.element_ty), mask=dims < DIM)
