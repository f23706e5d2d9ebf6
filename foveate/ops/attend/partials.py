"""Partial results of attention: exact merging, and the share that learned sinks take."""

import functools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from foveate.ops._math import block_length
from foveate.ops.attend.attended import Attended
from foveate.ops.logits import check_sinks


def merge(parts: list[Attended]) -> Attended:
    """Exact attention over the union of disjoint sets of keys, from the attention over each of them.

    Each part is weighted by ``exp(lse_part - lse)``; a part that saw nothing (``lse = -inf``) has weight 0.

    Raises:
        ValueError: for an empty list, or for a part without its log-sum-exp.
    """
    if not parts or any(part.lse is None for part in parts):
        raise ValueError("merge takes at least one part, each with its log-sum-exp (need_lse=True)")
    lses = torch.stack([part.lse for part in parts])
    lse = torch.logsumexp(lses, 0)
    weights = (lses - lse.masked_fill(lse.isneginf(), 0.0)).exp()
    return Attended(_weighted([part.out for part in parts], weights), lse)


def with_sinks(attended: Attended, sinks: Tensor | None) -> Attended:
    """Attention ``[B, Hq, Lq, Dv]`` with learned sinks ``[Hq]``: logits that take a share of the softmax and have no
    value.

    Raises:
        ValueError: for sinks of other heads.
    """
    out, lse, heads = attended.out, attended.lse, attended.out.shape[1]
    if sinks is None:
        return Attended(out, lse)
    check_sinks(sinks, heads)
    total = torch.logaddexp(lse, sinks.float()[:, None])
    share = (lse - total.masked_fill(total.isneginf(), 0.0)).exp()
    return Attended(_weighted([out], [share]), total)


def _weighted(outs: Sequence[Tensor], weights: Sequence[Tensor] | Tensor) -> Tensor:
    """The weighted sum of outputs ``[B, Hq, Lq, Dv]`` with weights fp32 ``[B, Hq, Lq]``, in the outputs' dtype.

    fp32 products and sums exist for one block of queries at a time, in bounded memory.
    """
    first_out = outs[0]
    length = first_out.shape[2]

    def block(first: int, last: int) -> Tensor:
        products = (weight[:, :, first:last, None] * out[:, :, first:last] for weight, out in zip(weights, outs))
        return functools.reduce(operator.add, products).to(first_out.dtype)

    step = block_length(3 * 4 * first_out[:, :, :1].numel(), length)  # a sum, a product, and the sum of both
    if step >= length:
        return block(0, length)
    found = torch.empty_like(first_out)
    for first in range(0, length, step):
        found[:, :, first : first + step] = block(first, first + step)
    return found
