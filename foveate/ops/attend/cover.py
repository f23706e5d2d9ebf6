"""Attention over a cover: summaries stand for pages of keys, refined pages and a tail are raw (LuKA, Algorithm 1)."""

from typing import NamedTuple

import torch
from torch import Tensor

from foveate.ops._math import fold_group, matmul_fp32, unfold_group


class CoverScores(NamedTuple):
    """Logits of one query per sequence over summaries and tail, heads of a group side by side, fp32."""

    rows: Tensor
    """The query, ``[B, Hkv, G, D]``."""
    scaling: float
    at_summary: Tensor
    """``[B, Hkv, G, P]``."""
    at_tail: Tensor
    """``[B, Hkv, G, T]``."""
    mass: Tensor
    """``[B, Hkv, G, P + T]``: their softmax, equation 1's alpha."""

    @property
    def page_mass(self) -> Tensor:
        """``[B, Hkv, P]``: the mass of each summary, averaged over the heads of the group; sums to at most 1."""
        return self.mass[..., : self.at_summary.shape[-1]].mean(2)


class CoverAttended(NamedTuple):
    """Output over a cover."""

    out: Tensor
    """``[B, Hq, 1, Dv]``."""
    tail_mass: Tensor
    """``[B, Hkv, T]`` fp32: the mass of the tail's tokens, summed over the heads of the group."""


def score_cover(
    q: Tensor,
    summary_k: Tensor,
    tail_k: Tensor,
    *,
    scaling: float,
    summary_used: Tensor | None = None,
    tail_used: Tensor | None = None,
    bias: float = 0.0,
) -> CoverScores:
    """Logits and masses over summaries and tail (LuKA, equation 1).

    Args:
        q: ``[B, Hq, 1, D]``.
        summary_k: ``[B, Hkv, P, D]``.
        tail_k: ``[B, Hkv, T, D]``; at least one of them is used in every row.
        summary_used, tail_used: bool ``[B, 1, P]`` and ``[B, 1, T]``, or None when all are.
        bias: added to the summaries' logits.
    """
    rows = fold_group(q, summary_k.shape[1])
    at_summary = matmul_fp32(rows, summary_k.transpose(-1, -2)).mul_(scaling)
    if bias:
        at_summary += bias
    if summary_used is not None:
        at_summary.masked_fill_(~summary_used[:, :, None], float("-inf"))
    at_tail = matmul_fp32(rows, tail_k.transpose(-1, -2)).mul_(scaling)
    if tail_used is not None:
        at_tail.masked_fill_(~tail_used[:, :, None], float("-inf"))
    return CoverScores(rows, scaling, at_summary, at_tail, torch.cat([at_summary, at_tail], -1).softmax(-1))


def attend_cover(
    scores: CoverScores,
    summary_v: Tensor,
    tail_v: Tensor,
    raw_k: Tensor,
    raw_v: Tensor,
    refined: Tensor,
    *,
    preserve: bool,
    complete: bool,
) -> CoverAttended:
    """Output over unrefined summaries, the tokens of refined pages, and the tail.

    Args:
        scores: from :func:`score_cover`.
        summary_v, tail_v: ``[B, Hkv, P, Dv]``, ``[B, Hkv, T, Dv]``.
        raw_k, raw_v: ``[B, Hkv, K * S, D(v)]``: the tokens of the refined pages, S a page.
        refined: int64 ``[B, Hkv, K]``: which pages these are; -1 marks an unused place, whose tokens may hold anything.
        preserve: True shares a refined summary's mass out among its tokens (equation 3); False lets the tokens enter
            the softmax in the summary's place.
        complete: no place of ``refined`` is unused, which saves masking.
    """
    pages, tokens = scores.at_summary.shape[-1], scores.at_tail.shape[-1]
    page_size = raw_k.shape[2] // refined.shape[2]
    used = refined >= 0
    at_raw = matmul_fp32(scores.rows, raw_k.transpose(-1, -2)).mul_(scores.scaling)
    if not complete:
        unused = ~used.repeat_interleave(page_size, -1)
        at_raw.masked_fill_(unused[:, :, None], float("-inf"))
        raw_v = raw_v.masked_fill(unused[..., None], 0)

    index = refined.clamp_min(0)[:, :, None].expand(-1, -1, scores.rows.shape[2], -1)
    if preserve:
        of_summary, of_tail = scores.mass.split([pages, tokens], -1)
        parent = of_summary.gather(-1, index) * used[:, :, None]
        shares = at_raw.unflatten(-1, (-1, page_size)).softmax(-1).masked_fill(~used[:, :, None, :, None], 0.0)
        of_raw = (shares * parent[..., None]).flatten(-2)
        of_summary = of_summary.scatter_add(-1, index, -parent)
    else:
        replaced = torch.where(used, float("-inf"), 0.0)[:, :, None].expand(index.shape)
        at_summary = scores.at_summary.scatter_add(-1, index, replaced)
        weights = torch.cat([at_summary, at_raw, scores.at_tail], -1).softmax(-1)
        of_summary, of_raw, of_tail = weights.split([pages, at_raw.shape[-1], tokens], -1)

    parts = ((of_summary, summary_v), (of_raw, raw_v), (of_tail, tail_v))
    out = sum(weight.to(value.dtype) @ value for weight, value in parts)
    num_heads = scores.rows.shape[1] * scores.rows.shape[2]
    return CoverAttended(unfold_group(out.to(scores.rows.dtype), num_heads), of_tail.sum(2))
