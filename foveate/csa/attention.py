"""Sparse attention over selected compressed keys and a window of raw ones, with sinks (StreamIndex, section 3)."""

from typing import NamedTuple

import torch
from torch import Tensor

from foveate import ops
from foveate.ops.attend import attend_prefix, attend_recent, attend_selected
from foveate.ops.attend.selected import check
from foveate.ops.checks import check_number


class Window(NamedTuple):
    """The recent tokens, uncompressed, that each query reads besides the selected keys."""

    k: Tensor
    """``[B, Hkv, L, D]``: at least the ``size - 1`` tokens before the first query, and the queries' own."""
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
        q: ``[B, Hq, S, D]``; query i is token ``offset + i`` of the window.
        k, v: ``[B, Hkv, T, D(v)]``: the compressed keys; one tensor may be both.
        indices: int ``[B, S, K]`` of :func:`foveate.csa.lightning_indexer`, -1 for none. None: a query at
            position t reads all of the first ``⌊(t + 1) / ratio⌋`` keys (heavily compressed attention).
        scaling: factor of the logits.
        window: recent tokens read uncompressed, or None.
        offset: tokens of the window before the first query.
        positions: int ``[B, S]``: each query's position in its row. The window stops at position 0 of the row. A
            query at a negative position is padding and reads nothing. None means ``offset + i``.
        ratio: tokens that a key stands for; used if ``indices`` is None.
        sinks: ``[Hq]``: a logit for each head that enters the softmax without a value, or None.

    Returns:
        Output ``[B, Hq, S, Dv]`` in the dtype of q, and the log-sum-exp ``[B, Hq, S]``, sink included.

    Raises:
        ValueError: for shapes that do not agree, an index beyond the keys (on the CPU only: on a GPU the result is then
            undefined), a window of size 0 or without the queries' tokens, sinks of another number of heads, and
            ``offset`` or ``ratio`` out of range.
    """
    kv = ops.KV(k, v)
    recent, size = (None, 0) if window is None else (ops.KV(window.k, window.v), window.size)
    check(q, kv, indices, recent, size, offset, sinks)
    check_number("ratio", ratio, 1)
    shape = q.shape[0], q.shape[2]
    if positions is not None and (positions.shape != shape or positions.dtype not in (torch.int32, torch.int64)):
        raise ValueError(f"positions must be int [B, S] = {list(shape)}, not {positions.dtype} {list(positions.shape)}")
    if indices is not None and positions is None:
        how = {"recent": recent, "window": size, "offset": offset, "sinks": sinks}
        return attend_selected(q, kv, indices, scaling=scaling, **how)
    end = offset + q.shape[2]
    if positions is None:
        positions = torch.arange(offset, end, device=q.device)[None]
    parts = []
    if indices is not None:
        parts.append(attend_selected(q, kv, indices, scaling=scaling))
    elif k.shape[2]:
        parts.append(attend_prefix(q, kv, (positions + 1) // ratio, scaling=scaling))
    if window is not None:
        seen = ops.KV(window.k[:, :, :end], window.v[:, :, :end])
        parts.append(attend_recent(q, seen, positions + 1, size=size, scaling=scaling))
    if not parts:
        parts.append(
            ops.Attended(q.new_zeros(*q.shape[:3], v.shape[3]), q.new_full(q.shape[:3], float("-inf")).float())
        )
    return ops.with_sinks(ops.merge(parts) if len(parts) > 1 else parts[0], sinks)
