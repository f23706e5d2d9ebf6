"""Attention under a mask that data decide, with gradients: for training."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

_BLOCK = 128


def attend_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sees: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    *,
    scaling: float,
    reach: int | None = None,
) -> Tensor:
    """Causal attention ``[B, Hq, L, Dv]`` of the pairs that a function allows.

    On a GPU FlexAttention evaluates the function tile by tile, so that no mask of pairs exists; every causal tile is
    computed, whatever the mask leaves of it. Elsewhere the mask is a tensor ``[B, Hq, L, L]``.

    Args:
        q: ``[B, Hq, L, D]``.
        k, v: ``[B, Hkv, L, D(v)]``.
        sees: of row, query head, query and key, int tensors that broadcast: whether the query reads the key. Only keys
            up to the query's own are asked for.
        reach: no query reads a key so far before its own, so that tiles of such pairs are left out; None: any may.
    """
    length, group = q.shape[2], q.shape[1] // k.shape[1]
    if q.device.type == "cuda":
        blocks = _causal_blocks(length, reach, q.device)

        def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & sees(b, h, i, j)

        block_mask = BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=_BLOCK, mask_mod=mask, seq_lengths=(length, length))
        attend = flex_attention if torch.compiler.is_compiling() else _compiled()
        return attend(q, k, v, block_mask=block_mask, scale=scaling, enable_gqa=group > 1)
    rows, heads, columns = (torch.arange(n, device=q.device) for n in (q.shape[0], q.shape[1], length))
    b, h = rows[:, None, None, None], heads[:, None, None]
    i, j = columns[:, None], columns
    seen = (i >= j) & sees(b, h, i, j)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling, enable_gqa=group > 1)


@functools.cache
def _causal_blocks(length: int, reach: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Numbers of key blocks and their indices for every block of queries, all of which the mask is asked about."""
    count = -(-length // _BLOCK)
    last = torch.arange(count, dtype=torch.int32, device=device)
    first = torch.zeros_like(last) if reach is None else ((last * _BLOCK - reach + 1) // _BLOCK).clamp_min(0)
    indices = first[:, None] + torch.arange(count, dtype=torch.int32, device=device)
    return (last - first + 1).to(torch.int32)[None, None], indices.clamp_max(count - 1).to(torch.int32)[None, None]


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)
