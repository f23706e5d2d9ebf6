"""Boxes around the keys of pages, which Quest bounds logits by."""

import torch
from torch import Tensor

from foveate.ops.block_table import BlockTable


def bound_newest(
    keys: Tensor,
    low: Tensor,
    high: Tensor,
    lengths: Tensor,
    page_size: int,
    *,
    block_table: BlockTable | None = None,
) -> None:
    """Write the box of the page that holds each row's newest key, around the keys that it has (Quest, section 3.2).

    Args:
        keys: ``[B, Hkv, S, D]``, finite; page p is the keys ``p * page_size .. (p + 1) * page_size - 1``.
        low, high: ``[B, Hkv, P, D]`` of the same dtype: the corners of the boxes, written to.
        lengths: int64 ``[B]``, at least 1: how many keys each row has.
        block_table: where the keys are when ``keys`` is blocks that all rows share, ``[N, Hkv, n, D]``; None: in one
            piece. Pages need not have the size of blocks.
    """
    page = ((lengths - 1) // page_size)[:, None]
    slots = page * page_size + torch.arange(page_size, device=keys.device)
    there, heads, dim = slots < lengths[:, None], keys.shape[1], keys.shape[3]
    slots, unused = slots.where(there, 0), ~there[:, None, :, None]
    if block_table is None:
        of_page = keys.gather(2, slots[:, None, :, None].expand(-1, heads, -1, dim))
    else:
        block_table.check(low, keys)
        block, slot = block_table.slots(slots, keys)
        of_page = keys[block, :, slot].transpose(1, 2)
    place = page[:, :, None, None].expand(-1, heads, 1, dim)
    low.scatter_(2, place, of_page.masked_fill(unused, float("inf")).amin(2, keepdim=True))
    high.scatter_(2, place, of_page.masked_fill(unused, float("-inf")).amax(2, keepdim=True))
