"""Memory for the keys and values of a cache: contiguous per row.

A mixin of :class:`~foveate.state.SlotCache`, which also has the row numbers, ``_row`` and ``_slot_specs`` used here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foveate.ops import KV, BlockTable
from foveate.state.counters import BytesInUse, Counters
from foveate.state.description import Channel, Geometry

ALIGN = 64
"""The capacity of a row is a multiple of this many slots."""


def capacity_for(slots: int) -> int:
    """The capacity to which a cache grows that needs this many slots of a row."""
    return -(-(slots + max(ALIGN, slots // 16)) // ALIGN) * ALIGN


class Storage:
    """Keys, values and channels of a :class:`~foveate.state.SlotCache`, and how they grow.

    Keys and values are ``[B, Hkv, capacity, D(v)]``.
    """

    geometry: Geometry
    dtype: torch.dtype
    counters: Counters
    tensors: dict[str, Tensor]
    """``keys``, ``values``, the channels by name and, where the cache has them, ``positions``."""
    capacity: int
    """Slots allocated for each row."""
    offloaded: bool = False
    """Whether keys and values are in host memory, see :class:`~foveate.state.offloaded.OffloadedCache`."""
    fills_channels: bool = False
    """Whether whoever writes a token's key also writes what channels hold of it, see :attr:`Channel.written`."""
    _borrowed: bool
    """Whether ``keys`` and ``values`` are the tensors of the cache that this one was branched from."""

    held: BytesInUse
    """The bytes of all layers of the cache, this one's included as of the last :meth:`_count_bytes`."""
    _counted: int = 0
    """Bytes of this layer in :attr:`held`."""

    @property
    def resident_bytes(self) -> int:
        """Bytes allocated for keys, values and channels."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors.values())

    def _device_tensors(self) -> list[Tensor]:
        return list(self.tensors.values())

    def count_in(self, held: BytesInUse) -> None:
        """Count what the layer holds, now and later, with the other layers of its cache; once for each cache."""
        self.held = self.counters.held = held
        self._counted = self.resident_bytes
        held.change(self._counted)

    def _count_bytes(self) -> None:
        """Note what the layer holds. Copies that a layer makes while it grows or evicts are not counted."""
        self.counters.resident_bytes, self.counters.held = self.resident_bytes, self.held
        self.held.change(self.counters.resident_bytes - self._counted)
        self._counted = self.counters.resident_bytes

    # What methods read

    def view(self, lengths: Tensor | None = None) -> KV:
        """Keys and values without a copy, for the verbs of :mod:`foveate.ops`: ``[B, Hkv, used, D(v)]``.

        Args:
            lengths: see :class:`~foveate.ops.KV`.
        """
        used, tensors = self.used, self.tensors
        return KV(tensors["keys"][:, :, :used], tensors["values"][:, :, :used], None, lengths)

    def newest_page(self, lengths: Tensor) -> KV:
        """At least the keys of the page that each row's newest token is in, at the places of :meth:`view`.

        Args:
            lengths: see :class:`~foveate.ops.KV`.
        """
        return self.view(lengths)

    def view_of_pages(self, pages: Tensor, held: Callable[[Any], Any]) -> tuple[KV, Tensor]:
        """Keys for a decode step that scores only some pages, and the numbers of these pages among the keys.

        Args:
            pages: int32 ``[B, Hkv or 1, P]``, -1 for none.
            held: gives the number of keys in these pages from a row's length, see :meth:`StepPlan.per_row`.
        """
        return self.view(self.plan["lengths"]), pages

    def entries(self, name: str, number: int) -> tuple[Tensor, BlockTable | None]:
        """A channel's first ``number`` entries of each row, ``[B, Hkv, number, ...]``, and None; of an engine's blocks
        the channel in all blocks, and a table of these entries."""
        return self.tensors[name][:, :, :number], None

    def read_slots(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Keys and values of slots ``first .. last - 1``, ``[B, Hkv, last - first, D(v)]``; not in a captured step."""
        return self.keys[:, :, first:last], self.values[:, :, first:last]

    def fetch_slots(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values of slots, ``[B, Hkv, N, D(v)]``.

        Args:
            slots: int64 ``[B, Hkv, N]``; one that is not in use, such as -1, gives anything finite.
        """
        index = slots.clamp(0, self.used - 1)[..., None]
        return tuple(x.gather(2, index.expand(-1, -1, -1, x.shape[3])) for x in (self.keys, self.values))

    @property
    def keys(self) -> Tensor:
        """``[B, Hkv, used, D]``."""
        return self.tensors["keys"][:, :, : self.used]

    @property
    def values(self) -> Tensor:
        """``[B, Hkv, used, Dv]``."""
        return self.tensors["values"][:, :, : self.used]

    # Capacity

    def reserve(self, slots: int) -> None:
        """Grow every row to a capacity of at least this many slots; copies the tensors that grow.

        Raises:
            RuntimeError: for a single row of a batch, which shares the batch's tensors.
        """
        if slots <= self.capacity:
            return
        if self._row is not None:
            raise RuntimeError("a row of a batch cannot grow alone: reserve room in the batch first")
        capacity = capacity_for(slots)
        for name, spec in self._slot_specs().items():
            grown = self._buffer(name, spec, capacity)
            if name in self.tensors:
                old = self.tensors[name][:, :, : grown.shape[2]]  # larger after a growth that failed halfway
                grown[:, :, : old.shape[2]] = old
            self.tensors[name] = grown
        self._borrowed = False
        self.capacity = capacity
        self._count_bytes()

    def _buffer(self, name: str, spec: Channel, capacity: int) -> Tensor:
        """A new tensor with entries for this many slots: zeros, or -1 for positions."""
        shape = (self.batch_size, self.geometry.num_kv_heads, -(-capacity // spec.per), *spec.shape)
        with torch.inference_mode(False):  # an inference tensor could not be written to outside inference_mode
            buffer = torch.zeros(shape, dtype=spec.dtype or self.dtype, device=self.device)
        return buffer.fill_(-1) if name == "positions" else buffer

    def _start_decoding(self) -> None:
        """Have what decode steps read and write, before a step that reads no row numbers on the host."""
        if self.evicts.in_decode:
            self._own_memory()

    # Writing

    def _write(self, first: int, k: Tensor, v: Tensor) -> None:
        """Write n tokens of every row to slots ``first .. first + n - 1``; k, v ``[B, Hkv, n, D(v)]``."""
        n = k.shape[2]
        self.tensors["keys"][:, :, first : first + n] = k
        self.tensors["values"][:, :, first : first + n] = v

    def _clear_channels(self, slot: Tensor, done: str | None = None) -> None:
        """Zero the channels of one slot of each row, int64 ``[B, 1 or Hkv]``, apart from that of the name ``done``."""
        for name, spec in self.specs.items():
            if spec.per == 1 and not spec.recomputed and name != done:
                index = slot.view(*slot.shape, 1, *[1] * len(spec.shape))
                shape = (self.batch_size, self.geometry.num_kv_heads, 1, *spec.shape)
                self.tensors[name].scatter_(2, index.expand(shape), 0)

    def _fill(self, k: Tensor, v: Tensor) -> None:
        """Write the first tokens of every row to a cache that was empty; k, v ``[B, Hkv, n, D(v)]``."""
        self._write(0, k, v)

    def _own_memory(self) -> None:
        """Replace borrowed keys and values by copies. Called before a slot in use is overwritten or evicted."""
        if self._borrowed:
            with torch.inference_mode(False):
                self.tensors |= {name: self.tensors[name].clone() for name in ("keys", "values")}
            self._borrowed = False
