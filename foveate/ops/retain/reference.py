"""What stays in the cache: the best slots at once, or all but the weakest, one step at a time."""

import torch
from torch import Tensor

from foveate.ops.select import topk


def keep_best(scores: Tensor, k: int, protected: Tensor) -> Tensor:
    """Slots to keep: every protected one and the k best of the others, ties to the smaller slot.

    Args:
        scores: fp32 ``[B, Hkv, S]``, larger is better; -inf is never kept unless protected.
        k: how many unprotected slots to keep.
        protected: bool, broadcastable to ``[B, Hkv, S]``, with the same number of True in every row.

    Returns:
        int64 ``[B, Hkv, K]`` ascending.
    """
    protected = protected.expand(scores.shape)
    count = int(protected[0, 0].sum())
    ranked = scores.masked_fill(protected, float("inf"))
    return (
        topk(ranked, min(k + count, scores.shape[-1]))
        if k + count
        else scores.new_empty((*scores.shape[:-1], 0), dtype=torch.int64)
    )


def weakest(scores: Tensor, eligible: Tensor, positions: Tensor) -> Tensor:
    """The slot to give up: the smallest score among the eligible, ties to the larger position.

    So what stays is what :func:`keep_best` would keep, wherever in the cache the tokens lie.

    Args:
        scores: fp32 ``[B, Hkv, S]``.
        eligible: bool ``[B, Hkv, S]`` with at least one True in every row that matters.
        positions: int ``[B, Hkv, S]``, the tokens' original positions.

    Returns:
        int64 ``[B, Hkv]``.
    """
    scores = scores.masked_fill(~eligible, float("inf"))
    tied = (scores == scores.amin(-1, keepdim=True)) & eligible
    return positions.masked_fill(~tied, -1).argmax(-1)
