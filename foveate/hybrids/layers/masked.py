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
            up to the query's own are asked for. What it reads from memory should be integers, one for each query or
            each key: a kernel of FlexAttention that loads booleans has too few registers (on an H100, 2,048 tokens of
            6 heads in 32 rows took 19.5 ms so, and dense attention 0.27).
        reach: no query reads a key so far before its own, so that tiles of such pairs are left out; None: any may.
    """
    attend = _attend_tiles if q.device.type == "cuda" else _attend_pairs
    return attend(q, k, v, sees, scaling, reach)


def _attend_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sees: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    scaling: float,
    reach: int | None,
) -> Tensor:
    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & sees(b, h, i, j)

    length, compiling = q.shape[2], torch.compiler.is_compiling()
    tables = (_tables if compiling else _kept_tables)(length, reach, q.device)
    block_mask = BlockMask((length, length), **tables, BLOCK_SIZE=(_BLOCK, _BLOCK), mask_mod=mask)
    attend = flex_attention if compiling else _compiled()

    return attend(q, k, v, block_mask=block_mask, scale=scaling, enable_gqa=q.shape[1] > k.shape[1])


def _attend_pairs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sees: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    scaling: float,
    reach: int | None,
) -> Tensor:
    rows, heads, columns = (torch.arange(n, device=q.device) for n in q.shape[:3])
    b, h = rows[:, None, None, None], heads[:, None, None]
    i, j = columns[:, None], columns
    seen = (i >= j) & sees(b, h, i, j)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling, enable_gqa=q.shape[1] > k.shape[1])


def _tables(length: int, reach: int | None, device: torch.device) -> dict[str, Tensor | None]:
    """Which blocks of keys a block of queries reads, and the inverse: numbers ``[1, 1, N]``, indices ``[1, 1, N, N]``.

    The mask is asked about every block. Both directions follow from arithmetic, so that torch.compile, which makes the
    tables in every step, makes them without a sort.
    """
    at = torch.arange(-(-length // _BLOCK), dtype=torch.int32, device=device)
    last = len(at) - 1
    ranges = {"kv": (torch.zeros_like(at), at), "q": (at, torch.full_like(at, last))}
    if reach is not None:
        first_read = (at * _BLOCK - reach + 1).div(_BLOCK, rounding_mode="floor").clamp_min(0)
        last_reader = ((at + 1) * _BLOCK + reach - 2).div(_BLOCK, rounding_mode="floor").clamp_max(last)
        ranges = {"kv": (first_read, at), "q": (at, last_reader)}
    tables: dict[str, Tensor | None] = {}
    for side, (begin, end) in ranges.items():
        tables[f"{side}_num_blocks"] = (end - begin + 1)[None, None]
        tables[f"{side}_indices"] = (begin[:, None] + at).clamp_max(last)[None, None]
        tables[f"full_{side}_num_blocks"] = tables[f"full_{side}_indices"] = None
    return tables


@functools.cache
@torch.inference_mode(False)  # so that a pass with gradients may save them, whoever makes them
def _kept_tables(length: int, reach: int | None, device: torch.device) -> dict[str, Tensor | None]:
    return _tables(length, reach, device)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)
