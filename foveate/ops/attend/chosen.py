"""Attention of prompt queries in tiles over keys that are kept as bits."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from foveate.ops import _math
from foveate.ops.attend import tiles
from foveate.ops.attend.attended import Attended
from foveate.ops.dispatch import dispatch
from foveate.ops.kv import KV
from foveate.ops.select import TileKeys, keys_of_bits

attend_tiles = dispatch(tiles.attend_tiles, "foveate.ops.attend.tiles_kernel", tiles.check_tiles)


def attend_tile_keys(
    q: Tensor,
    kv: KV,
    chosen: TileKeys,
    *,
    tile: int,
    offset: int = 0,
    **how: Any,
) -> Attended:
    """:func:`attend_tiles` over keys as :class:`TileKeys` has them, in the same order; kernels give the same bits.

    A few tiles at a time, whose lists of keys take bounded memory: 256 MB on a GPU.

    Args:
        q, kv, tile, offset, how: as for :func:`attend_tiles`; ``how`` without ``starts``, ``counts`` and
            ``out``.
        chosen: of ``H`` heads, those of the keys and values, or one for all.

    Raises:
        ValueError: as :func:`attend_tiles`, and when there are not as many selections as tiles.
    """
    kv.check_queries(q, values=True)
    batch, heads, length = len(q), kv.k.shape[1], q.shape[2]
    start, end = offset - offset % tile, offset + length
    number = len(chosen.places) - 1
    if number != -(-(end - start) // tile):
        raise ValueError(f"keys of {number} tiles do not fit {-(-(end - start) // tile)} tiles of queries")
    out = q.new_empty(batch, length, q.shape[1], kv.v.shape[3]).transpose(1, 2)
    room = _math.GPU_SCORES_BYTES if q.is_cuda else _math.SCRATCH_BYTES
    for first, last in _pieces(chosen.places, room // (4 * batch * chosen.words.shape[1])):
        begins, starts = (x[first : last + 1] for x in (chosen.begins, chosen.starts))
        found = keys_of_bits(chosen.words, begins, starts, chosen.places[last] - chosen.places[first])
        indices, counts = (x.expand(-1, heads, -1) for x in found)
        since, until = max(offset, start + first * tile), min(end, start + last * tile)
        some = {"tile": tile, "offset": since, "starts": starts - starts[0], "counts": counts, **how}
        part = slice(since - offset, until - offset)
        attend_tiles(q[:, :, part], kv, indices, out=out[:, :, part], **some)
        del found, indices  # before those of the next tiles are there
    return Attended(out)


def _pieces(places: Sequence[int], room: int) -> list[tuple[int, int]]:
    """Tiles ``first .. last - 1`` of about as many places each: no more than ``room``, or one tile.

    ``places [T + 1]``: those of all tiles before each, ascending from 0.
    """
    tiles, first, pieces = len(places) - 1, 0, []
    room = max(1, room)
    each = -(-places[-1] // max(1, -(-places[-1] // room)))
    while first < tiles:
        last = min(max(first + 1, bisect.bisect_right(places, places[first] + each) - 1), tiles)
        pieces.append((first, last))
        first = last
    return pieces
