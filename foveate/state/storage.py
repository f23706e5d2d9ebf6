"""Memory for the keys and values of a cache: contiguous per row, or blocks named by a block table.

A mixin of :class:`~foveate.state.SlotCache`, which also has the row numbers, ``_row`` and ``_slot_specs`` used here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foveate.ops import BlockTable
from foveate.state.counters import Counters, Held
from foveate.state.description import Channel, Geometry

ALIGN = 64
"""The capacity of a row is a multiple of this many slots."""


def capacity_for(slots: int) -> int:
    """The capacity to which a cache grows that needs this many slots of a row."""
    return -(-(slots + max(ALIGN, slots // 16)) // ALIGN) * ALIGN


class Storage:
    """Keys, values and channels of a :class:`~foveate.state.SlotCache`, and how they grow.

    Contiguous keys and values are ``[B, Hkv, capacity, D(v)]``. In blocks they are ``[N, Hkv, block_size, D(v)]``, and
    the int32 tensor ``block_table [B, M]`` names each row's blocks (:class:`~foveate.ops.BlockTable`). A row owns
    blocks for its whole capacity; no two rows share a block. Channels are contiguous in both cases.
    """

    geometry: Geometry
    dtype: torch.dtype
    counters: Counters
    tensors: dict[str, Tensor]
    """``keys``, ``values``, the channels by name and, where the cache has them, ``positions`` and ``block_table``."""
    capacity: int
    """Slots allocated for each row."""
    block_size: int
    """Slots of a block; 0: keys and values are contiguous."""
    _free_blocks: list[int]
    """Blocks that no row owns; the last one is taken first."""
    offloaded: bool = False
    """Whether keys and values are in host memory, see :class:`~foveate.state.offloaded.OffloadedCache`."""
    _borrowed: bool
    """Whether ``keys`` and ``values`` are the tensors of the cache that this one was branched from."""

    held: Held
    """The bytes of all layers of the cache, this one's included as of the last :meth:`_count_bytes`."""
    _counted: int = 0
    """Bytes of this layer in :attr:`held`."""

    @property
    def resident_bytes(self) -> int:
        """Bytes allocated for keys, values and channels."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors.values())

    def _device_tensors(self) -> list[Tensor]:
        return list(self.tensors.values())

    def count_in(self, held: Held) -> None:
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

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        """Keys and values without a copy, for verbs that also take :attr:`block_table`.

        Views ``[B, Hkv, used, D(v)]``, or all blocks ``[N, Hkv, block_size, D(v)]``.
        """
        k, v = self.tensors["keys"], self.tensors["values"]
        return (k, v) if self.block_size else (k[:, :, : self.used], v[:, :, : self.used])

    @property
    def block_table(self) -> BlockTable | None:
        """The blocks of each row's used slots in :attr:`memory`; None when memory is contiguous."""
        return BlockTable(self.tensors["block_table"], self.used) if self.block_size else None

    @property
    def keys(self) -> Tensor:
        """``[B, Hkv, used, D]``: a view of contiguous keys, a copy of keys in blocks."""
        return self._contiguous("keys")

    @property
    def values(self) -> Tensor:
        """``[B, Hkv, used, Dv]``: a view of contiguous values, a copy of values in blocks."""
        return self._contiguous("values")

    def _contiguous(self, name: str) -> Tensor:
        tensor, blocks = self.tensors[name], self.block_table
        return tensor[:, :, : self.used] if blocks is None else blocks.gather(blocks.table, tensor)[0]

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
            if self.block_size and name in ("keys", "values"):
                continue
            grown = self._buffer(name, spec, capacity)
            if name in self.tensors:
                old = self.tensors[name][:, :, : grown.shape[2]]  # larger after a growth that failed halfway
                grown[:, :, : old.shape[2]] = old
            self.tensors[name] = grown
        if self.block_size:
            self._add_blocks(-(-capacity // self.block_size))
        else:
            self._borrowed = False
        self.capacity = capacity
        self._count_bytes()

    def _buffer(self, name: str, spec: Channel, capacity: int) -> Tensor:
        """A new tensor with entries for this many slots: zeros, or -1 for positions."""
        shape = (self.batch_size, self.geometry.num_kv_heads, -(-capacity // spec.per), *spec.shape)
        with torch.inference_mode(False):  # an inference tensor could not be written to outside inference_mode
            buffer = torch.zeros(shape, dtype=spec.dtype or self.dtype, device=self.device)
        return buffer.fill_(-1) if name == "positions" else buffer

    def _add_blocks(self, number: int) -> None:
        """Give every row ``number`` blocks in all, those that it has included."""
        held = self.tensors.get("block_table")
        more = number - (0 if held is None else held.shape[1])
        added = self._as_table(self._take_blocks(self.batch_size * more)).view(self.batch_size, more)
        with torch.inference_mode(False):
            self.tensors["block_table"] = added if held is None else torch.cat([held, added], 1)

    def _take_blocks(self, number: int) -> list[int]:
        """Take ``number`` free blocks; allocates more memory when there are too few."""
        missing = number - len(self._free_blocks)
        if missing > 0:
            for name, dim in (("keys", self.geometry.head_dim), ("values", self.geometry.value_dim)):
                old = self.tensors.get(name)
                count = 0 if old is None else len(old)
                shape = (count + missing, self.geometry.num_kv_heads, self.block_size, dim)
                with torch.inference_mode(False):
                    self.tensors[name] = torch.zeros(shape, dtype=self.dtype, device=self.device)
                if old is not None:
                    self.tensors[name][:count] = old
            self._free_blocks = [*self._free_blocks, *range(count, count + missing)]
            self._borrowed = False
        split = len(self._free_blocks) - number
        taken, self._free_blocks = self._free_blocks[split:][::-1], self._free_blocks[:split]
        return taken

    def _as_table(self, blocks: list[int]) -> Tensor:
        with torch.inference_mode(False):
            return torch.tensor(blocks, dtype=torch.int32, device=self.device)

    def _start_decoding(self) -> None:
        """Have what decode steps read and write, before a step that reads no row numbers on the host."""
        if self.evicts.in_decode:
            self._own_memory()

    # Writing

    def _write(self, first: int, k: Tensor, v: Tensor) -> None:
        """Write n tokens of every row to slots ``first .. first + n - 1``; k, v ``[B, Hkv, n, D(v)]``."""
        n = k.shape[2]
        if not self.block_size:
            self.tensors["keys"][:, :, first : first + n] = k
            self.tensors["values"][:, :, first : first + n] = v
            return
        slots = torch.arange(first, first + n, device=self.device).expand(self.batch_size, n)
        block, slot = self.block_table.slots(slots, self.tensors["keys"])
        self.tensors["keys"][block, :, slot] = k.transpose(1, 2)
        self.tensors["values"][block, :, slot] = v.transpose(1, 2)

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

    # Rows of a batch

    @property
    def _without_batch(self) -> tuple[str, ...]:
        """Names of tensors without a batch dimension: keys and values in blocks."""
        return ("keys", "values") if self.block_size else ()

    def _take_rows_of_blocks(self, chosen: list[int]) -> None:
        """Rearrange the block table for rows ``chosen`` of the present batch.

        The first occurrence of a row keeps its blocks, repeats get copies, and blocks of rows not chosen become free.
        """
        self._own_memory()
        table = self.tensors["block_table"].tolist()
        self._free_blocks = [
            *self._free_blocks,
            *(block for b, blocks in enumerate(table) if b not in chosen for block in blocks),
        ]
        first = {b: new for new, b in reversed(list(enumerate(chosen)))}
        repeats = [new for new, b in enumerate(chosen) if first[b] != new]
        copied = [block for new in repeats for block in table[chosen[new]]]
        taken = self._take_blocks(len(copied))
        rows, width = [table[b] for b in chosen], len(table[0])
        for number, new in enumerate(repeats):
            rows[new] = taken[number * width : (number + 1) * width]
        if repeats:
            source, target = self._as_table(copied).long(), self._as_table(taken).long()
            for name in ("keys", "values"):
                self.tensors[name][target] = self.tensors[name][source]
        self.tensors["block_table"] = self._as_table(rows)
