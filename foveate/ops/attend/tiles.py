"""Attention of prompt queries in tiles that share their keys (Kascade, section 3.4)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from foveate.ops._math import block_length, capped, matmul_fp32, tile_rows
from foveate.ops.attend.attended import Attended, rows_of_heads
from foveate.ops.attend.gather import gather_fields
from foveate.ops.checks import check_own_keys
from foveate.ops.kv import KV
from foveate.ops.logits import Logits


def attend_tiles(
    q: Tensor,
    kv: KV,
    indices: Tensor,
    *,
    tile: int,
    logits: Logits,
    offset: int = 0,
    starts: Tensor,
    counts: Tensor,
    heads: Tensor | None = None,
    out: Tensor | None = None,
    need_lse: bool = False,
) -> Attended:
    """Attention of every query over the keys chosen for its tile, and causally over the tile's own keys.

    Tile t holds the positions ``t * tile .. (t + 1) * tile - 1``. Query i is at position ``offset + i``, key j at
    position j. The first and the last tile may be incomplete.

    Args:
        q: ``[B, Hq, Lq, D]``.
        kv: ``k, v [B, Hkv, Lk, D(v)]`` with ``Lk >= offset + Lq``, in one piece or in blocks, without lengths; see
            :class:`~foveate.ops.KV`.
        indices: int ``[B, Hkv, P]``: for each tile, keys before its first position, tile after tile.
        starts: int64 ``[T + 1]``, ascending from 0 to P: tile t has the places ``starts[t] .. starts[t + 1] - 1``.
        counts: int32 ``[B, Hkv, T]``: a tile uses the first ``counts`` of its places.
        heads: int64 ``[Hkv]``: the head of ``indices`` whose keys each KV head reads; None for its own.
        logits: see :func:`attend`.
        out: ``[B, Hq, Lq, Dv]``, last stride 1, which the output is written to; None: new memory.
        need_lse: whether the log-sum-exp is returned; sinks count in it.

    Raises:
        ValueError: see :func:`attend`; also for fewer than ``offset + Lq`` keys, for a number of selections that is not
            the number of tiles, and for another shape of ``counts`` or ``out``.
    """
    k, v = kv.in_one_piece(q)
    batch, num_kv_heads = k.shape[:2]
    rows, lead = tile_rows(q, num_kv_heads, tile, offset)
    tiles, width = rows.shape[2:4]
    start, end = offset - lead, offset + q.shape[2]
    own_k, own_v = (
        F.pad(x[:, :, start:end], (0, 0, 0, start + tiles * tile - end)).unflatten(2, (tiles, tile)) for x in (k, v)
    )
    future = torch.ones(tile, tile, dtype=torch.bool, device=q.device).triu(1).repeat(width // tile, 1)
    seen = tile + int(starts.diff().max())
    step = block_length(4 * batch * num_kv_heads * seen * (width + k.shape[3] + v.shape[3]), tiles)
    outs, lses = [], []
    for first in range(0, tiles, step):
        chosen = side_by_side(indices, starts[first : first + step + 1], counts[:, :, first : first + step])
        chosen = chosen if heads is None else chosen.index_select(1, heads)
        keys, values = (x.unflatten(2, chosen.shape[2:]) for x in gather_fields([k, v], chosen.flatten(2, 3)))
        unused = (chosen < 0)[..., None]
        values = values.masked_fill(unused, 0)
        keys = torch.cat([keys, own_k[:, :, first : first + step]], 3)
        values = torch.cat([values, own_v[:, :, first : first + step]], 3)
        scores = matmul_fp32(rows[:, :, first : first + step], keys.transpose(-1, -2)) * logits.scaling
        scores = capped(scores, logits.softcap)
        hidden = torch.cat(
            [unused.transpose(-1, -2).expand(-1, -1, -1, width, -1), future.expand(*chosen.shape[:3], -1, -1)], -1
        )
        scores = scores.masked_fill(hidden, float("-inf"))
        of_sinks = scores.new_empty(*scores.shape[:-1], 0)
        if logits.sinks is not None:
            of_sinks = rows_of_heads(logits.sinks, num_kv_heads, tile)[:, :, None].expand(*scores.shape[:-1], 1)
        everything = torch.cat([scores, of_sinks], -1)
        if need_lse:
            lses.append(everything.logsumexp(-1))
        weights = everything.softmax(-1)[..., : scores.shape[-1]]
        outs.append(matmul_fp32(weights.to(values.dtype), values).to(q.dtype))
    given = slice(lead, lead + q.shape[2])
    found, lse = (rows_to_queries(torch.cat(x, 2), tile)[:, :, given] if x else None for x in (outs, lses))
    return Attended(found if out is None else out.copy_(found), lse)


def rows_to_queries(x: Tensor, tile: int) -> Tensor:
    """Reshape rows of tiles ``[B, Hkv, T, G * tile, ...]`` to the queries of all heads, ``[B, Hq, T * tile, ...]``."""
    return x.unflatten(3, (-1, tile)).transpose(2, 3).flatten(3, 4).flatten(1, 2)


def check_tiles(q, kv, indices, *, tile, logits, offset=0, starts, counts, heads=None, out=None, need_lse=False):
    """Raise ValueError for invalid arguments of :func:`attend_tiles`."""
    kv.check_queries(q, values=True)
    if kv.lengths is not None:
        raise ValueError("attend_tiles reads no lengths: its queries are the last of every row")
    check_own_keys(kv.num_keys, q.shape[2], offset)
    logits.check_heads(q)
    batch, heads, tiles = len(q), kv.k.shape[1], -(-(offset % tile + q.shape[2]) // tile)
    expected = (*q.shape[:3], kv.v.shape[3])
    if out is not None and (out.shape != expected or out.dtype != q.dtype or out.stride(3) != 1):
        given = f"{tuple(out.shape)} in {out.dtype} with last stride {out.stride(3)}"
        raise ValueError(f"out must be {expected} in {q.dtype} with last stride 1, not {given}")
    if counts.shape != (batch, heads, tiles) or counts.dtype != torch.int32:
        expected, given = (batch, heads, tiles), f"{tuple(counts.shape)} in {counts.dtype}"
        raise ValueError(f"counts must be {expected} in torch.int32, not {given}")
    if indices.shape[:2] != (batch, heads) or indices.dim() != 3 or starts.shape != (tiles + 1,):
        given = f"indices {tuple(indices.shape)} with starts {tuple(starts.shape)}"
        raise ValueError(f"{given} do not fit {tiles} tiles of {heads} KV heads")


def side_by_side(indices: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
    """Selections that follow one another, see :func:`attend_tiles`: ``[B, Hkv, T, K]``, -1 where no key is."""
    place = torch.arange(int(starts.diff().max()), device=indices.device)
    last = max(0, indices.shape[2] - 1)
    chosen = indices[:, :, (starts[:-1, None] + place).clamp_max(last)]
    return chosen.masked_fill(place >= counts[..., None], -1)
