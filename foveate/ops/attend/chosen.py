"""Attention of prompt queries in tiles over keys that are kept as bits."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import torch
from torch import Tensor

from foveate.ops import _math
from foveate.ops.attend import means, tiles
from foveate.ops.attend.attended import Attended
from foveate.ops.compress import TileMeans, unchosen_means
from foveate.ops.dispatch import dispatch
from foveate.ops.kv import KV
from foveate.ops.logits import Logits
from foveate.ops.select import TileKeys, keys_of_bits

attend_tiles = dispatch(tiles.attend_tiles, "foveate.ops.attend.tiles_kernel", tiles.check_tiles)
merge_means = dispatch(means.merge_means, "foveate.ops.attend.means_kernel", means.check_merge)


def attend_tile_keys(
    q: Tensor,
    kv: KV,
    chosen: TileKeys,
    *,
    tile: int,
    offset: int = 0,
    logits: Logits,
    heads: Tensor | None = None,
    with_means: bool = False,
    need_lse: bool = False,
) -> Attended:
    """:func:`attend_tiles` over the keys of :class:`TileKeys`, in the same order; kernels give the same bits.

    It attends for a few tiles at a time, so that their lists of keys take bounded memory: 256 MB on a GPU.

    Args:
        q, kv, tile, offset, logits, heads, need_lse: as for :func:`attend_tiles`.
        chosen: the chosen keys of ``H`` heads; ``H`` is ``Hkv``, or 1 where all KV heads read the same keys.
        with_means: whether the mean of the keys that a tile has not chosen stands for them, weighted by their number;
            see :func:`merge_means`.

    Raises:
        ValueError: see :func:`attend_tiles`; also when the number of selections is not the number of tiles.
    """
    kv.check_queries(q, values=True)
    batch, num_kv_heads, length = len(q), kv.k.shape[1], q.shape[2]
    start, end = offset - offset % tile, offset + length
    number = len(chosen.places) - 1
    if number != -(-(end - start) // tile):
        raise ValueError(f"keys of {number} tiles do not fit {-(-(end - start) // tile)} tiles of queries")
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (q, kv.k, kv.v))
    out = q.new_empty(batch, length, q.shape[1], kv.v.shape[3]).transpose(1, 2)
    of_tiles = _means(kv, chosen, tile, offset, heads) if with_means else None
    room, lses = _math.GPU_SCORES_BYTES if q.is_cuda else _math.SCRATCH_BYTES, []
    for first, last in _pieces(chosen.places, room // (4 * batch * chosen.words.shape[1])):
        begins, starts = (x[first : last + 1] for x in (chosen.begins, chosen.starts))
        lists = keys_of_bits(chosen.words, begins, starts, chosen.places[last] - chosen.places[first])
        indices, counts = (x.expand(-1, num_kv_heads, -1) for x in lists)
        since, until = max(offset, start + first * tile), min(end, start + last * tile)
        how = {"tile": tile, "offset": since, "logits": logits}
        part = slice(since - offset, until - offset)
        some, into = q[:, :, part], None if recorded else out[:, :, part]
        found = attend_tiles(
            some,
            kv,
            indices,
            **how,
            starts=starts - starts[0],
            counts=counts,
            heads=heads,
            out=into,
            need_lse=need_lse or with_means,
        )
        del lists, indices  # before the lists of the next tiles are made
        if of_tiles is not None:
            own = TileMeans(*(x[:, :, first:last] for x in of_tiles))
            found = merge_means(some, found.out, found.lse, own, **how, out=into)
        if recorded:
            out[:, :, part] = found.out
        lses.append(found.lse)
    return Attended(out, torch.cat(lses, 2) if need_lse else None)


def _means(kv: KV, chosen: TileKeys, tile: int, offset: int, heads: Tensor | None) -> TileMeans:
    """The means of the keys that tiles have not chosen. Each KV head has its own means, even if all KV heads share one
    choice."""
    words = chosen.words.expand(-1, kv.k.shape[1], -1)
    return unchosen_means(kv, words, chosen.begins, tile=tile, offset=offset, heads=heads)


def _pieces(places: Sequence[int], room: int) -> list[tuple[int, int]]:
    """Split tiles into pieces, tiles ``first .. last - 1`` each, with about the same number of places.

    A piece has at most ``room`` places, or is a single tile. ``places [T + 1]`` counts the places of all tiles before
    each tile, ascending from 0.
    """
    tiles, first, pieces = len(places) - 1, 0, []
    room = max(1, room)
    each = -(-places[-1] // max(1, -(-places[-1] // room)))
    while first < tiles:
        last = min(max(first + 1, bisect.bisect_right(places, places[first] + each) - 1), tiles)
        pieces.append((first, last))
        first = last
    return pieces
