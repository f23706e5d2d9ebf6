"""Slots and pages of keys, values and other state, gathered."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def gather_slots(x: Tensor, indices: Tensor) -> Tensor:
    """``x [B, Hkv, Lk, ...]`` at ``indices [B, Hkv, K]``: ``[B, Hkv, K, ...]``. A negative index reads slot 0."""
    return gather_fields([x], indices)[0]


def gather_fields(fields: Sequence[Tensor], indices: Tensor, *, complete: bool = False) -> list[Tensor]:
    """:func:`gather_slots` of several tensors at the same slots. ``complete`` promises that no index is negative."""
    index, gathered = (indices if complete else indices.clamp_min(0)).long(), []
    rows_of: dict[int, Tensor] = {}  # of the buffers, by the distance of their heads
    for x in fields:
        if not x.shape[2]:  # negative ones alone, which find nothing
            gathered.append(x.new_zeros(*index.shape, *x.shape[3:]))
            continue
        if x.dim() == 3:
            gathered.append(x.gather(2, index))
            continue
        if x.requires_grad or not _packed(x):
            gathered.append(x.gather(2, index[..., None].expand(*index.shape, x.shape[-1])))
            continue
        # whole rows of the buffer that x is a view of: several times faster than an element-wise gather
        batch, num_kv_heads, length, dim = x.shape
        per_head = x.stride(1) // dim
        rows = x.as_strided(((batch * num_kv_heads - 1) * per_head + length, dim), (dim, 1))
        if per_head not in rows_of:
            rows_of[per_head] = (index + _begins(batch, num_kv_heads, per_head, x.device)).flatten()
        gathered.append(rows.index_select(0, rows_of[per_head]).view(*index.shape, dim))
    return gathered


def gather_pages(x: Tensor, pages: Tensor, page_size: int, *, complete: bool = False) -> Tensor:
    """Whole pages of ``x [B, Hkv, Lk, D]`` at ``pages [B, Hkv, P]``. A negative page number reads page 0.

    ``complete`` promises that no page number is negative.

    Returns:
        ``[B, Hkv, P * page_size, D]``.
    """
    batch, num_kv_heads, _, dim = x.shape
    if x.requires_grad or not _packed(x) or x.stride(1) // dim % page_size:
        pages = pages if complete else pages.clamp_min(0)
        return gather_fields([x], page_slots(pages, page_size, complete=True).flatten(-2), complete=True)[0]
    whole = x.as_strided(
        (batch, num_kv_heads, x.shape[2] // page_size, page_size * dim), (*x.stride()[:2], page_size * dim, 1)
    )
    return gather_fields([whole], pages, complete=complete)[0].view(batch, num_kv_heads, -1, dim)


def page_slots(pages: Tensor, page_size: int, *, complete: bool = False) -> Tensor:
    """The slots of each page: ``[..., P] -> [..., P, page_size]``. A page of -1 has slots of -1; ``complete`` promises
    that there is none."""
    slots = pages[..., None].long() * page_size + torch.arange(page_size, device=pages.device)
    return slots if complete else slots.masked_fill(pages[..., None] < 0, -1)


def membership_mask(slots: Tensor, number: int) -> Tensor:
    """Which of ``number`` keys are in ``slots [B, H, P]``: bool ``[B, H, number]``."""
    slots = slots.long().masked_fill((slots < 0) | (slots >= number), number)
    there = torch.zeros(*slots.shape[:2], number + 1, dtype=torch.bool, device=slots.device)
    return there.scatter_(2, slots, True)[..., :number]


def _packed(x: Tensor) -> bool:
    """Whether the vectors of ``x [B, Hkv, Lk, D]`` are rows of one matrix, heads at equal distances."""
    dim = x.shape[3]
    per_head = x.stride(1) // dim
    return x.stride() == (x.shape[1] * per_head * dim, per_head * dim, dim, 1)


def _begins(batch: int, num_kv_heads: int, per_head: int, device: torch.device) -> Tensor:
    """:func:`_first_rows`, cached. A CUDA graph gets a tensor of its own, because the cache may drop one it still
    reads."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return (_first_rows.__wrapped__ if capturing else _first_rows)(batch, num_kv_heads, per_head, device)


@functools.lru_cache(maxsize=64)
def _first_rows(batch: int, num_kv_heads: int, per_head: int, device: torch.device) -> Tensor:
    """int64 ``[B, Hkv, 1]``: the row at which each head begins."""
    with torch.inference_mode(False):
        return torch.arange(0, batch * num_kv_heads * per_head, per_head, device=device).view(batch, num_kv_heads, 1)
