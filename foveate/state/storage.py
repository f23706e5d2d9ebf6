"""Where the keys and values of a cache's slots are: in one piece, or in physical blocks that all rows share."""

from __future__ import annotations

import torch
from torch import Tensor

from foveate.ops import BlockTable
from foveate.state.description import Channel, Geometry

ALIGN = 64
"""Slots of a row grow in multiples of so many."""


class Storage:
    """How a :class:`~foveate.state.SlotCache` keeps keys and values.

    In one piece they are ``[B, Hkv, capacity, D(v)]``. In blocks they are ``[N, Hkv, block_size, D(v)]``, and the int32
    tensor ``block_table [B, M]`` names the blocks of each row, as a :class:`~foveate.ops.BlockTable` has them. A row
    has blocks for its whole capacity, and no two rows share one. Other state of a method is in one piece in both cases.
    """

    geometry: Geometry
    dtype: torch.dtype
    tensors: dict[str, Tensor]
    capacity: int
    block_size: int
    """Slots of a block; 0: keys and values are in one piece."""
    free_blocks: list[int]
    """Blocks that no row holds; the last one is taken first."""

    # What methods read

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        """Keys and values where they are, as the verbs take them beside :attr:`block_table`.

        Views ``[B, Hkv, used, D(v)]``; in blocks ``[N, Hkv, block_size, D(v)]``.
        """
        k, v = self.tensors["keys"], self.tensors["values"]
        return (k, v) if self.block_size else (k[:, :, : self.used], v[:, :, : self.used])

    @property
    def block_table(self) -> BlockTable | None:
        """Where the slots in use are in :attr:`memory`; None: in one piece."""
        return BlockTable(self.tensors["block_table"], self.used) if self.block_size else None

    @property
    def keys(self) -> Tensor:
        """``[B, Hkv, used, D]``: a view; of blocks a copy, for verbs that take no block table."""
        return self._in_one_piece("keys")

    @property
    def values(self) -> Tensor:
        """``[B, Hkv, used, Dv]``: a view; of blocks a copy, for verbs that take no block table."""
        return self._in_one_piece("values")

    def _in_one_piece(self, name: str) -> Tensor:
        tensor, where = self.tensors[name], self.block_table
        return tensor[:, :, : self.used] if where is None else where.gather(where.table, tensor)[0]

    # Room

    def reserve(self, slots: int) -> None:
        """Make room for at least this many slots in every row."""
        if slots <= self.capacity:
            return
        if self._row is not None:
            raise RuntimeError("a row of a batch cannot grow alone: reserve room in the batch first")
        capacity = -(-(slots + max(ALIGN, slots // 16)) // ALIGN) * ALIGN
        for name, spec in self._slot_specs().items():
            if self.block_size and name in ("keys", "values"):
                continue
            grown = self._buffer(name, spec, capacity)
            if name in self.tensors:
                old = self.tensors[name]
                grown[:, :, : old.shape[2]] = old
            self.tensors[name] = grown
        if self.block_size:
            self._add_blocks(-(-capacity // self.block_size))
        else:
            self.borrowed = False
        self.capacity = capacity
        self.counters.resident_bytes = self.resident_bytes

    def _buffer(self, name: str, spec: Channel, capacity: int) -> Tensor:
        """Empty entries for this many slots: zeros, or -1 for positions."""
        shape = (self.batch_size, self.geometry.num_kv_heads, -(-capacity // spec.per), *spec.shape)
        with torch.inference_mode(False):  # a buffer made under inference_mode could not be written outside of it
            buffer = torch.zeros(shape, dtype=spec.dtype or self.dtype, device=self.device)
        return buffer.fill_(-1) if name == "positions" else buffer

    def _add_blocks(self, number: int) -> None:
        """Give every row so many blocks, those included that it has."""
        held = self.tensors.get("block_table")
        more = number - (0 if held is None else held.shape[1])
        added = self._as_table(self._take_blocks(self.batch_size * more)).view(self.batch_size, more)
        with torch.inference_mode(False):
            self.tensors["block_table"] = added if held is None else torch.cat([held, added], 1)

    def _take_blocks(self, number: int) -> list[int]:
        """Blocks that no row holds; memory grows where there are too few."""
        missing = number - len(self.free_blocks)
        if missing > 0:
            for name, dim in (("keys", self.geometry.head_dim), ("values", self.geometry.value_dim)):
                old = self.tensors.get(name)
                count = 0 if old is None else len(old)
                shape = (count + missing, self.geometry.num_kv_heads, self.block_size, dim)
                with torch.inference_mode(False):
                    self.tensors[name] = torch.zeros(shape, dtype=self.dtype, device=self.device)
                if old is not None:
                    self.tensors[name][:count] = old
            self.free_blocks = [*self.free_blocks, *range(count, count + missing)]
            self.borrowed = False
        split = len(self.free_blocks) - number
        taken, self.free_blocks = self.free_blocks[split:][::-1], self.free_blocks[:split]
        return taken

    def _as_table(self, blocks: list[int]) -> Tensor:
        with torch.inference_mode(False):
            return torch.tensor(blocks, dtype=torch.int32, device=self.device)

    # Writing

    def _write(self, first: int, k: Tensor, v: Tensor) -> None:
        """Write n tokens of every row to the slots from ``first`` on; k, v ``[B, Hkv, n, D(v)]``."""
        n = k.shape[2]
        if not self.block_size:
            self.tensors["keys"][:, :, first : first + n] = k
            self.tensors["values"][:, :, first : first + n] = v
            return
        slots = torch.arange(first, first + n, device=self.device).expand(self.batch_size, n)
        block, slot = self.block_table.slots(slots, self.block_size)
        self.tensors["keys"][block, :, slot] = k.transpose(1, 2)
        self.tensors["values"][block, :, slot] = v.transpose(1, 2)

    def own_memory(self) -> None:
        """Copy keys and values that other branches read, before one of them is written over."""
        if self.borrowed:
            with torch.inference_mode(False):
                self.tensors |= {name: self.tensors[name].clone() for name in ("keys", "values")}
            self.borrowed = False

    # Rows of a batch

    @property
    def _shared(self) -> tuple[str, ...]:
        """Tensors that have no entry of their own for each row."""
        return ("keys", "values") if self.block_size else ()

    def _take_rows_of_blocks(self, chosen: list[int]) -> None:
        """Rows of the batch anew: the first one of a row keeps its blocks, others get copies, and the rest are free."""
        self.own_memory()
        table = self.tensors["block_table"].tolist()
        self.free_blocks = [
            *self.free_blocks,
            *(block for b, blocks in enumerate(table) if b not in chosen for block in blocks),
        ]
        first = {b: place for place, b in reversed(list(enumerate(chosen)))}
        again = [place for place, b in enumerate(chosen) if first[b] != place]
        copied = [block for place in again for block in table[chosen[place]]]
        taken = self._take_blocks(len(copied))
        rows, width = [table[b] for b in chosen], len(table[0])
        for number, place in enumerate(again):
            rows[place] = taken[number * width : (number + 1) * width]
        if again:
            source, target = self._as_table(copied).long(), self._as_table(taken).long()
            for name in ("keys", "values"):
                self.tensors[name][target] = self.tensors[name][source]
        self.tensors["block_table"] = self._as_table(rows)
