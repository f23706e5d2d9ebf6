"""Pages that are always read, what chosen pages hold, and keys at places within pages: Triton kernels of
:func:`with_always_read`, :func:`keys_of_pages`, :func:`mass_of_pages` and :func:`keys_at_places`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = tl.constexpr(512)
"""Pages that a program looks at at once."""
_PLACES = 1024
"""Places of a program."""


def keys_of_pages(pages: Tensor, num_kv_heads: int, page_size: int, lengths: Tensor) -> Tensor:
    """See :func:`foveate.ops.select.pages.keys_of_pages`.

    One launch. A program owns a row and a KV head. A page counts for the first head that has chosen it: the lists of
    earlier heads, which ascend, are searched for it.
    """
    batch, heads, number = pages.shape
    if heads % num_kv_heads:
        raise ValueError(f"pages of {heads} heads do not fit {num_kv_heads} KV heads")
    found = torch.empty(batch, num_kv_heads, dtype=torch.int64, device=pages.device)
    if found.numel():
        _keys_of_pages[batch * num_kv_heads,](
            pages, lengths, found,
            *pages.stride(), lengths.stride(0),
            num_kv_heads, heads // num_kv_heads, number, page_size,
            STEPS=max(1, number.bit_length()), num_warps=4,
        )  # fmt: skip
    return found


def with_always_read(scores: Tensor, first: int, newest: Tensor, ends: Tensor) -> Tensor:
    """See :func:`foveate.ops.select.pages.with_always_read`. One launch."""
    batch, heads, number = scores.shape
    found = torch.empty(batch, heads, number, dtype=torch.float32, device=scores.device)
    if found.numel():
        _with_always_read[triton.cdiv(number, _PLACES), batch * heads](
            scores, newest, ends, found,
            *scores.stride(), newest.stride(0), ends.stride(0),
            heads, number, first,
            BLOCK=_PLACES, num_warps=4,
        )  # fmt: skip
    return found


def mass_of_pages(mass: Tensor, pages: Tensor) -> Tensor:
    """See :func:`foveate.ops.select.pages.mass_of_pages`. One launch."""
    batch, heads, number = pages.shape
    if mass.shape[:2] != (batch, heads) or not mass.shape[2]:
        raise ValueError(f"pages {tuple(pages.shape)} do not fit mass {tuple(mass.shape)}")
    found = torch.empty(batch, heads, dtype=torch.float32, device=mass.device)
    if found.numel():
        strides = (*mass.stride(), *pages.stride())
        _mass_of_pages[batch * heads,](mass, pages, found, *strides, heads, number, num_warps=4)
    return found


def keys_at_places(places: Tensor, pages: Tensor, page_size: int) -> Tensor:
    """See :func:`foveate.ops.select.pages.keys_at_places`. One launch."""
    batch, heads, number = places.shape
    if pages.shape[:2] != (batch, heads):
        raise ValueError(f"pages {tuple(pages.shape)} do not fit places {tuple(places.shape)}")
    found = torch.empty(batch, heads, number, dtype=places.dtype, device=places.device)
    if found.numel():
        _keys_at_places[triton.cdiv(number, _PLACES), batch * heads](
            places, pages, found,
            *places.stride(), *pages.stride(),
            heads, number,
            PAGE_SIZE=page_size, BLOCK=_PLACES, num_warps=4,
        )  # fmt: skip
    return found


# Sizes and strides change from step to step; unspecialised, one compiled kernel serves all of them.
@triton.jit(
    do_not_specialize=["score_stride_b", "score_stride_h", "newest_stride", "end_stride", "heads", "number", "first"]
)
def _with_always_read(
    score_ptr, newest_ptr, end_ptr, found_ptr,
    score_stride_b, score_stride_h, score_stride_p, newest_stride, end_stride,
    heads, number, first,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Scores of pages, with inf for pages that are always read: writes ``found [B, H, P]``, contiguous, at the pages
    that a row has.

    A program owns ``BLOCK`` pages of one head in one row of the batch, and reads each score once.

    Shapes: N = BLOCK pages.
    """
    row, page = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # scalar, [N]
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    newest, end = tl.load(newest_ptr + batch * newest_stride), tl.load(end_ptr + batch * end_stride)
    score_ptr += batch * score_stride_b + head * score_stride_h
    there = page < tl.minimum(number, end)  # [N]
    score = tl.load(score_ptr + page * score_stride_p, mask=there, other=0.0)  # [N]
    score = tl.where((page < first) | (page >= newest), float("inf"), score)  # [N]
    tl.store(found_ptr + row.to(tl.int64) * number + page, score, mask=there)


# Sizes and strides change from step to step; unspecialised, one compiled kernel serves all of them.
@triton.jit(do_not_specialize=["mass_stride_b", "mass_stride_h", "page_stride_b", "page_stride_h", "heads", "number"])
def _mass_of_pages(
    mass_ptr, page_ptr, found_ptr,
    mass_stride_b, mass_stride_h, mass_stride_n, page_stride_b, page_stride_h, page_stride_p,
    heads, number,
):  # fmt: skip
    """The attention that chosen pages hold together: writes ``found [B, H]``, contiguous; 1 where the first page has a
    mass of -inf.

    A program owns one head in one row of the batch and reads its list of pages once, in ascending order.

    Shapes: N = _BLOCK places of the list.
    """
    row = tl.program_id(0)
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    mass_ptr += batch * mass_stride_b + head * mass_stride_h
    page_ptr += batch * page_stride_b + head * page_stride_h
    held, places = tl.zeros([_BLOCK], tl.float32), tl.arange(0, _BLOCK)  # [N], [N]
    for first in tl.range(0, number, _BLOCK):
        place = first + places  # [N]
        page = tl.load(page_ptr + place * page_stride_p, mask=place < number, other=-1).to(tl.int32)  # [N]
        mass = tl.load(mass_ptr + page * mass_stride_n, mask=page >= 0, other=0.0)  # [N]
        held += tl.maximum(mass, 0.0)  # [N]
    first = tl.load(mass_ptr)
    tl.store(found_ptr + row, tl.where(first == float("-inf"), 1.0, tl.sum(held, 0)))


# Sizes and strides change from step to step; unspecialised, one compiled kernel serves all of them.
@triton.jit(do_not_specialize=["place_stride_b", "place_stride_h", "page_stride_b", "page_stride_h", "heads", "number"])
def _keys_at_places(
    place_ptr, page_ptr, key_ptr,
    place_stride_b, place_stride_h, place_stride_k, page_stride_b, page_stride_h, page_stride_p,
    heads, number,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The keys at places within pages: writes ``key [B, H, K]``, contiguous, -1 for an unused place.

    A program owns ``BLOCK`` places of one head in one row of the batch, and reads each place once.

    Shapes: N = BLOCK places.
    """
    row, at = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # scalar, [N]
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    place_ptr += batch * place_stride_b + head * place_stride_h
    page_ptr += batch * page_stride_b + head * page_stride_h
    place = tl.load(place_ptr + at * place_stride_k, mask=at < number, other=-1).to(tl.int32)  # [N]
    page = tl.load(page_ptr + place // PAGE_SIZE * page_stride_p, mask=place >= 0, other=0).to(tl.int32)  # [N]
    key = tl.where(place < 0, -1, page * PAGE_SIZE + place % PAGE_SIZE)  # [N]
    tl.store(key_ptr + row.to(tl.int64) * number + at, key.to(key_ptr.dtype.element_ty), mask=at < number)


# Sizes and strides change from step to step; unspecialised, one compiled kernel serves all of them.
@triton.jit(
    do_not_specialize=["page_stride_b", "page_stride_h", "length_stride", "heads", "group", "number", "page_size"]
)
def _keys_of_pages(
    page_ptr, length_ptr, found_ptr,
    page_stride_b, page_stride_h, page_stride_p, length_stride,
    heads, group, number, page_size,
    STEPS: tl.constexpr,
):  # fmt: skip
    """How many keys a KV head reads: writes ``found [B, Hkv]``.

    A program owns one KV head in one row of the batch. It reads the lists of its heads in ascending order, and searches
    the lists of all earlier heads for each page, so that a page counts once. Lists ascend and end with -1; ``STEPS``
    halvings find the place that a page would have.

    Shapes: N = _BLOCK pages of a list.
    """
    row = tl.program_id(0)
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    length = tl.load(length_ptr + batch * length_stride)
    newest, places = (length - 1) // page_size, tl.arange(0, _BLOCK)  # scalar, [N]
    page_ptr += batch * page_stride_b + head * group * page_stride_h

    # 1. Walk over the lists of the heads.
    new, open_ones = tl.zeros([_BLOCK], tl.int32), tl.zeros([_BLOCK], tl.int32)  # [N], [N]
    for member in tl.range(0, group):
        for first in tl.range(0, number, _BLOCK):
            place = first + places  # [N]
            # [N]
            page = tl.load(page_ptr + member * page_stride_h + place * page_stride_p, mask=place < number, other=-1).to(
                tl.int32
            )
            counts = page >= 0  # [N]
            # 2. Search for these pages in the lists of earlier heads.
            for other in tl.range(0, member):
                list_ptr = page_ptr + other * page_stride_h
                low, high = tl.zeros([_BLOCK], tl.int32), tl.zeros([_BLOCK], tl.int32) + number  # [N], [N]
                for _ in tl.static_range(STEPS):
                    middle = (low + high) // 2  # [N]
                    # [N]
                    there = tl.load(list_ptr + middle * page_stride_p, mask=middle < number, other=-1).to(tl.int32)
                    behind = (there >= 0) & (there < page) & (low < high)  # [N]
                    # [N], [N]
                    low, high = tl.where(behind, middle + 1, low), tl.where(behind, high, tl.minimum(high, middle))
                there = tl.load(list_ptr + low * page_stride_p, mask=low < number, other=-1).to(tl.int32)  # [N]
                counts = counts & (there != page)  # [N]
            new += counts.to(tl.int32)  # [N]
            open_ones += (counts & (page == newest)).to(tl.int32)  # [N]

    # 3. Multiply pages by keys. The newest page has fewer keys, if it was counted.
    missing = (newest + 1) * page_size - length
    keys = tl.sum(new, 0).to(tl.int64) * page_size - tl.sum(open_ones, 0) * missing
    tl.store(found_ptr + row, keys)
