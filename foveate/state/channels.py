"""Tensors with an entry for each slot, page or sequence: how the channels of a cache are made, grown and cleared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from foveate.state.description import Channel
from foveate.state.store import StoreShape

POSITIONS = Channel(dtype=torch.int32)
"""What a cache keeps of each slot under the name ``positions``, where the method evicts."""


def per_sequence(specs: Mapping[str, Channel], shape: StoreShape) -> dict[str, Tensor]:
    """The channels with an entry for each sequence, ``[B, *shape]``, with their initial values."""
    with torch.inference_mode(False):
        return {
            name: torch.full(
                (shape.batch_size, *spec.shape), spec.fill, dtype=spec.dtype or shape.dtype, device=shape.device
            )
            for name, spec in specs.items()
            if spec.per == 0
        }


def buffer(name: str, spec: Channel, shape: StoreShape, slots: int) -> Tensor:
    """A new tensor with entries for this many slots, ``[B, Hkv, entries, *shape]``: zeros, or -1 for positions."""
    sizes = (shape.batch_size, shape.geometry.num_kv_heads, -(-slots // spec.per), *spec.shape)
    with torch.inference_mode(False):  # an inference tensor could not be written to outside inference_mode
        made = torch.zeros(sizes, dtype=spec.dtype or shape.dtype, device=shape.device)
    return made.fill_(-1) if name == "positions" else made


def grow(tensors: dict[str, Tensor], specs: Mapping[str, Channel], shape: StoreShape, slots: int) -> None:
    """Have entries for this many slots; what entries hold stays."""
    for name, spec in specs.items():
        grown = buffer(name, spec, shape, slots)
        if name in tensors:
            old = tensors[name][:, :, : grown.shape[2]]  # larger after a growth that failed halfway
            grown[:, :, : old.shape[2]] = old
        tensors[name] = grown


def clear(tensors: Iterable[Tensor], slot: Tensor) -> None:
    """Zero the entries of one slot of each row, int64 ``[B, Hkv]``, in tensors ``[B, Hkv, S, ...]``."""
    for tensor in tensors:
        own = tensor.shape[3:]
        index = slot.view(*slot.shape, 1, *[1] * len(own))
        tensor.scatter_(2, index.expand(*slot.shape, 1, *own), 0)


def nbytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes that are allocated for these tensors."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())
