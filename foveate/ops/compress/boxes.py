"""Boxes around the keys of pages, which Quest bounds logits by."""

import torch
from torch import Tensor


def bound_newest(keys: Tensor, low: Tensor, high: Tensor, lengths: Tensor, page_size: int) -> None:
    """Write the box of the page that holds each row's newest key, around the keys that it has (Quest, section 3.2).

    Args:
        keys: ``[B, Hkv, S, D]``, finite; page p is the keys ``p * page_size .. (p + 1) * page_size - 1``.
        low, high: ``[B, Hkv, P, D]`` of the same dtype: the corners of the boxes, written to.
        lengths: int64 ``[B]``, at least 1: how many keys each row has.
    """
    page = ((lengths - 1) // page_size)[:, None]
    slots = page * page_size + torch.arange(page_size, device=keys.device)
    there, heads, dim = slots < lengths[:, None], keys.shape[1], keys.shape[3]
    index = slots.where(there, 0)[:, None, :, None].expand(-1, heads, -1, dim)
    of_page, unused = keys.gather(2, index), ~there[:, None, :, None]
    place = page[:, :, None, None].expand(-1, heads, 1, dim)
    low.scatter_(2, place, of_page.masked_fill(unused, float("inf")).amin(2, keepdim=True))
    high.scatter_(2, place, of_page.masked_fill(unused, float("-inf")).amax(2, keepdim=True))
