"""Attention of the newest tokens of every row. The cache already holds their keys and values."""

import torch
from torch import Tensor

from foveate.ops._math import on_host
from foveate.ops.attend.attended import Attended
from foveate.ops.attend.decode import attend, check_attend
from foveate.ops.kv import KV
from foveate.ops.logits import Logits


def check_newest(q, kv, *, logits):
    """Raise ValueError for invalid arguments of :func:`attend_newest`."""
    check_attend(q, kv, logits=logits)
    lengths, number = kv.lengths, kv.num_keys
    if lengths is not None and lengths.dim() != 1:
        raise ValueError(f"lengths must be [{len(q)}], not {list(lengths.shape)}")
    least = int(lengths.min()) if lengths is not None and on_host(lengths) and len(lengths) else number
    if least < q.shape[2]:
        raise ValueError(f"a row has {least} keys, fewer than its {q.shape[2]} newest tokens")


def attend_newest(
    q: Tensor,
    kv: KV,
    *,
    logits: Logits,
) -> Attended:
    """Causal attention of the last n tokens of every row: the last token reads all keys, the token before it one less.

    It verifies drafts in speculative decoding (Leviathan et al. 2023, arXiv:2211.17192).

    Args:
        q: ``[B, Hq, n, D]``.
        kv: see :func:`attend`. It includes the keys and values of these tokens. Its lengths, if it has any, are ``[B]``
            and at least n.
        logits: see :func:`attend`.

    Returns:
        ``out [B, Hq, n, Dv]``.

    Raises:
        ValueError: as :func:`attend`; for lengths of another shape; and for fewer keys than tokens (the values of
            lengths on a GPU are not checked).
    """
    (k, v), lengths = kv.in_one_piece(q), kv.lengths
    length, number = q.shape[2], k.shape[2]
    ends = torch.full((1,), number, device=q.device) if lengths is None else lengths
    ends = ends[:, None] - torch.arange(length - 1, -1, -1, device=q.device)
    mask = torch.arange(number, device=q.device) < ends[..., None]
    return attend(q, KV(k, v), logits=logits, mask=mask[:, None])
