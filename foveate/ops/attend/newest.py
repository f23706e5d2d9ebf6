"""Attention of the newest tokens of every row, which the cache holds already."""

import torch
from torch import Tensor

from foveate.ops.attend.attended import Attended
from foveate.ops.attend.decode import attend
from foveate.ops.block_table import BlockTable, in_one_piece
from foveate.ops.logits import Logits


def attend_newest(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    logits: Logits,
    lengths: Tensor | None = None,
    block_table: BlockTable | None = None,
) -> Attended:
    """Causal attention of the last n tokens of every row: the last one reads all keys, the one before it one less.

    What verifies drafts in speculative decoding (Leviathan et al. 2023, arXiv:2211.17192).

    Args:
        q: ``[B, Hq, n, D]``.
        k, v: ``[B, Hkv, N, D]`` and ``[B, Hkv, N, Dv]``, the keys and values of these tokens included.
        logits, block_table: see :func:`attend`.
        lengths: int ``[B]``: only the first so many keys of a row are there, at least n; None: all are.

    Returns:
        ``out [B, Hq, n, Dv]``.
    """
    k, v = in_one_piece(q, block_table, k, v)
    length, number = q.shape[2], k.shape[2]
    ends = torch.full((1,), number, device=q.device) if lengths is None else lengths
    ends = ends[:, None] - torch.arange(length - 1, -1, -1, device=q.device)
    mask = torch.arange(number, device=q.device) < ends[..., None]
    return attend(q, k, v, logits=logits, mask=mask[:, None])
