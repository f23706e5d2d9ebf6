"""Counting what is read: Triton kernel of :func:`tally`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.ops._dispatch import UnsupportedError

_BLOCK = tl.constexpr(1024)
"""Numbers that are added at once."""


def tally(*counted: Tensor) -> None:
    """See :func:`foveate.ops._count.tally`. One launch, of a program for each total, so that repeats are equal."""
    if len(counted) not in (2, 4):
        raise ValueError(f"{len(counted)} tensors, not one or two totals with their numbers")
    totals, numbers = counted[::2], counted[1::2]
    if any(x.dtype != torch.float64 for x in totals) or any(x.dtype == torch.bool for x in numbers):
        raise UnsupportedError(f"numbers in {[x.dtype for x in numbers]} for sums in {[x.dtype for x in totals]}")
    arguments = [(total, x, *x.stride(), *x.shape) for total, x in zip(totals, numbers)]
    _tally[len(totals),](*arguments[0], *arguments[-1], num_warps=4)


@triton.jit
def _add(total_ptr, number_ptr, stride_b, stride_h, batch, heads):
    """Adds to ``total``."""
    found = tl.zeros([_BLOCK], tl.float64)
    for first in tl.range(0, batch * heads, _BLOCK):
        place = first + tl.arange(0, _BLOCK)
        at = number_ptr + place // heads * stride_b + place % heads * stride_h
        found += tl.load(at, mask=place < batch * heads, other=0).to(tl.float64)
    tl.store(total_ptr, tl.load(total_ptr) + tl.sum(found, 0) / heads)


_SIZES = [f"{which}_{size}" for which in ("first", "second") for size in ("stride_b", "stride_h", "batch", "heads")]


@triton.jit(do_not_specialize=_SIZES)
def _tally(
    first_total_ptr,
    first_ptr,
    first_stride_b,
    first_stride_h,
    first_batch,
    first_heads,
    second_total_ptr,
    second_ptr,
    second_stride_b,
    second_stride_h,
    second_batch,
    second_heads,
):
    """The first program adds to one total, the second to the other."""
    if tl.program_id(0) == 0:
        _add(first_total_ptr, first_ptr, first_stride_b, first_stride_h, first_batch, first_heads)
    else:
        _add(second_total_ptr, second_ptr, second_stride_b, second_stride_h, second_batch, second_heads)
