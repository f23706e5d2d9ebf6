"""Context managers for decode steps and maintenance that can be captured: row numbers advance on the device.

Caches whose rows have the same numbers share one :class:`DeviceRows`. :func:`step` encloses a decode step of all
layers, :func:`maintenance` the work that a method does between two steps (:class:`~foveate.methods.base.Replay`).
Inside either, reading a row number on the host raises RuntimeError.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from foveate.state import SlotCache
from foveate.state.device_rows import DeviceRows

ROOM = 256
"""Free slots that a cache gets before its steps are captured. When they are used up, it grows and is captured anew."""


@contextmanager
def capturing(groups: Sequence[DeviceRows]) -> Iterator[None]:
    """Within the block row numbers are read on the device only."""
    for rows in groups:
        rows.capturing = True
    try:
        yield
    finally:
        for rows in groups:
            rows.capturing = False


@contextmanager
def step(groups: Sequence[DeviceRows]) -> Iterator[None]:
    """Within the block all layers decode one token: row numbers advance at its start, counters at its end."""
    with capturing(groups):
        for rows in groups:
            rows.begin()
        yield
        for rows in groups:
            rows.tally.flush()


@contextmanager
def maintenance(groups: Sequence[DeviceRows]) -> Iterator[None]:
    """Within the block methods do their maintenance; its changes of row numbers take effect at the end."""
    with capturing(groups):
        for rows in groups:
            rows.pause()
        yield
        for rows in groups:
            rows.resume()


def device_rows(cache: SlotCache) -> DeviceRows:
    """Allocate row numbers on the device for a cache; :func:`write_rows` fills them."""
    return DeviceRows(cache.batch_size, cache.evicts.in_decode, cache.device, cache.own_numbers)


def freed_slots(cache: SlotCache) -> Tensor | None:
    """Allocate int64 ``[B, Hkv]``, -1, for the slots that a step evicts; None if steps never evict."""
    if not cache.evicts.in_decode:
        return None
    with torch.inference_mode(False):
        return torch.full((cache.batch_size, cache.geometry.num_kv_heads), -1, device=cache.device)


def write_rows(rows: DeviceRows, cache: SlotCache) -> None:
    """Copy a cache's row numbers to the device."""
    rows.write(cache.rows, None if cache.freed is None else cache.freed.rows)


def move_to_device(caches: Sequence[SlotCache]) -> DeviceRows:
    """Move the row numbers of caches whose rows have the same numbers to the device, where steps advance them.

    Borrowed keys and values of a method that evicts in decode are copied first, since its steps overwrite slots.
    """
    rows = device_rows(caches[0])
    write_rows(rows, caches[0])
    for cache in caches:
        cache.move_to_device(rows, freed_slots(cache))
    return rows
