"""Attention of queries that each read their own range of keys: the first keys, or the keys up to the query's own."""

import torch
from torch import Tensor

from foveate.ops._math import block_length
from foveate.ops.attend.attended import Attended
from foveate.ops.attend.decode import attend
from foveate.ops.kv import KV
from foveate.ops.logits import Logits

_FEWEST = 256
"""Least number of queries of a block, where memory allows, when the window is shorter."""


def attend_prefix(q: Tensor, kv: KV, counts: Tensor, *, scaling: float) -> Attended:
    """Attention of every query over the first keys, with the log-sum-exp, in blocks of queries.

    Args:
        q: ``[B, Hq, Lq, D]``.
        kv: ``k, v [B, Hkv, Lk, D(v)]`` in one piece.
        counts: int ``[B, Lq]`` or ``[1, Lq]``: the number of keys that a query reads. A number below 0 counts as 0, and
            one beyond Lk as Lk. A query that reads no key gets the output 0 and the log-sum-exp -inf.

    Raises:
        ValueError: as :func:`attend`; for a KV in blocks or with lengths; and for counts that do not fit the queries.
    """
    _check(q, kv, counts)
    length, keys = q.shape[2], torch.arange(kv.num_keys, device=q.device)
    step = block_length(4 * q.shape[0] * q.shape[1] * kv.num_keys, length)
    return _joined(
        [
            _block(q, kv, slice(first, first + step), keys < counts[:, first : first + step, None], scaling)
            for first in range(0, length, step)
        ]
    )


def attend_recent(q: Tensor, kv: KV, counts: Tensor, *, size: int, scaling: float) -> Attended:
    """Attention of every query over the keys up to its own, with the log-sum-exp, in blocks of queries.

    Args:
        q: ``[B, Hq, Lq, D]``. The last Lq keys are the queries' own keys.
        kv: ``k, v [B, Hkv, Lk, D(v)]`` in one piece, with ``Lk >= Lq``.
        counts: int ``[B, Lq]`` or ``[1, Lq]``: the number of keys that a query reads, its own included. A number below
            0 counts as 0.
        size: an upper bound of the keys that a query reads, whatever its count.

    Raises:
        ValueError: as :func:`attend_prefix`, and when there are fewer keys than queries.
    """
    _check(q, kv, counts)
    k, v = kv.k, kv.v
    length, before = q.shape[2], k.shape[2] - q.shape[2]
    if before < 0 or size < 1:
        raise ValueError(f"k must hold the {length} queries' own keys and size be at least 1, not {k.shape[2]}, {size}")
    step = max(size, _FEWEST)
    step = min(step, block_length(4 * q.shape[0] * q.shape[1] * (step + size), length))
    parts = []
    for first in range(0, length, step):
        some = slice(first, min(first + step, length))
        low, high = max(0, before + first + 1 - size), before + some.stop
        own = torch.arange(before + first, high, device=q.device)[:, None]
        age = own - torch.arange(low, high, device=q.device)
        mask = (age >= 0) & (age < counts[:, some, None].clamp_max(size))
        parts.append(_block(q, KV(k[:, :, low:high], v[:, :, low:high]), some, mask, scaling))
    return _joined(parts)


def _check(q: Tensor, kv: KV, counts: Tensor) -> None:
    kv.check_queries(q, values=True)
    kv.check_unpaged()
    if counts.dim() != 2 or counts.shape[0] not in (1, q.shape[0]) or counts.shape[1] != q.shape[2]:
        raise ValueError(f"counts {tuple(counts.shape)} do not fit {q.shape[0]} rows of {q.shape[2]} queries")


def _block(q: Tensor, kv: KV, some: slice, mask: Tensor, scaling: float) -> Attended:
    mask = mask[:, None].expand(q.shape[0], -1, -1, -1)
    return attend(q[:, :, some], kv, logits=Logits(scaling), mask=mask, need_lse=True)


def _joined(parts: list[Attended]) -> Attended:
    if len(parts) == 1:
        return parts[0]
    return Attended(torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2))
