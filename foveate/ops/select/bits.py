"""Keys chosen for tiles of queries, stored as one bit for each key, however many keys are chosen."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

WORD_KEYS = 32
"""Number of keys in a word."""


class TileKeys(NamedTuple):
    """The keys that tiles of queries have chosen. Tile t chooses among the keys from 0 up to a number of its own."""

    words: Tensor
    """int32 ``[B, H, P]``: bit i of a tile's word j is set if the key ``32 j + i`` is chosen. The words of a tile
    follow the words of the tile before."""
    begins: Tensor
    """int64 ``[T + 1]``, ascending from 0 to P: tile t has the words ``begins[t] .. begins[t + 1] - 1``."""
    starts: Tensor
    """int64 ``[T + 1]``, ascending from 0: tile t has chosen ``starts[t + 1] - starts[t]`` keys at most."""
    places: tuple[int, ...]
    """The numbers of ``starts`` on the host, so that no device has to be asked for them."""

    def to(self, device: torch.device) -> TileKeys:
        """The same on another device."""
        return TileKeys(*(x.to(device) for x in self[:3]), self.places)


class KeyLists(NamedTuple):
    """The keys of some tiles, tile after tile."""

    keys: Tensor
    """int32 ``[B, H, P]``: each tile's keys, ascending, then -1 up to the end of the tile's places."""
    counts: Tensor
    """int32 ``[B, H, T]``: number of keys of each tile."""


def set_bits(words: Tensor, indices: Tensor, begins: Tensor) -> None:
    """Set the bits of keys in :attr:`TileKeys.words`, in place.

    Args:
        words: int32 ``[B, H, P]``.
        indices: int ``[B, H, T, K]``: keys of each tile, none twice and none whose bit is set; -1 marks an unused
            place.
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
        starts: int64 ``[T + 1]``: the keys of tile t go to the places ``starts[t] - starts[0]`` to ``starts[t + 1] -
            starts[0] - 1``.
        number: total number of places, ``starts[T] - starts[0]``.
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
    """Raise ValueError unless the arguments of :func:`set_bits` fit each other."""
    fit = indices.dim() == 4 and words.shape[:2] == indices.shape[:2] and begins.shape == (indices.shape[2] + 1,)
    if words.dtype != torch.int32 or not fit:
        given = {"words": words, "indices": indices, "begins": begins}
        raise ValueError("shapes do not fit: " + ", ".join(f"{name} {tuple(x.shape)}" for name, x in given.items()))
