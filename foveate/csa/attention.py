"""Sparse attention over selected compressed keys and a window of raw ones, with sinks (StreamIndex, section 3)."""

from typing import NamedTuple

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
    """Softmax attention over ``TopK(t) ∪ Window(t)``.

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
    if window is None:
        return ops.attend_selected(q, k, v, indices, scaling=scaling, sinks=sinks)
    return ops.attend_selected(
        q,
        k,
        v,
        indices,
        scaling=scaling,
        recent_k=window.k,
        recent_v=window.v,
        window=window.size,
        offset=offset,
        sinks=sinks,
    )
