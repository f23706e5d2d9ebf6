"""Keys chosen for tiles of queries, kept as a bit a key: an eighth of a byte, however many are chosen."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

WORD_KEYS = 32
"""Keys of a word."""


class TileKeys(NamedTuple):
    """The keys that tiles of queries have chosen, among those from 0 to a number that each tile has."""

    words: Tensor
    """int32 ``[B, H, P]``: bit i of a tile's word j is set where the key ``32 j + i`` is chosen; each tile's words
    after those of the tile before."""
    begins: Tensor
    """int64 ``[T + 1]``, ascending from 0 to P: tile t has the words ``begins[t] .. begins[t + 1] - 1``."""
    starts: Tensor
    """int64 ``[T + 1]``, ascending from 0: tile t has chosen ``starts[t + 1] - starts[t]`` keys at most."""
    places: tuple[int, ...]
    """The numbers of ``starts``, where no device has to be asked for them."""

    def to(self, device: torch.device) -> TileKeys:
        """The same on another device."""
        return TileKeys(*(x.to(device) for x in self[:3]), self.places)


class KeyLists(NamedTuple):
    """The keys of some tiles, tile after tile."""

    keys: Tensor
    """int32 ``[B, H, P]``: each tile's keys, ascending, and -1 where it has fewer than places."""
    counts: Tensor
    """int32 ``[B, H, T]``: how many keys each tile has."""


def set_bits(words: Tensor, indices: Tensor, begins: Tensor) -> None:
    """Enter keys into :attr:`TileKeys.words`, in place.

    Args:
        words: int32 ``[B, H, P]``.
        indices: int ``[B, H, T, K]``: keys of each tile, none of them twice and none entered before; -1 for none.
        begins: int64 ``[T + 1]``: tile t has the words ``begins[t] .. begins[t + 1] - 1``.

    Raises:
        ValueError: when shapes do not fit.
    """
    first, last = int(begins[0]), int(begins[-1])
    if first == last:
        return
    unused, some = indices < 0, words[:, :, first:last]
    word = (begins[:-1, None] - first + indices // WORD_KEYS).masked_fill(unused, 0)
    bit = (torch.ones_like(indices, dtype=torch.int32) << (indices % WORD_KEYS).int()).masked_fill(unused, 0)
    some |= torch.zeros_like(some).scatter_add_(2, word.flatten(2), bit.flatten(2))  # which adds no bit to itself


def keys_of_bits(words: Tensor, begins: Tensor, starts: Tensor, number: int) -> KeyLists:
    """The keys of some tiles' words, see :class:`TileKeys`.

    Args:
        words: int32 ``[B, H, P]``.
        begins: int64 ``[T + 1]``: tile t has the words ``begins[t] .. begins[t + 1] - 1``.
        starts: int64 ``[T + 1]``: the keys of tile t go to the places ``starts[t] - starts[0]`` and following ones, up
            to those of the next tile.
        number: places of all, ``starts[T] - starts[0]``.
    """
    found = words.new_full((*words.shape[:2], number), -1)
    counts = words.new_zeros((*words.shape[:2], len(begins) - 1))
    each = torch.arange(WORD_KEYS, dtype=torch.int32, device=words.device)
    edges, places = begins.tolist(), (starts - starts[0]).tolist()
    for t in range(len(edges) - 1):
        bits = (words[:, :, edges[t] : edges[t + 1], None] >> each & 1).flatten(2)
        rank = bits.cumsum(-1)
        batch, head, key = (bits.bool() & (rank <= places[t + 1] - places[t])).nonzero(as_tuple=True)
        found[batch, head, places[t] - 1 + rank[batch, head, key]] = key.int()
        counts[:, :, t] = bits.sum(-1).clamp_max(places[t + 1] - places[t])
    return KeyLists(found, counts)


def check_bits(words: Tensor, indices: Tensor, begins: Tensor) -> None:
    """Raise unless these fit."""
    fit = indices.dim() == 4 and words.shape[:2] == indices.shape[:2] and begins.shape == (indices.shape[2] + 1,)
    if words.dtype != torch.int32 or not fit:
        given = {"words": words, "indices": indices, "begins": begins}
        raise ValueError("shapes do not fit: " + ", ".join(f"{name} {tuple(x.shape)}" for name, x in given.items()))
