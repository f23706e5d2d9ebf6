"""Sparse attention over selected compressed keys and a window of raw ones, with sinks (StreamIndex, section 3)."""

from typing import NamedTuple

import torch
from torch import Tensor

from foveate import ops


class Window(NamedTuple):
    """The raw tokens at the end of what each query may read."""

    k: Tensor
    """``[B, Hkv, L, D]``: those of all positions, the queries' own included."""
    v: Tensor
    """``[B, Hkv, L, Dv]``; the same tensor as ``k`` where keys are the values."""
    size: int
    """Tokens that a query sees, itself included."""


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    scaling: float,
    window: Window | None = None,
    offset: int = 0,
    sinks: Tensor | None = None,
) -> ops.Attended:
    """Softmax attention over ``TopK(t) ∪ Window(t)``, computed in two parts that are merged exactly.

    Args:
        q: ``[B, Hq, S, D]``; query i is at position ``offset + i``.
        k, v: ``[B, Hkv, T, D(v)]``: the compressed keys; one tensor may be both.
        indices: int ``[B, S, K]`` of :func:`foveate.csa.lightning_indexer`, -1 for none.
        scaling: factor of the logits.
        window: raw tokens beside them, or None.
        offset: tokens before the first query's.
        sinks: ``[Hq]``: a logit for each head that takes its share of the softmax and has no value, or None.

    Returns:
        Output ``[B, Hq, S, Dv]`` in the dtype of q, and the log-sum-exp ``[B, Hq, S]``, the sink's included.

    Raises:
        ValueError: for a window without the queries' positions or of no size, and sinks of other heads.
    """
    parts = [ops.attend_selected(q, k, v, indices, scaling=scaling)]
    if window is not None:
        end = offset + q.shape[2]
        if window.size < 1 or window.k.shape[2] < end:
            raise ValueError(
                f"window must be of at least 1 token and hold {end} positions, not {window.size} of {window.k.shape[2]}"
            )
        positions = torch.arange(offset, end, device=q.device)[:, None]
        recent = positions + torch.arange(1 - window.size, 1, device=q.device)
        recent = recent.clamp_min(-1).expand(len(q), -1, -1)
        parts.append(ops.attend_selected(q, window.k, window.v, recent, scaling=scaling))
    out, lse, _ = ops.merge(parts)
    if sinks is None:
        return ops.Attended(out, lse)
    if sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks must be one logit for each of {q.shape[1]} heads, not {tuple(sinks.shape)}")
    logits = sinks.float()[:, None]
    return ops.Attended((out.float() * (lse - logits).sigmoid()[..., None]).to(q.dtype), torch.logaddexp(lse, logits))
