"""Summaries of pages of keys, at any level: made of tokens, or of the summaries below."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from foveate.ops._math import block_length


class Nodes(NamedTuple):
    """Nodes of a cover: raw tokens, or summaries of the tokens under them. Fields that were not asked for are None."""

    k: Tensor
    """``[B, Hkv, N, D]``, rotated keys as the cache holds them."""
    v: Tensor
    """``[B, Hkv, N, Dv]``."""
    spread: Tensor | None = None
    """``[B, Hkv, N, D]``: variance, around ``k``, of the keys under a node; None for raw tokens."""
    entropy: Tensor | None = None
    """fp32 ``[B, Hkv, N]``, in nats: entropy of the weights with which the tokens under a node enter its summary."""


def summarise(children: Nodes, weights: Tensor | None = None, *, spread: bool = False) -> Nodes:
    """One node for each group of children (LuKA, section 3.2, "Summary Compression Functions"; recursively, any level).

    Args:
        children: fields ``[B, Hkv, N, S, ...]``, S children a group. If ``entropy`` is given (for raw tokens: zeros),
            the result has it, too.
        weights: fp32 ``[B, Hkv, N, S]`` that sum to 1 over a group; None: the mean.
        spread: whether to return the variance, around the summary's key, of the keys under it.

    Returns:
        Fields ``[B, Hkv, N, ...]`` in the children's dtypes; products are accumulated in fp32.
    """
    batch, heads, number, size, dim = children.k.shape
    step = block_length(8 * batch * heads * size * dim, number)
    if step >= number:
        return _summarise(children, weights, spread)
    blocks = [
        _summarise(
            Nodes(*(None if x is None else x[:, :, first : first + step] for x in children)),
            None if weights is None else weights[:, :, first : first + step],
            spread,
        )
        for first in range(0, number, step)
    ]
    return Nodes(*(None if parts[0] is None else torch.cat(parts, 2) for parts in zip(*blocks)))


def _summarise(children: Nodes, weights: Tensor | None, spread: bool) -> Nodes:
    def average(x: Tensor) -> Tensor:
        if weights is None:
            return x.mean(3, dtype=torch.float32)
        return (weights.unsqueeze(3).expand(*x.shape[:3], 1, -1) @ x.float()).squeeze(3)

    variance = entropy = None
    if spread and weights is None and children.spread is None:
        variance, k = torch.var_mean(children.k, 3, correction=0)
    else:
        k = average(children.k)
    v = average(children.v)
    if spread and variance is None:
        variance = average((children.k.float() - k.unsqueeze(3)).square())
        variance = variance if children.spread is None else variance + average(children.spread)
    if variance is not None:
        largest = min(torch.finfo(x).max for x in (children.k.dtype, torch.float32))
        variance = variance.clamp_max(largest).to(children.k.dtype)  # finite in fp16 too
    if children.entropy is not None:
        size = children.k.shape[3]
        own = math.log(size) if weights is None else torch.special.entr(weights).sum(-1)
        entropy = own + average(children.entropy.unsqueeze(-1)).squeeze(-1)
    return Nodes(k.to(children.k.dtype), v.to(children.v.dtype), variance, entropy)
