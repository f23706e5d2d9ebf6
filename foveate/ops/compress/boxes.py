"""Boxes around the keys of pages, by which Quest bounds logits."""

import torch
from torch import Tensor

from foveate.ops.kv import KV


def bound_newest(kv: KV, low: Tensor, high: Tensor, page_size: int) -> None:
    """Write the box of the page that holds each row's newest key, around the keys in the page (Quest, section 3.2).

    Args:
        kv: ``k [B, Hkv, S, D]``, finite, in one piece or in blocks, with lengths ``[B]`` of at least 1, see
            :class:`~foveate.ops.KV`; values are not read. Page p is the keys ``p * page_size .. (p + 1) * page_size -
            1``; pages need not have the size of blocks.
        low, high: ``[B, Hkv, P, D]`` of the same dtype: the corners of the boxes, written to.

    Raises:
        ValueError: for a KV without lengths, a block table with other rows than the corners, or on the CPU a table that
            names no block for a key that is read.
    """
    kv.check_each_length()
    keys, block_table, lengths = kv.k, kv.block_table, kv.lengths
    page = ((lengths - 1) // page_size)[:, None]
    slots = page * page_size + torch.arange(page_size, device=keys.device)
    there, heads, dim = slots < lengths[:, None], keys.shape[1], keys.shape[3]
    slots, unused = slots.where(there, 0), ~there[:, None, :, None]
    if block_table is None:
        of_page = keys.gather(2, slots[:, None, :, None].expand(-1, heads, -1, dim))
    else:
        block_table.check_rows(low)
        block, slot = block_table.slots(slots, keys)
        of_page = keys[block, :, slot].transpose(1, 2)
    place = page[:, :, None, None].expand(-1, heads, 1, dim)
    low.scatter_(2, place, of_page.masked_fill(unused, float("inf")).amin(2, keepdim=True))
    high.scatter_(2, place, of_page.masked_fill(unused, float("-inf")).amax(2, keepdim=True))
