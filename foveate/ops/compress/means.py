"""The mean of the keys that a tile of prompt queries does not read: one key and one value in their place."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from foveate.ops._math import block_length, matmul_fp32
from foveate.ops.kv import KV
from foveate.ops.select import WORD_KEYS


class TileMeans(NamedTuple):
    """For every tile the mean of the keys before its first position that it has not chosen."""

    k: Tensor
    """``[B, Hkv, T, D]``, fp32 (fp64 of fp64): their mean key; 0 where there are none."""
    v: Tensor
    """``[B, Hkv, T, Dv]``: their mean value."""
    numbers: Tensor
    """int32 ``[B, Hkv, T]``: how many there are."""


def unchosen_means(
    kv: KV,
    words: Tensor,
    begins: Tensor,
    *,
    tile: int,
    offset: int = 0,
    heads: Tensor | None = None,
) -> TileMeans:
    """The means of the keys before each tile that are not among the keys chosen for it, see :class:`TileKeys`.

    The sums are products of a matrix of zeros and ones with the keys and with the values. The ones are at the keys that
    are not chosen: a difference between the sums of all keys and of the chosen keys would lose its digits where
    nearly all keys are chosen.

    Args:
        kv: ``k, v [B, Hkv, Lk, D(v)]``, in one piece or in blocks, without lengths; see :class:`~foveate.ops.KV`.
        words: int32 ``[B, Hkv, P]``, a bit for each key, see :attr:`TileKeys.words`.
        begins: int64 ``[T + 1]``, see :attr:`TileKeys.begins`. Keys behind a tile's last word are not chosen.
        tile: queries of a tile; tile t begins at position ``(offset // tile + t) * tile``.
        offset: position of the first query.
        heads: int64 ``[Hkv]``: the head of ``words`` whose choice each KV head reads; None for its own.

    Raises:
        ValueError: for lengths, a KV without values, words of other rows or heads, or fewer keys than there are before
            the last tile.
    """
    k, v = kv.in_one_piece(words)
    words = F.pad(words if heads is None else words.index_select(1, heads), (0, 1))  # a word of no keys at the end
    starts = tile_starts(begins, tile, offset)
    batch, num_kv_heads, tiles, device = *k.shape[:2], len(starts), k.device
    dtype = torch.promote_types(k.dtype, torch.float32)
    sums = [torch.zeros(batch, num_kv_heads, tiles, x.shape[3], dtype=dtype, device=device) for x in (k, v)]
    numbers = torch.zeros(batch, num_kv_heads, tiles, dtype=torch.int32, device=device)
    each = torch.arange(WORD_KEYS, device=device)
    end = int(starts.max()) if tiles else 0
    number_of_words, width = -(-end // WORD_KEYS), k.shape[3] + v.shape[3]
    step = block_length(4 * batch * num_kv_heads * WORD_KEYS * (3 * tiles + width), number_of_words)
    for first in range(0, number_of_words, step):
        word = torch.arange(first, min(first + step, number_of_words), device=device)
        of_tiles = words[:, :, (begins[:-1, None] + word).where(word < begins.diff()[:, None], words.shape[2] - 1)]
        keys = (word[:, None] * WORD_KEYS + each).flatten()[: end - first * WORD_KEYS]
        chosen = (of_tiles[..., None] >> each & 1).flatten(3)[..., : len(keys)]
        unchosen = (chosen == 0) & (keys < starts[:, None])
        numbers += unchosen.sum(-1, dtype=torch.int32)
        some = slice(int(keys[0]), int(keys[-1]) + 1)
        sums = [of + matmul_fp32(unchosen.to(x.dtype), x[:, :, some]) for of, x in zip(sums, (k, v), strict=True)]
    return TileMeans(*(x / numbers.clamp_min(1)[..., None] for x in sums), numbers)


def tile_starts(begins: Tensor, tile: int, offset: int) -> Tensor:
    """The first position of each tile, int64 ``[T]``."""
    return (offset // tile + torch.arange(len(begins) - 1, device=begins.device)) * tile


def check_means(kv, words, begins, *, tile, offset=0, heads=None):
    """Raise for arguments of :func:`unchosen_means` that cannot be."""
    if kv.v is None or kv.lengths is not None:
        raise ValueError("means are of keys and values, which are all there: without lengths")
    rows = len(kv.k) if kv.block_table is None else len(kv.block_table.table)
    expected = (rows, kv.k.shape[1])
    if words.dtype != torch.int32 or words.dim() != 3 or words.shape[:2] != expected or begins.dim() != 1:
        given = f"words {tuple(words.shape)} in {words.dtype} with begins {tuple(begins.shape)}"
        raise ValueError(f"{given} do not fit {rows} rows of {expected[1]} KV heads")
    last = (offset // tile + len(begins) - 2) * tile
    if kv.num_keys < last:
        raise ValueError(f"k has {kv.num_keys} keys, and {last} are before the last tile")
