"""How much each key matters: post-softmax attention mass, summed over queries, tiles and the heads of a group.

The mass is recomputed from the log-sum-exp of each query's row, block by block, so that no attention matrix exists.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from foveate.ops._math import block_length, fold_group, matmul_fp32, tile_rows


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
    """Attention that tiles of queries pay to the keys before them (Kascade, section 3.4: post-softmax pooling).

    Tile t holds the positions ``t * tile .. (t + 1) * tile - 1``; query i is at position ``offset + i``, and a tile may
    be given in part.

    Args:
        q: ``[B, Hq, Lq, D]``.
        k: ``[B, Hkv, Lk, D]``.
        lse: ``[B, Hq, Lq]`` fp32: the log-sum-exp of each query over all the keys that it sees.
        tile: positions in a tile.

    Yields:
        ``(t, mass)``: the tiles ``t .. t + T - 1``, a few at a time, and fp32 ``[B, Hkv, T, n]`` for the n keys before
        the last of them: the mean over the tile's queries and the heads of the group; -inf from its first position on.
    """
    group = q.shape[1] // k.shape[1]
    rows, lead = tile_rows(q, k.shape[1], tile, offset)
    trail = rows.shape[2] * tile - lead - q.shape[2]
    lse = F.pad(lse.masked_fill(lse.isneginf(), float("inf")), (lead, trail), value=float("inf"))
    lse = lse.unflatten(2, (-1, tile)).unflatten(1, (-1, group)).transpose(2, 3).flatten(3)[..., None]
    number = (lse[0, 0] < float("inf")).sum((1, 2)).clamp_min(1)
    for first, last, keys, before in _tile_blocks(rows, lead, tile, offset):
        mass, queries = k.new_empty(*rows.shape[:2], *before.shape, dtype=torch.float32), rows[:, :, first:last]
        step = block_length(4 * rows.shape[0] * rows.shape[1] * queries.shape[2] * queries.shape[3], keys)
        for start in range(0, keys, step):
            some = k[:, :, start : min(start + step, keys)].transpose(-1, -2)
            weights = matmul_fp32(queries.flatten(2, 3), some).mul_(scaling).unflatten(2, queries.shape[2:4])
            mass[..., start : start + step] = weights.sub_(lse[:, :, first:last]).exp_().sum(3)
        mass /= number[first:last, None]
        yield (offset - lead) // tile + first, mass.masked_fill_(~before, float("-inf"))


def tile_logits(q: Tensor, k: Tensor, *, tile: int, scaling: float, offset: int = 0) -> Iterator[tuple[int, Tensor]]:
    """What the mean query of each tile makes of the keys before it (Kascade, section 3.4: pre-softmax pooling).

    As :func:`tile_mass`, with scaled logits instead of attention. Queries that a tile is not given count as zeros,
    which leaves the order of the keys as it is.
    """
    rows, lead = tile_rows(q, k.shape[1], tile, offset)
    for first, last, keys, before in _tile_blocks(rows, lead, tile, offset):
        queries = rows[:, :, first:last].mean(3, dtype=torch.float32).to(rows.dtype)
        yield (
            (offset - lead) // tile + first,
            matmul_fp32(queries, k[:, :, :keys].transpose(-1, -2)).mul_(scaling).masked_fill_(~before, float("-inf")),
        )


def _tile_blocks(rows: Tensor, lead: int, tile: int, offset: int) -> Iterator[tuple[int, int, int, Tensor]]:
    """``(first, last, n, before)``: tiles ``first .. last - 1`` of those given, the n keys before the last of them, and
    bool ``[T, n]``: which of these are before each."""
    batch, heads, tiles = rows.shape[:3]
    start, first = offset - lead, 0
    while first < tiles:
        some = block_length(4 * batch * heads * (start + (first + 1) * tile), tiles - first)
        last = first + block_length(4 * batch * heads * (start + (first + some) * tile), some)  # by the last one's keys
        keys = start + (last - 1) * tile
        begins = start + torch.arange(first, last, device=rows.device) * tile
        yield first, last, keys, torch.arange(keys, device=rows.device) < begins[:, None]
        first = last


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
