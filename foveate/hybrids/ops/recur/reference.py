"""The gated delta rule token by token: the specification (Yang et al. 2024, arXiv:2412.06464; laLTE, equation 4)."""

from typing import NamedTuple

import torch
from torch import Tensor

from foveate.ops._math import on_host

EPSILON = 1e-6
"""Added to the squared length of a query or key before it is normalized."""


class Recurred(NamedTuple):
    """What the gated delta rule returns."""

    out: Tensor
    """``[B, H, L, Dv]``, in the dtype of v."""
    state: Tensor
    """fp32 ``[B, H, D, Dv]``, after the last token."""


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, *, state: Tensor | None = None
) -> Recurred:
    """Read a sequence into a state of fixed size and query it after every token.

    Queries and keys are normalized to length 1. Each token decays the state, moves the value that the state holds for
    the token's key by a share ``beta`` towards the token's value, and reads the state with its query::

        S = exp(log_decay) * S
        S = S + beta * k (v - S^T k)^T
        out = S^T q / sqrt(D)

    Args:
        q, k: ``[B, H, L, D]``, normalized here.
        v: ``[B, H, L, Dv]``.
        log_decay: ``[B, H, L]``, at most 0.
        beta: ``[B, H, L]``, in (0, 1).
        state: fp32 ``[B, H, D, Dv]``, of the tokens before; None: there were none.
    """
    check(q, k, v, log_decay, beta, state)
    if state is None:
        state = start(k, v)
    q, k = normalized(q) * q.shape[-1] ** -0.5, normalized(k)
    decay, outs = log_decay.float().exp(), []
    for t in range(q.shape[2]):
        key = k[:, :, t, :, None]
        state = state * decay[:, :, t, None, None]
        new = v[:, :, t, None].float() - (state * key).sum(2, keepdim=True)
        state = state + key * new * beta[:, :, t, None, None].float()
        outs.append((state * q[:, :, t, :, None]).sum(2))
    return Recurred(torch.stack(outs, 2).to(v.dtype), state)


def check(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None) -> None:
    """Raise ValueError for shapes that do not fit together, and on the CPU for a decay that is a growth."""
    sizes = k.shape[:3]
    for name, x in (("q", q), ("v", v)):
        if x.dim() != 4 or x.shape[:3] != sizes:
            raise ValueError(
                f"{name} must be [B, H, L, D] with the B, H and L of k {list(k.shape)}, not {list(x.shape)}"
            )
    if q.shape != k.shape:
        raise ValueError(f"q and k must be of one shape, not {list(q.shape)} and {list(k.shape)}")
    for name, x in (("log_decay", log_decay), ("beta", beta)):
        if x.shape != sizes:
            raise ValueError(f"{name} must be [B, H, L] = {list(sizes)}, not {list(x.shape)}")
    if state is not None and state.shape != (*sizes[:2], k.shape[3], v.shape[3]):
        fits = [*sizes[:2], k.shape[3], v.shape[3]]
        raise ValueError(f"state must be [B, H, D, Dv] = {fits}, not {list(state.shape)}")
    if sizes[2] == 0:
        raise ValueError("q, k and v must hold at least one token")
    if on_host(log_decay) and bool((log_decay > 0).any()):
        raise ValueError(
            f"log_decay must be at most 0, not {log_decay.max().item():g}: the state would grow without end"
        )


def normalized(x: Tensor) -> Tensor:
    """fp32, of length 1 along the last dimension."""
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt()


def start(k: Tensor, v: Tensor) -> Tensor:
    """The state before the first token, fp32 ``[B, H, D, Dv]``."""
    return k.new_zeros(*k.shape[:2], k.shape[3], v.shape[3], dtype=torch.float32)
