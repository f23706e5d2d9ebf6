"""The protocol of decode steps that can be captured: the numbers of a cache's rows advance on the device.

Caches whose rows have the same numbers share one :class:`DeviceRows`. :func:`step` encloses a decode step, and
:func:`maintenance` what a method does between two steps. Inside of both, asking the host for a number that changes from
step to step is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from foveate.state import SlotCache
from foveate.state.device_rows import DeviceRows


@contextmanager
def capturing(groups: Sequence[DeviceRows]) -> Iterator[None]:
    """Within the block the row numbers are read from the device alone."""
    for rows in groups:
        rows.capturing = True
    try:
        yield
    finally:
        for rows in groups:
            rows.capturing = False


@contextmanager
def step(groups: Sequence[DeviceRows]) -> Iterator[None]:
    """Within the block all layers decode one token; it is counted before, and what layers have read afterwards."""
    with capturing(groups):
        for rows in groups:
            rows.begin()
        yield
        for rows in groups:
            rows.tally.flush()


@contextmanager
def maintenance(groups: Sequence[DeviceRows]) -> Iterator[None]:
    """Within the block methods do their maintenance; the row numbers that it changes are changed at the end."""
    with capturing(groups):
        for rows in groups:
            rows.pause()
        yield
        for rows in groups:
            rows.resume()


def device_rows(store: SlotCache) -> DeviceRows:
    """Memory on the device for the row numbers of a cache, still empty."""
    return DeviceRows(store.batch_size, store.evicts, store.device)


def freed_slots(store: SlotCache) -> Tensor | None:
    """Memory on the device for the slots that a step frees, int64 ``[B, Hkv]``; None where no slot is ever freed."""
    if not store.evicts:
        return None
    with torch.inference_mode(False):
        return torch.full((store.batch_size, store.geometry.num_kv_heads), -1, device=store.device)


def write_rows(rows: DeviceRows, store: SlotCache) -> None:
    """Put a cache's row numbers on the device."""
    rows.write(store.rows, None if store.freed is None else store.freed.rows, store.capacity)


def move_to_device(stores: Sequence[SlotCache]) -> DeviceRows:
    """Put the row numbers of caches, whose rows have the same numbers, on the device, and let steps advance them there.

    A method that evicts gets keys and values of its own first, since a step overwrites them.
    """
    rows = device_rows(stores[0])
    write_rows(rows, stores[0])
    for store in stores:
        if store.evicts:
            store.own_memory()
        store.move_to_device(rows, freed_slots(store))
    return rows
