"""The content of a layer's cache as plain tensors and numbers, from which an equal cache is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from foveate.state.cache import SlotCache
from foveate.state.counters import Counters
from foveate.state.description import Channel, Evicts, Geometry, RowNumber
from foveate.state.eviction import Freed


def pack(store: SlotCache) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The used slots' tensors by name, and what else there is as JSON values; :func:`unpack` reads both."""
    store.sync_to_host()
    tensors = {"keys": store.keys, "values": store.values}
    if store.evicts:
        tensors["positions"] = store.positions
    for name, spec in store.specs.items():
        entries = -(-store.used // spec.per) if spec.per else None
        tensors[name] = store.tensors[name][:, :, :entries] if spec.per else store.tensors[name]
    if store.freed is not None:
        tensors["freed"] = store.freed.slots
    facts = {
        "rows": store.rows,
        "freed": None if store.freed is None else store.freed.rows,
        "ordered": store.ordered,
        "uneven": store.uneven,
        "num_heads": store.geometry.num_heads,
    }
    return {name: tensor.contiguous() for name, tensor in tensors.items()}, facts


def unpack(
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    channels: Callable[[Geometry], Mapping[str, Channel | RowNumber]],
    evicts: Evicts,
    counters: Counters,
    block_size: int,
) -> SlotCache:
    """A cache with the content that :func:`pack` has given.

    Args:
        channels, evicts: those of the method that the content is of, see ``Method.channels``.
        counters: where the cache counts.
        block_size: slots of a block, see :class:`SlotCache`; it need not be that of the packed cache.
    """
    k, v = tensors["keys"], tensors["values"]
    geometry = Geometry(facts["num_heads"], k.shape[1], k.shape[3], v.shape[3])
    store = SlotCache(geometry, k.shape[0], k.dtype, k.device, channels(geometry), evicts, counters, block_size)
    store.rows = {name: list(numbers) for name, numbers in facts["rows"].items()}
    store.ordered, store.uneven = facts["ordered"], facts["uneven"]
    store.reserve(k.shape[2])
    store._write(0, k, v)
    per_slot = {name: spec.per for name, spec in store.specs.items()} | ({"positions": 1} if evicts else {})
    for name, per in per_slot.items():
        room = store.tensors[name][:, :, : tensors[name].shape[2]] if per else store.tensors[name]
        room.copy_(tensors[name])
    if facts["freed"] is not None:
        store.freed = Freed(tensors["freed"], list(facts["freed"]))
    return store
