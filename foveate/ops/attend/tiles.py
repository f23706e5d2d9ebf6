"""Attention of prompt queries in tiles that share their keys (Kascade, section 3.4)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from foveate.ops._math import block_length, capped, matmul_fp32, tile_rows
from foveate.ops.attend.attended import Attended, rows_of_heads
from foveate.ops.attend.gather import gather_fields
from foveate.ops.block_table import BlockTable


def attend_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    tile: int,
    scaling: float,
    offset: int = 0,
    starts: Tensor | None = None,
    counts: Tensor | None = None,
    heads: Tensor | None = None,
    rest: bool = False,
    sums: tuple[Tensor, Tensor] | None = None,
    sink_logits: Tensor | None = None,
    softcap: float | None = None,
    out: Tensor | None = None,
    block_table: BlockTable | None = None,
) -> Attended:
    """Attention of every query over the keys chosen for its tile, and causally over those of the tile itself.

    Tile t holds the positions ``t * tile .. (t + 1) * tile - 1``; query i is at position ``offset + i``, and so is the
    key of that number. The first and the last tile may be given in part.

    Args:
        q: ``[B, Hq, Lq, D]``.
        k, v: ``[B, Hkv, Lk, D(v)]`` with ``Lk >= offset + Lq``.
        indices: int ``[B, Hkv, T, K]``: for each tile given, keys before its first position; -1 marks an unused place.
            With ``starts``: ``[B, Hkv, P]``, the tiles one after another.
        starts: int64 ``[T + 1]``, ascending from 0 to P: tile t has the places ``starts[t] .. starts[t + 1] - 1``.
            None: every tile has as many places.
        counts: int32 ``[B, Hkv, T]``: how many of a tile's places are in use, the first ones; None: they are counted.
        heads: int64 ``[Hkv]``: the head of ``indices`` whose keys each KV head reads; None for its own.
        rest: whether the keys before a tile that are not chosen for it count as one: their mean key, with the logarithm
            of their number added to its logit, capped, and their mean value. A key must not be chosen twice then.
        sums: with ``rest``: fp32 (fp64 of fp64) ``[B, Hkv, T, D(v)]``, the sums of all keys and of all values before
            each tile, see :func:`sums_before`; None: they are computed.
        sink_logits, softcap, block_table: see :func:`attend`.
        out: ``[B, Hq, Lq, Dv]``, last stride 1, which the output is written to; None: new memory.

    Raises:
        ValueError: when there are not as many selections as tiles, or sums, counts or ``out`` of another shape.
    """
    if block_table is not None:
        k, v = block_table.gather(q, k, v)
    batch, num_kv_heads = k.shape[:2]
    rows, lead = tile_rows(q, num_kv_heads, tile, offset)
    tiles, width = rows.shape[2:4]
    check_selection(indices, starts, batch, num_kv_heads, tiles, counts)
    out = None if out is None else check_out(out, q, v)
    start, end = offset - lead, offset + q.shape[2]
    own_k, own_v = (
        F.pad(x[:, :, start:end], (0, 0, 0, start + tiles * tile - end)).unflatten(2, (tiles, tile)) for x in (k, v)
    )
    sums = sums_for_rest(k, v, sums, start, tile, tiles) if rest else ()
    future = torch.ones(tile, tile, dtype=torch.bool, device=q.device).triu(1).repeat(width // tile, 1)
    seen = tile + (indices.shape[3] if starts is None else int(starts.diff().max()))
    step = block_length(4 * batch * num_kv_heads * seen * (width + k.shape[3] + v.shape[3]), tiles)
    outs = []
    for first in range(0, tiles, step):
        if starts is None:
            chosen = indices[:, :, first : first + step]
        else:
            chosen = side_by_side(indices, starts[first : first + step + 1])
        if counts is not None:
            place = torch.arange(chosen.shape[3], device=q.device)
            chosen = chosen.masked_fill(place >= counts[:, :, first : first + step, None], -1)
        chosen = chosen if heads is None else chosen.index_select(1, heads)
        keys, values = (x.unflatten(2, chosen.shape[2:]) for x in gather_fields([k, v], chosen.flatten(2, 3)))
        unused = (chosen < 0)[..., None]
        values = values.masked_fill(unused, 0)
        some, of_chosen = rows[:, :, first : first + step], []
        if rest:
            of_chosen = [x.sum(3, dtype=sums[0].dtype) for x in (keys.masked_fill(unused, 0), values)]
        keys = torch.cat([keys, own_k[:, :, first : first + step]], 3)
        values = torch.cat([values, own_v[:, :, first : first + step]], 3)
        logits = capped(matmul_fp32(some, keys.transpose(-1, -2)) * scaling, softcap)
        hidden = torch.cat(
            [unused.transpose(-1, -2).expand(-1, -1, -1, width, -1), future.expand(*chosen.shape[:3], -1, -1)], -1
        )
        logits = logits.masked_fill(hidden, float("-inf"))
        of_sinks = logits.new_empty(*logits.shape[:-1], 0)
        if sink_logits is not None:
            of_sinks = rows_of_heads(sink_logits, q.shape[1], num_kv_heads, tile)[:, :, None].expand(
                *logits.shape[:-1], 1
            )
        if not rest:
            weights = torch.cat([logits, of_sinks], -1).softmax(-1)[..., : logits.shape[-1]]
            outs.append(matmul_fp32(weights.to(values.dtype), values).to(q.dtype))
            continue
        begins = start + tile * torch.arange(first, first + chosen.shape[2], device=q.device)
        left = (begins - (chosen >= 0).sum(-1))[..., None]
        mean_key, mean_value = (
            (of_all[:, :, first : first + step] - x) / left.clamp_min(1)
            for of_all, x in zip(sums, of_chosen, strict=True)
        )
        of_rest = capped((some.to(mean_key.dtype) @ mean_key[..., None])[..., 0] * scaling, softcap)
        of_rest = of_rest + left.to(mean_key.dtype).log()
        of_rest = of_rest.masked_fill(left <= 0, float("-inf"))[..., None]
        weights = torch.cat([logits, of_rest, of_sinks], -1).softmax(-1)
        given, of_rest = weights[..., : logits.shape[-1]], weights[..., logits.shape[-1] :][..., :1]
        of_given = matmul_fp32(given.to(values.dtype), values)
        outs.append((of_given + of_rest * mean_value[:, :, :, None]).to(q.dtype))
    found = torch.cat(outs, 2).unflatten(3, (-1, tile)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    found = found[:, :, lead : lead + q.shape[2]]
    return Attended(found if out is None else out.copy_(found))


def check_out(out: Tensor, q: Tensor, v: Tensor) -> Tensor:
    """``out``, which must be of the output's shape and dtype, with last stride 1."""
    expected = (*q.shape[:3], v.shape[3])
    if out.shape != expected or out.dtype != q.dtype or out.stride(3) != 1:
        given = f"{tuple(out.shape)} in {out.dtype} with last stride {out.stride(3)}"
        raise ValueError(f"out must be {expected} in {q.dtype} with last stride 1, not {given}")
    return out


def check_selection(
    indices: Tensor, starts: Tensor | None, batch: int, heads: int, tiles: int, counts: Tensor | None = None
) -> None:
    """Raise unless every tile has a selection."""
    if counts is not None and (counts.shape != (batch, heads, tiles) or counts.dtype != torch.int32):
        expected, given = (batch, heads, tiles), f"{tuple(counts.shape)} in {counts.dtype}"
        raise ValueError(f"counts must be {expected} in torch.int32, not {given}")
    fit = indices.shape[:3] == (batch, heads, tiles) and indices.dim() == 4
    if starts is not None:
        fit = indices.shape[:2] == (batch, heads) and indices.dim() == 3 and starts.shape == (tiles + 1,)
    if not fit:
        apart = "" if starts is None else f" with starts {tuple(starts.shape)}"
        raise ValueError(f"indices {tuple(indices.shape)}{apart} do not fit {tiles} tiles of {heads} KV heads")


def side_by_side(indices: Tensor, starts: Tensor) -> Tensor:
    """Selections that follow one another, ``[B, Hkv, P]``, of the tiles that ``starts [T + 1]`` bounds.

    Returns:
        ``[B, Hkv, T, K]``, -1 at the end of those shorter than the longest.
    """
    numbers = starts.diff()
    place = torch.arange(int(numbers.max()), device=indices.device)
    within = place < numbers[:, None]
    return indices[:, :, (starts[:-1, None] + place).where(within, 0)].masked_fill(~within, -1)


def sums_for_rest(
    k: Tensor, v: Tensor, sums: tuple[Tensor, Tensor] | None, start: int, tile: int, tiles: int
) -> tuple[Tensor, Tensor]:
    """The sums of keys and values before each tile: those given, which must fit, or new ones."""
    if sums is None:
        return sums_before(k, start, tile, tiles), sums_before(v, start, tile, tiles)
    for name, x, of_all in (("keys", k, sums[0]), ("values", v, sums[1])):
        expected = (*x.shape[:2], tiles, x.shape[3])
        dtype = torch.promote_types(x.dtype, torch.float32)
        if of_all.shape != expected or of_all.dtype != dtype:
            given = f"{tuple(of_all.shape)} in {of_all.dtype}"
            raise ValueError(f"sums of {name} must be {expected} in {dtype}, not {given}")
    return sums


def sums_before(x: Tensor, start: int, tile: int, tiles: int) -> Tensor:
    """The sum of all keys or values, ``[B, Hkv, Lk, D]``, before each tile: fp32 or fp64 ``[B, Hkv, T, D]``.

    The first tile begins at position ``start``, a multiple of ``tile``.
    """
    end = start + (tiles - 1) * tile
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    before = x[:, :, :start].sum(2, keepdim=True, dtype=dtype)
    of_tiles = x[:, :, start:end].unflatten(2, (tiles - 1, tile)).sum(3, dtype=dtype)
    return torch.cat([before, of_tiles], 2).cumsum(2)
