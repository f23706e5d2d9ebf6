"""Pages that are always read; what chosen pages hold, keys and attention; and which keys are at places within pages."""

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


def with_always_read(scores: Tensor, first: int, newest: Tensor, ends: Tensor) -> Tensor:
    """Scores of pages of which some are read whatever they score: inf for these.

    Args:
        scores: fp32 ``[B, H, P]``.
        first: so many first pages are always read, if they exist.
        newest: int ``[B]``: the first of the newest pages, which are always read.
        ends: int ``[B]``: how many pages a row has.

    Returns:
        fp32 ``[B, H, P]``; after a row's pages it may be anything.
    """
    page, newest, ends = torch.arange(scores.shape[2], device=scores.device), newest[:, None, None], ends[:, None, None]
    scores = scores.masked_fill((page < first) | (page >= newest), torch.inf)
    return scores.masked_fill_(page >= ends, -torch.inf)


def mass_of_pages(mass: Tensor, pages: Tensor) -> Tensor:
    """The share of attention that chosen pages hold together.

    Args:
        mass: fp32 ``[B, H, N]``, of each page; -inf of one that has none.
        pages: int ``[B, H, P]``, each once; -1 marks an unused place.

    Returns:
        fp32 ``[B, H]``; 1 where the first page has no mass: no page has any, and nothing is missed.
    """
    held = mass.gather(-1, pages.clamp_min(0).long()).masked_fill(pages < 0, 0.0).clamp_min(0.0).sum(-1)
    return torch.where(mass[..., 0].isneginf(), 1.0, held)


def keys_at_places(places: Tensor, pages: Tensor, page_size: int) -> Tensor:
    """The keys at places among those of some pages, which are side by side in the order of the pages.

    Args:
        places: int ``[B, H, K]``, each of a page that there is; -1 marks an unused one.
        pages: int ``[B, H, P]``; page p is the keys ``p * page_size .. (p + 1) * page_size - 1``.
        page_size: keys of a page.

    Returns:
        ``[B, H, K]``, of the dtype of places; -1 where the place is unused.
    """
    of_page = pages.gather(2, (places.clamp_min(0) // page_size).long())
    return (of_page * page_size + places % page_size).masked_fill(places < 0, -1).to(places.dtype)
