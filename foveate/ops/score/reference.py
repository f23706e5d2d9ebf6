"""The importance of each key: post-softmax attention mass, summed over queries, tiles and the heads of a group.

The mass is recomputed from the log-sum-exp of each query's row, block by block, so that no attention matrix exists.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from foveate.ops._math import GPU_SCORES_BYTES, block_length, capped, fold_group, matmul_fp32, tile_rows
from foveate.ops.dispatch import dispatch
from foveate.ops.kv import KV
from foveate.ops.logits import Logits


def column_mass(
    q: Tensor,
    kv: KV,
    lse: Tensor,
    *,
    logits: Logits,
    offset: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Attention mass that each key receives from a block of causal queries (H2O's accumulated score; LuKA's w_i).

    Args:
        q: ``[B, Hq, Lq, D]``; query i sees the keys ``0 .. offset + i``.
        kv: ``k [B, Hkv, Lk, D]`` in one piece; values are not read.
        lse: ``[B, Hq, Lq]`` fp32: the log-sum-exp of each query over all keys that it sees. A query with -inf saw no
            key and adds nothing.
        offset: number of keys before the first query's own.
        logits: how logits are made. It must be the rule by which ``lse`` was computed, sinks included.
        out: fp32 ``[B, Hkv, Lk]`` to which the mass is added; None: new memory.

    Returns:
        ``[B, Hkv, Lk]`` fp32: the mass, summed over queries and the heads of the group; its sum over all keys is
        ``G * Lq``.

    Raises:
        ValueError: for a KV in blocks or with lengths, or a cap that is not a finite number above 0.
    """
    k = kv.k
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
            scores = matmul_fp32(rows, k[:, :, start:end].transpose(-1, -2)).mul_(logits.scaling)
            weights = capped(scores, logits.softcap).sub_(row_lse).exp_()
            if end > offset + first + 1:
                query = torch.arange(offset + first, visible, device=q.device)[:, None]
                future = torch.arange(start, end, device=q.device) > query
                weights.masked_fill_(future.repeat(group, 1), 0.0)
            out[:, :, start:end] += weights.sum(2)
    return out


def check_column(q, kv, lse, *, logits, **_):
    """Raise ValueError for invalid arguments of :func:`column_mass`."""
    kv.check_unpaged()


def tile_mass(
    q: Tensor,
    kv: KV,
    lse: Tensor,
    *,
    tile: int,
    logits: Logits,
    offset: int = 0,
) -> Iterator[tuple[int, Tensor]]:
    """Attention that tiles of queries pay to the keys before them (Kascade, section 3.4: post-softmax pooling).

    Tile t holds the positions ``t * tile .. (t + 1) * tile - 1``; query i is at position ``offset + i``. Only a part of
    a tile may be given.

    Args:
        q: ``[B, Hq, Lq, D]``.
        kv: ``k [B, Hkv, Lk, D]`` in one piece; values are not read.
        lse: ``[B, Hq, Lq]`` fp32: the log-sum-exp of each query over all the keys that it sees.
        tile: positions in a tile.
        logits: see :func:`column_mass`.

    Yields:
        ``(t, mass)`` for the tiles ``t .. t + T - 1``, a few tiles at a time. ``mass`` is fp32 ``[B, Hkv, T, n]`` for
        the n keys before the last of these tiles: the mean over the tile's queries and the heads of the group; -inf
        from the tile's first position on.

    Raises:
        ValueError: as :func:`column_mass`, when the first tiles are asked for.
    """
    kv.check_unpaged()
    k = kv.k
    group, lead = q.shape[1] // k.shape[1], offset % tile
    lse = F.pad(lse.masked_fill(lse.isneginf(), float("inf")), (lead, -(lead + q.shape[2]) % tile), value=float("inf"))
    for first, last, rows, begins in _tile_blocks(q, k.shape[1], tile, offset):
        of_rows = lse[:, :, first * tile : last * tile].unflatten(2, (-1, tile)).unflatten(1, (-1, group))
        of_rows = of_rows.transpose(2, 3).flatten(3)
        number = (of_rows[0, 0] < float("inf")).sum(1).clamp_min(1)
        of_rows = of_rows + number.log()[:, None]  # so that the sum is the mean
        keys = k[:, :, : (offset // tile + last - 1) * tile]
        yield offset // tile + first, _block_mass(rows, keys, of_rows, begins, logits=logits)


def tile_block_mass(queries: Tensor, k: Tensor, lse: Tensor, begins: Tensor, *, logits: Logits) -> Tensor:
    """Attention that some tiles of queries pay to the keys before them.

    Args:
        queries: ``[B, H, T, W, D]``: the W queries of each tile.
        k: ``[B, H, n, D]``.
        lse: ``[B, H, T, W]`` fp32: the log-sum-exp of each query; a query with inf adds nothing.
        begins: int64 ``[T]``: the first position of each tile.
        logits: see :func:`column_mass`.

    Returns:
        fp32 ``[B, H, T, n]``, summed over a tile's queries; -inf from the tile's first position on.
    """
    keys, mass = k.shape[2], k.new_empty(*queries.shape[:3], k.shape[2], dtype=torch.float32)
    step = block_length(4 * queries[..., 0].numel(), keys)
    for start in range(0, keys, step):
        some = k[:, :, start : min(start + step, keys)].transpose(-1, -2)
        scores = matmul_fp32(queries.flatten(2, 3), some).mul_(logits.scaling)
        weights = capped(scores, logits.softcap).unflatten(2, queries.shape[2:4]).sub_(lse[..., None]).exp_()
        mass[..., start : start + step] = weights.sum(3)
    return mass.masked_fill_(torch.arange(keys, device=begins.device) >= begins[:, None], float("-inf"))


_block_mass = dispatch(tile_block_mass, "foveate.ops.score.tiles_kernel")


def _tile_blocks(q: Tensor, heads: int, tile: int, offset: int) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Yield ``(first, last, rows, begins)``: some of the given tiles, their queries, see :func:`tile_rows`, and their
    first positions. An fp32 score for each of the queries, KV heads and keys before the last tile has bounded size."""
    start, end = offset - offset % tile, offset + q.shape[2]
    tiles, first = -(-(end - start) // tile), 0
    room = GPU_SCORES_BYTES if q.is_cuda else None
    while first < tiles:
        row = 4 * q.shape[0] * heads
        some = block_length(row * (start + (first + 1) * tile), tiles - first, room)
        last = first + block_length(row * (start + (first + some) * tile), some, room)  # by the last one's keys
        since, until = max(offset, start + first * tile), min(end, start + last * tile)
        rows, _ = tile_rows(q[:, :, since - offset : until - offset], heads, tile, since)
        yield first, last, rows, start + torch.arange(first, last, device=q.device) * tile
        first = last


def query_mass(
    q: Tensor,
    kv: KV,
    *,
    logits: Logits,
    offset: int,
    mask: Tensor | None = None,
) -> Tensor:
    """Attention mass that a few causal queries pay to each key, for each head (SnapKV's observation window, section 3).

    Args:
        q: ``[B, Hq, Lq, D]``; query i sees the keys ``0 .. offset + i``.
        kv: ``k [B, Hkv, Lk, D]`` in one piece, with ``Lk >= offset + Lq``; values are not read.
        mask: bool ``[B, Hkv, offset + Lq]``, True for keys that are seen, which include each query's own key; None: all
            keys are seen.
        logits: how logits are made, see :class:`~foveate.ops.Logits`.

    Returns:
        ``[B, Hq, offset + Lq]`` fp32, summed over the queries.

    Raises:
        ValueError: for a KV in blocks or with lengths, sinks of other heads, or a cap that is not a finite number above
            0.
    """
    logits.check_heads(q)
    kv.check_unpaged()
    k = kv.k
    batch, num_heads, length = q.shape[:3]
    end = offset + length
    mass = q.new_zeros(batch, num_heads, end, dtype=torch.float32)
    step = block_length(4 * batch * num_heads * end, length)
    for first in range(0, length, step):
        last = min(first + step, length)
        scores = matmul_fp32(fold_group(q[:, :, first:last], k.shape[1]), k[:, :, :end].transpose(-1, -2))
        scores = capped(scores.mul_(logits.scaling), logits.softcap).reshape(batch, num_heads, last - first, end)
        query = torch.arange(offset + first, offset + last, device=q.device)[:, None]
        hidden = torch.arange(end, device=q.device) > query
        if mask is not None:
            hidden = hidden | ~mask.repeat_interleave(num_heads // k.shape[1], 1)[:, :, None]
        weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
        if logits.sinks is not None:
            sinks = logits.sinks.float().view(1, -1, 1, 1)
            weights = weights * (scores.logsumexp(-1, keepdim=True) - sinks).sigmoid()
        mass += weights.sum(2)
    return mass
