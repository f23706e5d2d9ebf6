"""Which keys a Triton kernel reads, and where they are: choices and block tables.

A kernel whose ``BLOCK_SIZE`` is not 0 reads memory in blocks of ``BLOCK_SIZE`` slots, keys as
``[N, Hkv, BLOCK_SIZE, D]``, and ``table`` holds the numbers of each row's blocks.

Shapes in the helpers: N = places of a block of keys; the helpers take tiles of any shape.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.ops.block_table import EIGHT_BITS, BlockTable
from foveate.ops.gpu.tiles import capability

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
"""What kernels multiply."""


def arguments(block_table: BlockTable | None) -> tuple[Tensor | None, int | None]:
    """A kernel's ``table_ptr`` and ``table_stride``; None without a table."""
    return (None, None) if block_table is None else (block_table.table, block_table.table.stride(0))


def block_size(block_table: BlockTable | None, memory: Tensor) -> int:
    """Slots of a block of ``memory [N, Hkv, n, D]``; 0 without a table, which compiles no code."""
    return 0 if block_table is None else memory.shape[2]


def converts(memory: Tensor) -> bool:
    """Whether kernels read blocks in eight bits: GPUs before Hopper do not convert these."""
    return memory.dtype == EIGHT_BITS and (not memory.is_cuda or capability(memory.device) >= 9)


def reads(q: Tensor, k: Tensor, block_table: BlockTable | None) -> bool:
    """Whether kernels read these keys, or values, for queries of q's dtype: memory of the same dtype, or blocks in
    eight bits."""
    return q.dtype in FLOATS and (k.dtype == q.dtype or (block_table is not None and converts(k)))


@triton.jit
def slots_at(chosen_ptr, stride, place, number, keys, first, INDEXED: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """The slots of a row's keys at places ``place [N]`` below ``number``, int32 ``[N]``; -1 where no key is to be read.

    ``chosen`` is one of four things. With ``INDEXED`` it holds slots, -1 for none. With ``PAGE_SIZE`` not 0 it holds
    pages, -1 for none, and of their keys only slots below ``keys`` exist. Otherwise it is a mask, not 0 at the slots to
    read. None: every place is its own slot. With ``first`` (not None), a row where it is not 0 reads its first
    ``first`` keys and ignores ``chosen``; ``number`` must then be ``first``.
    """
    slots = tl.where(place < number, place, -1)  # [N]
    if chosen_ptr is not None:
        there = place < (number if first is None else tl.where(first == 0, number, 0))  # [N]
        entry = place // PAGE_SIZE if PAGE_SIZE else place  # [N]
        chosen = tl.load(chosen_ptr + entry * stride, mask=there, other=-1 if INDEXED else 0).to(tl.int32)  # [N]
        if first is not None:
            chosen = tl.maximum(chosen, tl.where(place < first, entry, -1))  # [N]
        if PAGE_SIZE:
            in_page = chosen * PAGE_SIZE + place % PAGE_SIZE  # [N]
            slots = tl.where((chosen >= 0) & (in_page < keys), in_page, -1)  # [N]
        elif INDEXED:
            slots = chosen  # [N]
        else:
            slots = tl.where(chosen != 0, place, -1)  # [N]
    return slots


@triton.jit
def located(table_ptr, slots, BLOCK_SIZE: tl.constexpr):
    """A row's slots ``[N]`` as slots of the memory of all rows, int32 ``[N]``; -1 stays -1.

    Block b of that memory has the slots from ``b * BLOCK_SIZE`` on. int32 is enough, since that memory has fewer than
    2^31 slots: that number of slots, of one head of 16 dimensions, would take 137 GB.
    """
    entry = tl.load(table_ptr + slots // BLOCK_SIZE, mask=slots >= 0, other=0).to(tl.int32)  # [N]
    return tl.where(slots >= 0, entry * BLOCK_SIZE + slots % BLOCK_SIZE, -1)


@triton.jit
def offsets(slots, stride_b, stride_l, BLOCK_SIZE: tl.constexpr):
    """Offsets of the keys at slots ``[N]``, int64 ``[N]``. Without blocks (``BLOCK_SIZE`` 0) they are within the memory
    of one row, otherwise within the memory of all rows."""
    slots = tl.maximum(slots, 0)  # [N]
    if BLOCK_SIZE:
        return (slots // BLOCK_SIZE).to(tl.int64) * stride_b + (slots % BLOCK_SIZE).to(tl.int64) * stride_l
    return slots.to(tl.int64) * stride_l
