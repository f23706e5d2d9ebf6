"""Counting what is read: Triton kernel of :func:`tally`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.ops._dispatch import UnsupportedError

_BLOCK = tl.constexpr(1024)
"""Numbers that are added at once."""


def tally(total: Tensor, numbers: Tensor) -> None:
    """See :func:`foveate.ops._count.tally`. One launch of one program, so that repeats are equal."""
    batch, heads = numbers.shape
    if total.dtype != torch.float64 or numbers.dtype == torch.bool:
        raise UnsupportedError(f"numbers in {numbers.dtype} for a sum in {total.dtype}")
    if numbers.numel():
        _tally[1,](total, numbers, *numbers.stride(), batch, heads, num_warps=4)


@triton.jit(do_not_specialize=["stride_b", "stride_h", "batch", "heads"])
def _tally(total_ptr, number_ptr, stride_b, stride_h, batch, heads):
    """Adds to ``total``."""
    found = tl.zeros([_BLOCK], tl.float64)
    for first in tl.range(0, batch * heads, _BLOCK):
        place = first + tl.arange(0, _BLOCK)
        at = number_ptr + place // heads * stride_b + place % heads * stride_h
        found += tl.load(at, mask=place < batch * heads, other=0).to(tl.float64)
    tl.store(total_ptr, tl.load(total_ptr) + tl.sum(found, 0) / heads)
