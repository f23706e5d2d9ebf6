"""What pages hold that several heads have chosen: Triton kernel of :func:`keys_of_pages`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = tl.constexpr(512)
"""Pages that a program looks at at once."""


def keys_of_pages(pages: Tensor, num_kv_heads: int, page_size: int, lengths: Tensor) -> Tensor:
    """See :func:`foveate.ops.select.pages.keys_of_pages`.

    One launch. A program owns a row and a KV head; a page counts for the first head that has chosen it, and whether an
    earlier one has is looked up in its list, which ascends.
    """
    batch, heads, number = pages.shape
    if heads % num_kv_heads:
        raise ValueError(f"pages of {heads} heads do not fit {num_kv_heads} KV heads")
    found = torch.empty(batch, num_kv_heads, dtype=torch.int64, device=pages.device)
    if found.numel():
        _keys_of_pages[batch * num_kv_heads,](
            pages,
            lengths,
            found,
            *pages.stride(),
            lengths.stride(0),
            num_kv_heads,
            heads // num_kv_heads,
            number,
            page_size,
            STEPS=max(1, number.bit_length()),
            num_warps=4,
        )
    return found


@triton.jit(
    do_not_specialize=["page_stride_b", "page_stride_h", "length_stride", "heads", "group", "number", "page_size"]
)
def _keys_of_pages(
    page_ptr,
    length_ptr,
    found_ptr,
    page_stride_b,
    page_stride_h,
    page_stride_p,
    length_stride,
    heads,
    group,
    number,
    page_size,
    STEPS: tl.constexpr,
):
    """Writes ``found [B, Hkv]``; ``STEPS`` halvings tell where in a list a page would be."""
    row = tl.program_id(0)
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    length = tl.load(length_ptr + batch * length_stride)
    newest, places = (length - 1) // page_size, tl.arange(0, _BLOCK)
    page_ptr += batch * page_stride_b + head * group * page_stride_h
    new, open_ones = tl.zeros([_BLOCK], tl.int32), tl.zeros([_BLOCK], tl.int32)
    for member in tl.range(0, group):
        for first in tl.range(0, number, _BLOCK):
            place = first + places
            page = tl.load(page_ptr + member * page_stride_h + place * page_stride_p, mask=place < number, other=-1).to(
                tl.int32
            )
            counts = page >= 0
            for other in tl.range(0, member):
                list_ptr = page_ptr + other * page_stride_h
                low, high = tl.zeros([_BLOCK], tl.int32), tl.zeros([_BLOCK], tl.int32) + number
                for _ in tl.static_range(STEPS):
                    middle = (low + high) // 2
                    there = tl.load(list_ptr + middle * page_stride_p, mask=middle < number, other=-1).to(tl.int32)
                    behind = (there >= 0) & (there < page) & (low < high)
                    low, high = tl.where(behind, middle + 1, low), tl.where(behind, high, tl.minimum(high, middle))
                there = tl.load(list_ptr + low * page_stride_p, mask=low < number, other=-1).to(tl.int32)
                counts = counts & (there != page)
            new += counts.to(tl.int32)
            open_ones += (counts & (page == newest)).to(tl.int32)
    missing = (newest + 1) * page_size - length
    keys = tl.sum(new, 0).to(tl.int64) * page_size - tl.sum(open_ones, 0) * missing
    tl.store(found_ptr + row, keys)
