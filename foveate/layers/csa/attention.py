"""Sparse attention over selected compressed keys and a window of raw ones, with sinks (StreamIndex, section 3)."""

from typing import NamedTuple

import torch
from torch import Tensor

from foveate import ops
from foveate.ops.attend.selected import check


class Window(NamedTuple):
    """The raw tokens at the end of what each query may read."""

    k: Tensor
    """``[B, Hkv, L, D]``: those before the queries that a query sees, or more, and the queries' own."""
    v: Tensor
    """``[B, Hkv, L, Dv]``; the same tensor as ``k`` where keys are the values."""
    size: int
    """Tokens that a query sees, itself included."""


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor | None,
    *,
    scaling: float,
    window: Window | None = None,
    offset: int = 0,
    positions: Tensor | None = None,
    ratio: int = 1,
    sinks: Tensor | None = None,
) -> ops.Attended:
    """Softmax attention over ``TopK(t) ∪ Window(t)``.

    Args:
        q: ``[B, Hq, S, D]``; query i is number ``offset + i`` of the window's tokens.
        k, v: ``[B, Hkv, T, D(v)]``: the compressed keys; one tensor may be both.
        indices: int ``[B, S, K]`` of :func:`foveate.layers.csa.lightning_indexer`, -1 for none. None: a query at
            position t reads all of the first ``⌊(t + 1) / ratio⌋`` keys (heavily compressed attention).
        scaling: factor of the logits.
        window: raw tokens beside them, or None.
        offset: tokens of the window before the first query's.
        positions: int ``[B, S]``: those of the queries in their rows, which no window reaches beyond; negative for
            padding, which reads nothing. None for ``offset + i``.
        ratio: tokens a key, where ``indices`` is None.
        sinks: ``[Hq]``: a logit for each head that takes its share of the softmax and has no value, or None.

    Returns:
        Output ``[B, Hq, S, Dv]`` in the dtype of q, and the log-sum-exp ``[B, Hq, S]``, the sink's included.

    Raises:
        ValueError: for shapes that do not agree, indices that are not those of keys (on the CPU: what a GPU reads for
            them is not defined), a window without the queries' tokens or of no size, sinks of other heads, and
            ``offset`` or ``ratio`` out of range.
    """
    recent = (None, None, 0) if window is None else window
    check(q, k, v, indices, *recent, offset, sinks)
    if not isinstance(ratio, int) or ratio < 1:
        raise ValueError(f"ratio must be an integer of at least 1, not {ratio!r}")
    shape = q.shape[0], q.shape[2]
    if positions is not None and (positions.shape != shape or positions.dtype not in (torch.int32, torch.int64)):
        raise ValueError(f"positions must be int [B, S] = {list(shape)}, not {positions.dtype} {list(positions.shape)}")
    if indices is not None and positions is None:
        recent = dict(zip(("recent_k", "recent_v", "window"), recent))
        return ops.attend_selected(q, k, v, indices, scaling=scaling, offset=offset, sinks=sinks, **recent)
    end = offset + q.shape[2]
    if positions is None:
        positions = torch.arange(offset, end, device=q.device)[None]
    parts = []
    if indices is not None:
        parts.append(ops.attend_selected(q, k, v, indices, scaling=scaling))
    elif k.shape[2]:
        parts.append(ops.attend_prefix(q, k, v, (positions + 1) // ratio, scaling=scaling))
    if window is not None:
        raw = (x[:, :, :end] for x in (window.k, window.v))
        parts.append(ops.attend_recent(q, *raw, positions + 1, size=window.size, scaling=scaling))
    if not parts:
        parts.append(
            ops.Attended(q.new_zeros(*q.shape[:3], v.shape[3]), q.new_full(q.shape[:3], float("-inf")).float())
        )
    return ops.with_sinks(ops.merge(parts) if len(parts) > 1 else parts[0], sinks)
