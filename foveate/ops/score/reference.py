"""How much each key matters: post-softmax attention mass, summed over queries, tiles and the heads of a group.

The mass is recomputed from the log-sum-exp of each query's row, block by block, so that no attention matrix exists.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from foveate.ops._math import block_length, fold_group, matmul_fp32


def column_mass(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    scaling: float,
    offset: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Attention mass that each key receives from a block of causal queries (H2O's accumulated score; LuKA's w_i).

    Args:
        q: ``[B, Hq, Lq, D]``; query i sees the keys ``0 .. offset + i``.
        k: ``[B, Hkv, Lk, D]``.
        lse: ``[B, Hq, Lq]`` fp32: the log-sum-exp of each query over all the keys that it sees; one with -inf saw
            nothing and adds nothing.
        offset: number of keys before the first query's own.
        out: fp32 ``[B, Hkv, Lk]`` to add to, or None for a new one.

    Returns:
        ``[B, Hkv, Lk]`` fp32: summed over queries and the heads of the group, so ``G * Lq`` over all keys.
    """
    batch, num_heads, length = q.shape[:3]
    num_kv_heads, keys = k.shape[1], k.shape[2]
    out = k.new_zeros(batch, num_kv_heads, keys, dtype=torch.float32) if out is None else out
    lse = lse.masked_fill(lse.isneginf(), float("inf"))
    group = num_heads // num_kv_heads
    step = min(length, 256)
    for first in range(0, length, step):
        last = min(first + step, length)
        rows = fold_group(q[:, :, first:last], num_kv_heads)
        row_lse = lse[:, :, first:last].reshape(batch, num_kv_heads, -1, 1)
        visible = offset + last
        width = block_length(4 * batch * num_heads * (last - first), visible)
        for start in range(0, visible, width):
            end = min(start + width, visible)
            weights = matmul_fp32(rows, k[:, :, start:end].transpose(-1, -2)).mul_(scaling).sub_(row_lse).exp_()
            if end > offset + first + 1:
                query = torch.arange(offset + first, visible, device=q.device)[:, None]
                future = torch.arange(start, end, device=q.device) > query
                weights.masked_fill_(future.repeat(group, 1), 0.0)
            out[:, :, start:end] += weights.sum(2)
    return out


def tile_mass(
    q: Tensor, k: Tensor, lse: Tensor, *, tile: int, scaling: float, offset: int = 0
) -> Iterator[tuple[int, Tensor]]:
    """Attention mass of each tile of queries, one tile at a time (Kascade, section 3.2: post-softmax pooling).

    Tile t holds the queries ``t * tile .. (t + 1) * tile - 1``; the mass of the keys from the tile's own first position
    on is included, causally.

    Yields:
        ``(t, mass)`` with ``mass [B, Hkv, n]`` fp32 for the ``n = offset + last`` keys that the tile's last query sees:
        the mean over the tile's queries and the heads of the group, so that it sums to 1.
    """
    length = q.shape[2]
    group = q.shape[1] // k.shape[1]
    for index, first in enumerate(range(0, length, tile)):
        last = min(first + tile, length)
        mass = column_mass(
            q[:, :, first:last], k[:, :, : offset + last], lse[:, :, first:last], scaling=scaling, offset=offset + first
        )
        yield index, mass / (group * (last - first))


def query_mass(q: Tensor, k: Tensor, *, scaling: float, offset: int) -> Tensor:
    """Attention mass of a few causal queries, heads kept apart (SnapKV's observation window, section 3).

    Args:
        q: ``[B, Hq, Lq, D]``; query i sees the keys ``0 .. offset + i``.
        k: ``[B, Hkv, Lk, D]`` with ``Lk >= offset + Lq``.

    Returns:
        ``[B, Hq, offset + Lq]`` fp32, summed over the queries.
    """
    batch, num_heads, length = q.shape[:3]
    end = offset + length
    mass = q.new_zeros(batch, num_heads, end, dtype=torch.float32)
    step = block_length(4 * batch * num_heads * end, length)
    for first in range(0, length, step):
        last = min(first + step, length)
        logits = matmul_fp32(fold_group(q[:, :, first:last], k.shape[1]), k[:, :, :end].transpose(-1, -2))
        logits = logits.mul_(scaling).reshape(batch, num_heads, last - first, end)
        query = torch.arange(offset + first, offset + last, device=q.device)[:, None]
        future = torch.arange(end, device=q.device) > query
        mass += logits.masked_fill_(future, float("-inf")).softmax(-1).sum(2)
    return mass
