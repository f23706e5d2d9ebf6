"""Attention to keys that come and go: each is seen from its own query on, until a certain one."""

import torch
from torch import Tensor

from foveate.ops._math import block_length
from foveate.ops.attend.attended import Attended
from foveate.ops.attend.decode import attend
from foveate.ops.kv import KV
from foveate.ops.logits import Logits

LARGEST_DIM = 128
"""The largest head dim that the kernel takes."""


def attend_until(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    until: Tensor,
    *,
    scaling: float,
    window: int = 0,
    retained: int = 0,
) -> Attended:
    """Attention of a prompt's queries, where each key is visible to a run of queries.

    The last ``Lq`` keys belong to the queries' own tokens: a key is visible from its own token's query on. Earlier keys
    are visible from the first query on. ``until`` ends a key's run. No tensor of queries times keys exists.

    Args:
        q: ``[B, Hq, Lq, D]``.
        k, v: ``[B, Hkv, Lk, D]``, ``[B, Hkv, Lk, Dv]`` with ``Lk >= Lq``; keys that nothing sees may hold anything
            finite.
        until: int ``[B, Hkv, Lk]``: the queries before this one see the key; 0 or less: none does.
        scaling: factor of the logits.
        window: a query sees nearly all of the ``window`` keys before its own key.
        retained: about how many keys before the window a query sees. ``window`` and ``retained`` affect only the speed,
            not the output.
    """
    check(q, k, v, until, window, retained)
    length, number = q.shape[2], k.shape[2]
    come = torch.arange(length - number, length, device=q.device)
    step, outs = block_length(len(q) * q.shape[1] * number, length), []
    for first in range(0, length, step):
        some = q[:, :, first : first + step]
        at = torch.arange(first, first + some.shape[2], device=q.device)[:, None]
        mask = (come <= at) & (at < until[:, :, None])
        outs.append(attend(some, KV(k, v), logits=Logits(scaling), mask=mask).out)
    return Attended(torch.cat(outs, 2) if len(outs) > 1 else outs[0])


def check(q: Tensor, k: Tensor, v: Tensor, until: Tensor, window: int, retained: int) -> None:
    """Raise unless shapes and sizes fit."""
    fits = k.shape == (*v.shape[:3], q.shape[3]) and len(q) == len(k) and q.shape[2] <= k.shape[2]
    if not fits or q.shape[1] % k.shape[1] or until.shape != k.shape[:3]:
        given = {"q": q, "k": k, "v": v, "until": until}
        raise ValueError("shapes do not fit: " + ", ".join(f"{name} {tuple(x.shape)}" for name, x in given.items()))
    if window < 0 or retained < 0:
        raise ValueError(f"window and retained must be at least 0, not {window} and {retained}")
