"""Always-read pages, the keys and the attention that chosen pages hold, and the keys at places within pages."""

import torch
from torch import Tensor


def keys_of_pages(pages: Tensor, num_kv_heads: int, page_size: int, lengths: Tensor) -> Tensor:
    """The number of keys of each KV head that at least one head of its group reads.

    Args:
        pages: int ``[B, H, P]``, H a multiple of ``num_kv_heads``: distinct pages, ascending, and then -1.
        page_size: keys of a page.
        lengths: int64 ``[B]``, at least 1: number of keys of a row. Its last page ends with its last key.

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


def with_always_read(scores: Tensor, first: int, newest: Tensor, ends: Tensor) -> Tensor:
    """Scores of pages, in which the always-read pages have the score inf.

    Args:
        scores: fp32 ``[B, H, P]``.
        first: number of first pages that are always read, if they exist.
        newest: int ``[B]``: index of the first of a row's newest pages, which are always read.
        ends: int ``[B]``: number of pages of a row.

    Returns:
        fp32 ``[B, H, P]``; after a row's pages it may be anything.
    """
    page, newest, ends = torch.arange(scores.shape[2], device=scores.device), newest[:, None, None], ends[:, None, None]
    scores = scores.masked_fill((page < first) | (page >= newest), torch.inf)
    return scores.masked_fill_(page >= ends, -torch.inf)


def mass_of_pages(mass: Tensor, pages: Tensor) -> Tensor:
    """The share of attention that chosen pages hold together.

    Args:
        mass: fp32 ``[B, H, N]``: the mass of each page; -inf for a page without one.
        pages: int ``[B, H, P]``, each once; -1 marks an unused place.

    Returns:
        fp32 ``[B, H]``; 1 if the first page has no mass: then no page has any, and nothing is missed.
    """
    held = mass.gather(-1, pages.clamp_min(0).long()).masked_fill(pages < 0, 0.0).clamp_min(0.0).sum(-1)
    return torch.where(mass[..., 0].isneginf(), 1.0, held)


def keys_at_places(places: Tensor, pages: Tensor, page_size: int) -> Tensor:
    """The keys at some places in a list of pages, in which the keys of the pages stand side by side.

    Args:
        places: int ``[B, H, K]``, each within a page of the list; -1 marks an unused place.
        pages: int ``[B, H, P]``; page p is the keys ``p * page_size .. (p + 1) * page_size - 1``.
        page_size: keys of a page.

    Returns:
        ``[B, H, K]``, in the dtype of places; -1 if the place is unused.
    """
    of_page = pages.gather(2, (places.clamp_min(0) // page_size).long())
    return (of_page * page_size + places % page_size).masked_fill(places < 0, -1).to(places.dtype)
