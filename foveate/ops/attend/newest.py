"""Attention of the newest tokens of every row, which the cache holds already."""

import torch
from torch import Tensor

from foveate.ops._math import on_host
from foveate.ops.attend.attended import Attended
from foveate.ops.attend.decode import attend, check_attend
from foveate.ops.block_table import BlockTable, in_one_piece, number_of_keys
from foveate.ops.logits import Logits


def check_newest(q, k, v, *, logits, lengths=None, block_table=None):
    """Raise for arguments of :func:`attend_newest` that cannot be."""
    check_attend(q, k, v, logits=logits, lengths=lengths, block_table=block_table)
    number = number_of_keys(k, block_table)
    if lengths is not None and lengths.dim() != 1:
        raise ValueError(f"lengths must be [{len(q)}], not {list(lengths.shape)}")
    least = int(lengths.min()) if lengths is not None and on_host(lengths) and len(lengths) else number
    if least < q.shape[2]:
        raise ValueError(f"a row has {least} keys, fewer than its {q.shape[2]} newest tokens")


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
        lengths: int ``[B]``: how many keys each row has, at least n; None: all.

    Returns:
        ``out [B, Hq, n, Dv]``.

    Raises:
        ValueError: as :func:`attend`, for lengths of another shape, and for fewer keys than tokens (lengths on a GPU
            are not looked at).
    """
    k, v = in_one_piece(q, block_table, k, v)
    length, number = q.shape[2], k.shape[2]
    ends = torch.full((1,), number, device=q.device) if lengths is None else lengths
    ends = ends[:, None] - torch.arange(length - 1, -1, -1, device=q.device)
    mask = torch.arange(number, device=q.device) < ends[..., None]
    return attend(q, k, v, logits=logits, mask=mask[:, None])
