"""Attention over whole sequences without a cache, as in training: the method's prefill, differentiable."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from foveate.methods import Method, sparse_prompt
from foveate.ops import KV, Logits, Rotary, attend_causal
from foveate.state.borrowed import cache_of


def without_cache(
    method: Method,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    logits: Logits,
    forward: dict[Hashable, Any],
    rotary: Rotary | None = None,
) -> Tensor:
    """Attention of a prompt by its method, without a cache: ``[B, Hq, n, Dv]``, differentiable; 0 at padding.

    Args:
        q, k, v: ``[B, Hq, n, D]`` and ``[B, Hkv, n, D(v)]``.
        mask: ``[B, n]``, nonzero for real tokens; None: all are real. Reading it is a host sync.
        logits: how the layer's logits are made.
        forward: shared by the layers of this forward pass, see :meth:`SlotCache.shared_key`.
        rotary: how queries and keys are rotated, for methods with :attr:`Method.needs_rotary`.

    Raises:
        ValueError: for a prompt in which the method would evict.
    """
    every = method.prompt_evicts_every
    if 0 < every < q.shape[2]:
        raise ValueError(
            f"{method.spec} evicts while {q.shape[2]} tokens are read, and gradients do not flow through what it "
            "evicts: let it evict at the end of a prompt alone, or read under torch.no_grad()"
        )

    def attend_row(q: Tensor, k: Tensor, v: Tensor, row: int | None = None) -> Tensor:
        if sparse_prompt(method) and not every:
            cache = cache_of(k, v, q.shape[1], forward, row, logits)
            cache.rotary = rotary
            return method.prompt(cache, q, logits.scaling).out
        return attend_causal(q, KV(k, v), logits=logits).out

    if mask is None or bool(mask.all()):
        return attend_row(q, k, v)
    rows = []
    for b, real in enumerate(row.nonzero()[:, 0] for row in mask.bool()):
        one = q.new_zeros(q.shape[1], q.shape[2], v.shape[3])
        if len(real):
            one = one.index_copy(1, real, attend_row(*(x[b : b + 1, :, real] for x in (q, k, v)), b)[0])
        rows.append(one)
    return torch.stack(rows)
