"""Keys in blocks: a table says in which physical block a row's keys are (PagedAttention, Kwon et al. 2023)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foveate.ops._math import on_host

EIGHT_BITS = torch.float8_e4m3fn
"""An eight-bit dtype that blocks of keys and values may have, too. The caller applies their scales: the keys' scale to
the factor of the logits, the values' scale to the output."""


@dataclass(frozen=True, eq=False)
class BlockTable:
    """A map from each row's keys to blocks of a memory that all rows share.

    Memory is ``[N, Hkv, n, D]``: N physical blocks of n slots each. Key s of row b is in slot ``s % n`` of block
    ``table[b, s // n]``. Memory is read through its strides, so that the layouts of engines are views of it: with
    ``[N, n, Hkv, D]`` it is ``kv.transpose(1, 2)``, with keys and values side by side ``kv[..., :D]`` and
    ``kv[..., D:]``, and with a flat ``[slots, Hkv, D]`` it is ``kv.unflatten(0, (-1, n)).transpose(1, 2)``.

    Args:
        table: int32 or int64 ``[B, M]``, each row contiguous. An entry for a block that holds no key of a row may be
            any number; it is not used.
        length: the number of keys of the longest row, Lk, at most ``M * n``. :class:`~foveate.ops.KV` holds the lengths
            of shorter rows.

    Raises:
        ValueError: for a table that is not of integers.
    """

    table: Tensor
    length: int

    def __post_init__(self):
        if self.table.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"a block table must be int32 or int64 [B, M], not {self.table.dtype}")

    def check(self, q: Tensor, *memory: Tensor) -> None:
        """Raise ValueError unless the table has a row for each row of q, is on the memory's device, and has blocks for
        all keys."""
        self.check_memory(*memory)
        self.check_rows(q)

    def check_rows(self, x: Tensor) -> None:
        """Raise ValueError unless the table has a row for each row of ``x [B, ...]``."""
        if len(self.table) != len(x):
            raise ValueError(f"a block table of {len(self.table)} rows does not fit q {list(x.shape)}")

    def check_memory(self, *memory: Tensor | None) -> None:
        """Raise ValueError unless the table is on the device of each memory ``[N, Hkv, n, D]`` that is given, and has
        blocks for all keys."""
        table = self.table
        if table.dim() != 2 or (table.numel() and table.stride(1) != 1):
            raise ValueError(f"a block table must be [B, M] of contiguous rows, not {list(table.shape)}")
        for x in memory:
            if x is None:
                continue
            if x.dim() != 4 or x.device != table.device:
                raise ValueError(
                    f"memory {list(x.shape)} on {x.device} must be [N, Hkv, n, D] on the block table's {table.device}"
                )
            if not 0 <= self.length <= table.shape[1] * x.shape[2]:
                raise ValueError(f"{table.shape[1]} blocks of {x.shape[2]} slots have no room for {self.length} keys")

    def slots(self, indices: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """The physical block of each key, and the slot within the block, for keys ``indices [B, ...]``: both int64
        ``[B, ...]``.

        Raises:
            ValueError: on the CPU for a key that has no block in ``memory [N, Hkv, n, D]``.
        """
        entries, room = (indices // memory.shape[2]).flatten(1).long(), self.table.shape[1]
        if on_host(entries) and bool(((entries < 0) | (entries >= room)).any()):
            raise ValueError(f"keys must be among the {room * memory.shape[2]} of a block table of {room} blocks")
        blocks = self.table.gather(1, entries).long().view(indices.shape)
        if on_host(blocks) and bool(((blocks < 0) | (blocks >= len(memory))).any()):
            raise ValueError(f"a block table must name one of {len(memory)} blocks for every key")
        return blocks, indices.long() % memory.shape[2]

    def gather(self, q: Tensor, *memory: Tensor) -> list[Tensor]:
        """A copy of each memory ``[N, Hkv, n, D]`` in one piece, for the rows of q: ``[B, Hkv, Lk, D]``.

        Memory in eight bits (:data:`EIGHT_BITS`) is converted to q's dtype.

        Keys for which the table names no block are a copy of some block, or zeros if the memory has no block.

        Raises:
            ValueError: see :meth:`check`.
        """
        self.check(q, *memory)
        copies = []
        for x in memory:
            number, heads, size, dim = x.shape
            entries = self.table[:, : -(-self.length // size)].long()
            blocks = x[entries.clamp(0, number - 1)] if number else x.new_zeros(*entries.shape, heads, size, dim)
            blocks = blocks.to(q.dtype) if x.dtype == EIGHT_BITS and q.is_floating_point() else blocks
            copies.append(blocks.transpose(1, 2).flatten(2, 3)[:, :, : self.length].contiguous())
        return copies


def in_one_piece(q: Tensor, block_table: BlockTable | None, *memory: Tensor) -> Sequence[Tensor]:
    """Memory in one piece: with a block table see :meth:`BlockTable.gather`, without one the memory itself."""
    return memory if block_table is None else block_table.gather(q, *memory)


def number_of_keys(k: Tensor, block_table: BlockTable | None) -> int:
    """The number of keys of the longest row: the block table's length, or the length of memory in one piece."""
    return k.shape[2] if block_table is None else block_table.length
