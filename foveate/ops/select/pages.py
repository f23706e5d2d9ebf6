"""What pages hold that several heads have chosen, each its own."""

import torch
from torch import Tensor


def keys_of_pages(pages: Tensor, num_kv_heads: int, page_size: int, lengths: Tensor) -> Tensor:
    """How many keys of each KV head are read, by one or more of the heads that share it.

    Args:
        pages: int ``[B, H, P]``, H a multiple of ``num_kv_heads``: different pages, ascending, and then -1.
        page_size: keys of a page.
        lengths: int64 ``[B]``, at least 1: the row's last page ends with its last key.

    Returns:
        int64 ``[B, num_kv_heads]``.
    """
    of_kv_head, newest = pages.unflatten(1, (num_kv_heads, -1)).flatten(2).long(), (lengths - 1) // page_size
    ordered = of_kv_head.sort(-1).values
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    missing = (newest + 1) * page_size - lengths
    read = (of_kv_head == newest[:, None, None]).any(-1)
    return (first & (ordered >= 0)).sum(-1) * page_size - read * missing[:, None]
