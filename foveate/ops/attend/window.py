"""Causal attention over a sliding window and the first keys; and over all keys, under a cap of the logits."""

import torch
from torch import Tensor

from foveate.ops._math import block_length
from foveate.ops.attend.attended import Attended
from foveate.ops.attend.decode import attend
from foveate.ops.attend.dense import attend_causal
from foveate.ops.checks import check_number, check_own_keys
from foveate.ops.kv import KV
from foveate.ops.logits import Logits


def attend_window(
    q: Tensor,
    kv: KV,
    *,
    logits: Logits,
    lower: Tensor,
    sinks: int = 0,
    offset: int = 0,
) -> Attended:
    """Causal attention over the first ``sinks`` keys and a window whose start may move from query to query.

    Args:
        q: ``[B, Hq, Lq, D]``.
        kv: ``k, v [B, Hkv, Lk, D(v)]`` in one piece, with ``Lk >= offset + Lq``.
        lower: int64 ``[Lq]`` on the device of q, non-decreasing. Query i sees the keys ``lower[i] .. offset + i``, and
            the first ``sinks`` keys up to its own key. A query that sees no key gets the output 0.
        sinks: number of keys at the beginning that every query sees.
        offset: number of keys before the first query's own.
        logits: see :func:`attend`.

    Raises:
        ValueError: as :func:`attend`; for fewer than ``offset + Lq`` keys; for a KV in blocks or with lengths; and for
            negative ``sinks`` or ``offset``.
    """
    k, v = kv.k, kv.v
    length = q.shape[2]
    starts, lower = lower.tolist(), lower[:, None]
    width = max(offset + i - start for i, start in enumerate(starts)) + sinks + 512
    step = min(512, block_length(4 * q.shape[1] // k.shape[1] * min(width, offset + length), length))
    slots = torch.arange(offset + length, device=q.device)
    outs = []
    for first in range(0, length, step):
        last = min(first + step, length)
        end = offset + last
        start = min(starts[first], end - 1)
        start = start if start > sinks else 0
        keys, values, seen = k[:, :, start:end], v[:, :, start:end], slots[start:end]
        if start > 0 and sinks > 0:
            keys, values = (torch.cat([x[:, :, :sinks], part], 2) for x, part in ((k, keys), (v, values)))
            seen = torch.cat([slots[:sinks], seen])
        query = slots[offset + first : end, None]
        mask = (seen <= query) & ((seen >= lower[first:last]) | (seen < sinks))
        outs.append(attend(q[:, :, first:last], KV(keys, values), logits=logits, mask=mask[None, None]).out)
    return Attended(torch.cat(outs, 2) if len(outs) > 1 else outs[0])


def check_window(q, kv, *, logits, lower, sinks=0, offset=0):
    """Raise ValueError for invalid arguments of :func:`attend_window`."""
    kv.check_queries(q, values=True)
    kv.check_unpaged()
    check_own_keys(kv.num_keys, q.shape[2], offset)
    check_number("sinks", sinks, 0)
    logits.check_heads(q)
    if lower.shape != q.shape[2:3] or lower.is_floating_point():
        raise ValueError(f"lower must be integers [{q.shape[2]}], not {lower.dtype} {list(lower.shape)}")


def attend_capped(q: Tensor, kv: KV, *, logits: Logits, offset: int) -> Attended:
    """:func:`attend_causal` under a cap, with the log-sum-exp."""
    return attend_causal(q, kv, logits=logits, offset=offset, need_lse=True)
