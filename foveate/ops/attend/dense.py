"""Dense causal attention in blocks of queries: the reference for libraries and kernels."""

import torch
from torch import Tensor

from foveate.ops._math import block_length
from foveate.ops.attend.attended import Attended
from foveate.ops.attend.decode import attend
from foveate.ops.kv import KV
from foveate.ops.logits import Logits


def attend_causal(
    q: Tensor,
    kv: KV,
    *,
    logits: Logits,
    offset: int = 0,
    need_lse: bool = False,
) -> Attended:
    """Dense causal attention of a block of queries: query i sees the keys ``0 .. offset + i``.

    Blocks of queries are computed one after another over all the keys that they may see, so that no ``Lq x Lk`` tensor
    exists. The arguments are not checked; :func:`foveate.ops.attend_causal` checks them before it calls this function.

    Args:
        q: ``[B, Hq, Lq, D]``.
        kv: ``k, v [B, Hkv, Lk, D(v)]`` in one piece, with ``Lk >= offset + Lq``. Keys from ``offset + Lq`` on are not
            read.
        offset: number of keys before the first query's own.
        logits: see :func:`attend`.
    """
    k, v = kv.k, kv.v
    batch, num_heads, length = q.shape[:3]
    step = block_length(4 * batch * num_heads * (offset + length), length)
    parts = []
    for first in range(0, length, step):
        last = min(first + step, length)
        end = offset + last
        query = torch.arange(offset + first, end, device=q.device)[:, None]
        mask = torch.arange(end, device=q.device) <= query
        some = KV(k[:, :, :end], v[:, :, :end])
        parts.append(attend(q[:, :, first:last], some, logits=logits, mask=mask[None, None], need_lse=True))
    lse = torch.cat([part.lse for part in parts], 2) if need_lse else None
    return Attended(torch.cat([part.out for part in parts], 2), lse)
