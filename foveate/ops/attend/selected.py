"""Attention of queries that each have their own selection of keys (compressed sparse attention)."""

import torch
from torch import Tensor

from foveate.ops._math import block_length, matmul_fp32
from foveate.ops.attend.reference import Attended, gather_fields


def attend_selected(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *, scaling: float) -> Attended:
    """Attention of every query over the keys that are selected for it, with the log-sum-exp.

    Args:
        q: ``[B, Hq, Lq, D]``.
        k, v: ``[B, Hkv, Lk, D(v)]``; read once where they are one tensor.
        indices: int ``[B, Lq, K]``, or ``[B, Hkv, Lq, K]`` where KV heads have selections of their own; -1 marks an
            unused place. A query without any gets 0, and -inf as its log-sum-exp.

    Raises:
        ValueError: when the selections are not those of the queries.
    """
    batch, num_kv_heads = k.shape[:2]
    length, group = q.shape[2], q.shape[1] // num_kv_heads
    indices = indices[:, None] if indices.dim() == 3 else indices
    if indices.shape[0] != batch or indices.shape[1] not in (1, num_kv_heads) or indices.shape[2] != length:
        raise ValueError(f"indices {tuple(indices.shape)} do not fit {batch} rows of {length} queries")
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
