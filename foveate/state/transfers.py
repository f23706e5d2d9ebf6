"""Two buffers on the device through which the layers of a prompt read their earlier keys from host memory."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from foveate.state.counters import BytesInUse
from foveate.state.host_memory import HostMemory


class Reader(Protocol):
    """The keys of a layer in host memory."""

    host: HostMemory
    order: int
    held: BytesInUse
    used: int

    def stop_decoding(self) -> None:
        """Give back what decode steps have on the device."""


@dataclass(eq=False)
class _Buffer:
    """Keys and values of one layer, ``[B, Hkv, room, D(v)]``."""

    keys: Tensor
    values: Tensor
    order: int
    """Of the layer."""
    ready: Any
    """The event after which the layer's earlier keys are there; None on a CPU."""

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class Transfers:
    """Copies between host and device while a prompt is read: the next layer is copied while the present layer attends.

    Args:
        device: the device that computes.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.room = 0
        """The fewest slots of a buffer: all announced slots, so that buffers are allocated once."""
        self._readers: weakref.WeakValueDictionary[int, Reader] = weakref.WeakValueDictionary()
        self._next = 0
        self._buffers: list[_Buffer] = []
        """The buffer used last comes last."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __getstate__(self) -> dict[str, Any]:  # copies have buffers of their own
        return {"device": self.device, "room": self.room, "_next": self._next}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["device"])
        self.__dict__.update(state)

    def join(self, reader: Reader) -> int:
        """Note a layer; returns its number in the order of layers."""
        self._next += 1
        self._readers[self._next] = reader
        return self._next

    def note(self, reader: Reader) -> None:
        """Note a layer of a copied cache, unless that is done."""
        self._readers.setdefault(reader.order, reader)

    def holds(self, order: int) -> tuple[Tensor, Tensor] | None:
        """Keys and values ``[B, Hkv, room, D(v)]`` of a layer, if it was opened and is not closed."""
        found = next((one for one in self._buffers if one.order == order), None)
        return None if found is None else (found.keys, found.values)

    def open(self, reader: Reader, slots: int) -> tuple[Tensor, Tensor]:
        """Buffers with the keys and values that a layer holds so far, and with room for ``slots`` slots.

        Before the first buffer of a prompt is allocated, all layers free their memory for decode steps on the device.
        """
        self.note(reader)
        if not self._buffers:
            for one in list(self._readers.values()):
                one.stop_decoding()
        found = next((one for one in self._buffers if one.order == reader.order), None)
        if found is None or found.keys.shape[2] < slots:
            found = self._load(reader, slots)
        self._buffers.remove(found)
        self._buffers.append(found)
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_event(found.ready)
        return found.keys, found.values

    def fetch_ahead(self, order: int, held: int) -> None:
        """Begin to read the layer after the one of this number; after the last one comes the first.

        Args:
            held: slots that the layer of this number used before the tokens that it has just got. Later layers have not
                got these tokens, so they use no more; after decode steps they know a bound alone.
        """
        orders = sorted(self._readers)
        following = self._readers.get(orders[(orders.index(order) + 1) % len(orders)])
        if following is not None and following.order > order:
            following.used = min(following.used, held)
        if self._stream is None or following is None or following.order == order or self.holds(following.order):
            return
        if following.used:
            self._load(following, following.used)

    def _load(self, reader: Reader, slots: int) -> _Buffer:
        """Read a layer into the buffer that was used less recently, or into a new one."""
        host, room = reader.host, max(slots, self.room, reader.used)
        again = next((one for one in self._buffers if one.order == reader.order), None)
        old = again or (self._buffers[0] if len(self._buffers) > 1 else None)
        shapes = [(host.batch, host.heads, room, dim) for dim in host.dims]
        fits = old is not None and [old.keys.shape, old.values.shape] == shapes and old.keys.dtype == host.dtype
        if old is not None:
            self._buffers.remove(old)
            reader.held.change(-old.nbytes)
        if fits:
            made = _Buffer(old.keys, old.values, reader.order, None)
        else:
            del old, again
            with torch.inference_mode(False):
                made = _Buffer(
                    *(torch.zeros(shape, dtype=host.dtype, device=self.device) for shape in shapes), reader.order, None
                )
        reader.held.change(made.nbytes)
        self._buffers.insert(0, made)
        if self._stream is None:
            host.read(0, reader.used, 0, made.keys, made.values)
            return made
        self._stream.wait_stream(torch.cuda.current_stream(self.device))  # whoever used the buffer before is done
        with torch.cuda.stream(self._stream), torch.no_grad():
            host.read(0, reader.used, 0, made.keys, made.values)
            for x in (made.keys, made.values):
                x.record_stream(self._stream)
            made.ready = self._stream.record_event()
        return made

    def write(self, reader: Reader, row: int, first: int, k: Tensor, v: Tensor) -> None:
        """Write new tokens of a layer to host memory, beside what the device computes; see :meth:`HostMemory.write`."""
        if self._stream is None:
            reader.host.write(row, first, k, v)
            return
        k, v = k.contiguous(), v.contiguous()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            reader.host.write(row, first, k, v)
            for x in (k, v):
                x.record_stream(self._stream)

    def close(self, held: BytesInUse) -> None:
        """Drop the buffers, and let what the device does from now on see what was written to host memory."""
        for one in self._buffers:
            held.change(-one.nbytes)
        self._buffers = []
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def drop(self, order: int, held: BytesInUse) -> None:
        """Forget what a layer's buffer holds, after its tokens have changed otherwise."""
        for one in [one for one in self._buffers if one.order == order]:
            self._buffers.remove(one)
            held.change(-one.nbytes)

    def wait(self) -> None:
        """Wait on the host until all that was written is in host memory, by steps, too."""
        if self._stream is not None:
            self._stream.synchronize()
            torch.cuda.current_stream(self.device).synchronize()
