"""Attention over a cover, in PyTorch: steps of the reference of :func:`attend_summaries` (LuKA, Algorithm 1).

Here a :class:`Part` of a cover is a set of entries (tokens or nodes) with their log-weights and values. Refining
removes nodes from one part and adds their children as another; the softmax is over all parts.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from foveate.ops._math import matmul_fp32, unfold_group


class Part(NamedTuple):
    """Some entries of a cover, for one query per row; G query heads of a KV head."""

    logits: Tensor
    """fp32 ``[B, Hkv, G, N]``: natural log-weights; -inf at places without a node and for refined nodes."""
    v: Tensor
    """``[B, Hkv, N, Dv]``, finite everywhere."""


def refine(
    parents: Tensor, chosen: Tensor, children: Tensor, *, preserve: bool, complete: bool = False
) -> tuple[Tensor, Tensor]:
    """Replace chosen nodes by their children.

    Args:
        parents: fp32 ``[B, Hkv, G, N]``: log-weights of a part.
        chosen: int64 ``[B, Hkv, K]``: places in this part, each at most once; -1 marks an unused place.
        children: fp32 ``[B, Hkv, G, K, S]``: the children's logits; -inf at places without a child.
        preserve: True: children share their parent's mass (LuKA, equations 2 and 3); False: they enter the softmax with
            their own logits.
        complete: whether ``chosen`` has no -1.

    Returns:
        ``(parents, children)``: the log-weights of the part, ``[B, Hkv, G, N]`` with -inf for the chosen nodes, and the
        log-weights of the children, ``[B, Hkv, G, K * S]``.
    """
    index = (chosen if complete else chosen.clamp_min(0))[:, :, None].expand(-1, -1, parents.shape[2], -1)
    if preserve:
        mass = parents.gather(-1, index)
        children = children.log_softmax(-1) + mass[..., None]
    if complete:
        return parents.scatter(-1, index, float("-inf")), children.flatten(-2)
    used = (chosen >= 0)[:, :, None]
    children = children.masked_fill(~used[..., None], float("-inf"))
    gone = torch.where(used, float("-inf"), 0.0).expand(index.shape)
    return parents.scatter_add(-1, index, gone), children.flatten(-2)


def attend_cover(parts: list[Part]) -> tuple[Tensor, Tensor]:
    """Attention output over all parts of a cover (LuKA, equation 4).

    Returns:
        ``(out [B, Hq, 1, Dv], masses)``: ``masses`` is the softmax over all parts, concatenated in their order, fp32
        ``[B, Hkv, G, sum of their N]``.
    """
    masses = torch.cat([part.logits for part in parts], -1).softmax(-1)
    split = masses.split([part.logits.shape[-1] for part in parts], -1)
    terms = (matmul_fp32(mass.to(part.v.dtype), part.v) for mass, part in zip(split, parts))
    out = functools.reduce(torch.add, terms)
    num_heads = out.shape[1] * out.shape[2]
    return unfold_group(out.to(parts[0].v.dtype), num_heads), masses
