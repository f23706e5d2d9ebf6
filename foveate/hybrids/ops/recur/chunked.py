"""The gated delta rule in chunks of tokens, by matrix products: for prompts and training, on any device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from foveate.hybrids.ops.recur.reference import Recurred, check, normalized, start

CHUNK = 64


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, *, state: Tensor | None = None
) -> Recurred:
    """As the reference's, of the same arguments.

    What the tokens of a chunk write depends on one another through a unit lower-triangular system, which is solved for
    all chunks at once (the WY form; Yang et al. 2024, arXiv:2406.06484). The states then follow chunk by chunk. Every
    exponent is at most 0, so no decay overflows.
    """
    check(q, k, v, log_decay, beta, state)
    with torch.autocast(q.device.type, enabled=False):  # the state is fp32, and so is all that is added to it
        return _in_chunks(q, k, v, log_decay, beta, start(k, v) if state is None else state)


def _in_chunks(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> Recurred:
    length = q.shape[2]
    q, k = normalized(q) * q.shape[-1] ** -0.5, normalized(k)
    beta = beta.float()[..., None]
    q, k, written, read = (_chunks(x) for x in (q, k, beta * v.float(), beta * k))
    reach = _chunks(log_decay.float()[..., None]).squeeze(-1).cumsum(-1)  # [B, H, N, C]: decay since the chunk began
    between = (reach[..., :, None] - reach[..., None, :]).tril().exp().tril()
    system = (read @ k.mT) * between
    since = reach.exp()[..., None]
    both = torch.cat([written, read * since], -1)
    both = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    written, read = both.split([v.shape[3], k.shape[4]], -1)
    among = (q @ k.mT) * between
    q, left = q * since, k * (reach[..., -1:] - reach).exp()[..., None]
    end = reach[..., -1].exp()[..., None, None]
    outs = []
    for n in range(q.shape[2]):
        new = written[:, :, n] - read[:, :, n] @ state
        outs.append(q[:, :, n] @ state + among[:, :, n] @ new)
        state = state * end[:, :, n] + left[:, :, n].mT @ new
    return Recurred(torch.cat(outs, 2)[:, :, :length].to(v.dtype), state)


def _chunks(x: Tensor) -> Tensor:
    """``[B, H, L, D]`` to ``[B, H, N, C, D]``; the tokens that fill up the last chunk change no state."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % CHUNK)).unflatten(2, (-1, CHUNK))
