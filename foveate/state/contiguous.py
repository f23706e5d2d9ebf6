"""Keys and values on the device, contiguous per row."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from foveate.ops import KV, put_token
from foveate.state.store import Store, StoreShape


class Contiguous(Store):
    """Keys and values ``[B, Hkv, capacity, D(v)]`` on the device, which grow by being copied."""

    can_be_captured = True

    def __init__(self, shape: StoreShape):
        super().__init__(shape)
        self.keys, self.values = (self._buffer(dim, 0) for dim in self._dims)
        self._borrowed = False
        """Whether the two are the tensors of another store, see :meth:`shared`."""

    @classmethod
    def over(cls, shape: StoreShape, k: Tensor, v: Tensor) -> Contiguous:
        """A store over given keys and values ``[B, Hkv, L, D(v)]``, which are not copied. All L slots are reserved."""
        one = cls(shape)
        one.keys, one.values = k, v
        return one

    def shared(self) -> Contiguous:
        """Another store over the same memory, which is copied before a slot in use is overwritten."""
        one = self.over(self.shape, self.keys, self.values)
        one._borrowed = True
        return one

    @property
    def _dims(self) -> tuple[int, int]:
        return self.shape.geometry.head_dim, self.shape.geometry.value_dim

    def _buffer(self, dim: int, slots: int) -> Tensor:
        shape = self.shape.batch_size, self.shape.geometry.num_kv_heads, slots, dim
        with torch.inference_mode(False):  # an inference tensor could not be written to outside inference_mode
            return torch.zeros(shape, dtype=self.shape.dtype, device=self.shape.device)

    def _grown(self, old: Tensor, slots: int) -> Tensor:
        grown = self._buffer(old.shape[3], slots)
        grown[:, :, : old.shape[2]] = old[:, :, :slots]
        return grown

    def reserve(self, slots: int) -> None:
        if slots > min(self.keys.shape[2], self.values.shape[2]):  # they differ after a growth that failed halfway
            self.keys = self._grown(self.keys, slots)
            self.values = self._grown(self.values, slots)
            self._borrowed = False

    # Writing

    def write(self, first: int, k: Tensor, v: Tensor) -> None:
        last = first + k.shape[2]
        self.keys[:, :, first:last] = k
        self.values[:, :, first:last] = v

    def put(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        for memory, x in ((self.keys, k), (self.values, v)):
            memory.scatter_(2, slots[..., None, None].expand(-1, -1, 1, x.shape[3]), x)

    def write_step(self, k: Tensor, v: Tensor, slots: Tensor, **beside) -> Tensor:
        """See :meth:`Store.write_step`; one launch."""
        return put_token(KV(self.keys, self.values), k, v, slots, **beside)

    def own_memory(self) -> None:
        if self._borrowed:
            with torch.inference_mode(False):
                self.keys, self.values = self.keys.clone(), self.values.clone()
            self._borrowed = False

    # Reading

    def view(self, used: int, lengths: Tensor | None = None) -> KV:
        """See :meth:`Store.view`; without a copy."""
        return KV(self.keys[:, :, :used], self.values[:, :, :used], None, lengths)

    def read(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """See :meth:`Store.read`; without a copy."""
        return self.keys[:, :, first:last], self.values[:, :, first:last]

    def fetch_slots(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        index = slots.clamp(0, self.keys.shape[2] - 1)[..., None]
        return tuple(x.gather(2, index.expand(-1, -1, -1, x.shape[3])) for x in (self.keys, self.values))

    # Rows

    def of_row(self, b: int, used: int) -> Contiguous:
        one = copy.copy(self)
        one.shape = self.shape._replace(batch_size=1)
        one.keys, one.values = self.keys[b : b + 1], self.values[b : b + 1]
        return one

    def take_rows(self, index: Tensor) -> None:
        self.keys, self.values = self.keys.index_select(0, index), self.values.index_select(0, index)
        self._borrowed = False

    # Memory

    def device_tensors(self) -> list[Tensor]:
        return [self.keys, self.values]

    @property
    def resident_bytes(self) -> int:
        return sum(x.untyped_storage().nbytes() for x in (self.keys, self.values))
