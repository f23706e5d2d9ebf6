"""Attention of prompt queries in tiles that share their keys (Kascade, section 3.4)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from foveate.ops._math import block_length, matmul_fp32, tile_rows
from foveate.ops.attend.reference import Attended, gather_fields


def attend_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    tile: int,
    scaling: float,
    offset: int = 0,
    heads: Tensor | None = None,
) -> Attended:
    """Attention of every query over the keys chosen for its tile, and causally over those of the tile itself.

    Tile t holds the positions ``t * tile .. (t + 1) * tile - 1``; query i is at position ``offset + i``, and so is the
    key of that number. The first and the last tile may be given in part.

    Args:
        q: ``[B, Hq, Lq, D]``.
        k, v: ``[B, Hkv, Lk, D(v)]`` with ``Lk >= offset + Lq``.
        indices: int ``[B, Hkv, T, K]``: for each tile given, keys before its first position; -1 marks an unused place.
        heads: int64 ``[Hkv]``: the head of ``indices`` whose keys each KV head reads; None for its own.

    Raises:
        ValueError: when there are not as many selections as tiles.
    """
    batch, num_kv_heads = k.shape[:2]
    rows, lead = tile_rows(q, num_kv_heads, tile, offset)
    tiles, width = rows.shape[2:4]
    if indices.shape[:3] != (batch, num_kv_heads, tiles):
        raise ValueError(f"indices {tuple(indices.shape)} do not fit {tiles} tiles of {num_kv_heads} KV heads")
    start, end = offset - lead, offset + q.shape[2]
    own_k, own_v = (
        F.pad(x[:, :, start:end], (0, 0, 0, start + tiles * tile - end)).unflatten(2, (tiles, tile)) for x in (k, v)
    )
    future = torch.ones(tile, tile, dtype=torch.bool, device=q.device).triu(1).repeat(width // tile, 1)
    seen = indices.shape[3] + tile
    step = block_length(4 * batch * num_kv_heads * seen * (width + k.shape[3] + v.shape[3]), tiles)
    outs = []
    for first in range(0, tiles, step):
        chosen = indices[:, :, first : first + step]
        chosen = chosen if heads is None else chosen.index_select(1, heads)
        keys, values = (x.unflatten(2, chosen.shape[2:]) for x in gather_fields([k, v], chosen.flatten(2, 3)))
        unused = (chosen < 0)[..., None]
        keys = torch.cat([keys, own_k[:, :, first : first + step]], 3)
        values = torch.cat([values.masked_fill(unused, 0), own_v[:, :, first : first + step]], 3)
        logits = matmul_fp32(rows[:, :, first : first + step], keys.transpose(-1, -2)) * scaling
        hidden = torch.cat(
            [unused.transpose(-1, -2).expand(-1, -1, -1, width, -1), future.expand(*chosen.shape[:3], -1, -1)], -1
        )
        weights = logits.masked_fill(hidden, float("-inf")).softmax(-1)
        outs.append(matmul_fp32(weights.to(values.dtype), values).to(q.dtype))
    out = torch.cat(outs, 2).unflatten(3, (-1, tile)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return Attended(out[:, :, lead : lead + q.shape[2]])
