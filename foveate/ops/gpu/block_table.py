"""Block tables in Triton kernels."""

import triton
import triton.language as tl
from torch import Tensor

from foveate.ops.block_table import BlockTable


def arguments(block_table: BlockTable | None) -> tuple[Tensor | None, int | None]:
    """A kernel's ``table_ptr`` and ``table_stride``; None without a table."""
    return (None, None) if block_table is None else (block_table.table, block_table.table.stride(0))


def block_size(block_table: BlockTable | None, memory: Tensor) -> int:
    """Slots of a block of ``memory [N, Hkv, n, D]``; 0 without a table, which compiles no code."""
    return 0 if block_table is None else memory.shape[2]


@triton.jit
def entries(
    table_ptr,
    chosen,
    place,
    number,
    keys,
    INDEXED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """What a row's table has for the keys, or pages, that are ``chosen`` at places, or (not ``INDEXED``) for places.

    Places count below ``number``, and keys of pages below ``keys``.
    """
    slots, there = chosen.to(tl.int32), place < number
    if INDEXED:
        there = slots >= 0
    if PAGE_SIZE:
        slots = slots * PAGE_SIZE + place % PAGE_SIZE
        there = there & (slots < keys)
    return tl.load(table_ptr + slots // BLOCK_SIZE, mask=there, other=0)
