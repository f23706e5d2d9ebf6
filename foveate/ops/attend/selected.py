"""Attention of queries that each have their own selection of keys (compressed sparse attention)."""

import torch
from torch import Tensor

from foveate.ops._math import block_length, matmul_fp32
from foveate.ops.attend.attended import Attended
from foveate.ops.attend.gather import gather_fields
from foveate.ops.attend.partials import merge, with_sinks
from foveate.ops.attend.ranges import attend_recent
from foveate.ops.checks import INTEGERS, check_number
from foveate.ops.kv import KV
from foveate.ops.logits import check_sinks


def attend_selected(
    q: Tensor,
    kv: KV,
    indices: Tensor,
    *,
    scaling: float,
    recent: KV | None = None,
    window: int = 0,
    offset: int = 0,
    sinks: Tensor | None = None,
) -> Attended:
    """Attention of every query over its selected keys and over a window of recent keys, with the log-sum-exp.

    Args:
        q: ``[B, Hq, Lq, D]``; query i is at position ``offset + i``.
        kv: ``k, v [B, Hkv, Lk, D(v)]`` in one piece, from which keys are selected. If k and v are one tensor, it is
            read once.
        indices: int ``[B, Lq, K]``, or ``[B, Hkv, Lq, K]`` if each KV head has its own selection; below Lk. -1, and no
            other negative number, marks an unused place. A query without any key gets the output 0 and the log-sum-exp
            -inf.
        scaling: factor of the logits.
        recent: ``k, v [B, Hkv, L, D(v)]`` in one piece: keys and values of all positions. A query sees the last
            ``window`` of them up to its own position. None: there is no window.
        window: number of recent positions that a query sees, its own included; 0: none.
        offset: number of positions before the first query.
        sinks: ``[Hq]``: a logit for each head that takes its share of the softmax and has no value; None: no sinks.

    Returns:
        Output ``[B, Hq, Lq, Dv]`` in the dtype of q, and the log-sum-exp, fp32 ``[B, Hq, Lq]``, the sink's included.

    Raises:
        ValueError: for a KV that does not fit the queries, is in blocks or has lengths; for selections of another shape
            than the queries or not of integers; for a window that lacks the queries' positions; and for sinks of other
            heads. On the CPU also for an index outside the keys; a GPU does not wait for this check, and its result is
            then undefined.
    """
    indices = check(q, kv, indices, recent, window, offset, sinks)
    parts = [_attend(q, kv.k, kv.v, indices, scaling)]
    if window:
        end = offset + q.shape[2]
        counts = torch.arange(offset + 1, end + 1, device=q.device)[None]
        seen = KV(recent.k[:, :, :end], recent.v[:, :, :end])
        parts.append(attend_recent(q, seen, counts, size=window, scaling=scaling))
    return with_sinks(merge(parts), sinks)


def check(q, kv, indices, recent, window, offset, sinks):
    """Check the arguments of :func:`attend_selected`.

    Returns the indices as ``[B, Hkv or 1, Lq, K]``, or None if there are none. Raises ValueError for invalid arguments.
    The values of indices are checked on the CPU alone, because a GPU would have to wait.
    """
    kv.check_queries(q, values=True)
    kv.check_unpaged()
    check_number("offset", offset, 0)
    check_sinks(sinks, q.shape[1])
    batch, _, length, dim = q.shape
    num_kv_heads, keys = kv.k.shape[1], kv.num_keys
    if indices is not None:
        indices = _checked(indices, batch, num_kv_heads, length, keys)
    if window or recent is not None:
        end, number = offset + length, 0 if recent is None or recent.v is None else recent.num_keys
        if window < 1 or number < end:
            raise ValueError(f"window must be of at least 1 token and hold {end} positions, not {window} of {number}")
        recent.check_unpaged()
        shapes = (batch, num_kv_heads, number, dim), (batch, num_kv_heads, number, kv.v.shape[3])
        if (recent.k.shape, recent.v.shape) != shapes:
            raise ValueError(f"shapes do not fit: window {tuple(recent.k.shape)} and {tuple(recent.v.shape)}")
    return indices


def _checked(indices: Tensor, batch: int, num_kv_heads: int, length: int, number: int) -> Tensor:
    if indices.dtype not in INTEGERS:
        raise ValueError(f"indices must be int8, int16, int32 or int64, not {indices.dtype}")
    shape = tuple(indices.shape)
    indices = indices[:, None] if indices.dim() == 3 else indices
    heads = 1, num_kv_heads
    if indices.dim() != 4 or indices.shape[0] != batch or indices.shape[1] not in heads or indices.shape[2] != length:
        raise ValueError(f"indices {shape} do not fit {batch} rows of {length} queries")
    if indices.device.type == "cpu" and indices.numel():
        least, most = indices.min().item(), indices.max().item()
        if least < -1 or most >= number:
            wrong = least if least < -1 else most
            raise ValueError(f"indices must be those of {number} keys, from 0 on, or -1 for none, not {wrong}")
    return indices


def _attend(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scaling: float) -> Attended:
    """Attention over the selected keys, without the window; ``indices [B, Hkv or 1, Lq, K]``."""
    if not k.shape[2]:
        return Attended(q.new_zeros(*q.shape[:3], v.shape[3]), q.new_full(q.shape[:3], float("-inf")).float())
    batch, num_kv_heads = k.shape[:2]
    length, group = q.shape[2], q.shape[1] // num_kv_heads
    rows = q.unflatten(1, (num_kv_heads, group)).transpose(2, 3)  # [B, Hkv, Lq, G, D]
    width = k.shape[3] + v.shape[3] + 2 * group
    step = block_length(4 * batch * num_kv_heads * max(1, indices.shape[3]) * width, length)
    outs, lses = [], []
    for first in range(0, length, step):
        chosen = indices[:, :, first : first + step].expand(-1, num_kv_heads, -1, -1)
        unused = chosen < 0
        gathered = gather_fields([k] if v is k else [k, v], chosen.flatten(2, 3))
        keys, values = (x.unflatten(2, chosen.shape[2:]) for x in (gathered[0], gathered[-1]))
        logits = matmul_fp32(rows[:, :, first : first + step], keys.transpose(-1, -2)) * scaling
        logits = logits.masked_fill(unused[:, :, :, None], float("-inf"))
        lse = logits.logsumexp(-1)
        weights = (logits - lse.masked_fill(lse.isneginf(), 0.0)[..., None]).exp()
        values = values.masked_fill(unused[..., None], 0.0)
        outs.append(matmul_fp32(weights.to(values.dtype), values).to(q.dtype))
        lses.append(lse)
    out, lse = torch.cat(outs, 2).transpose(2, 3).flatten(1, 2), torch.cat(lses, 2).transpose(2, 3).flatten(1, 2)
    return Attended(out, lse)
