"""How many nodes to take: in the order of their mass, until the rest is small enough."""

import torch
from torch import Tensor

from foveate.ops.checks import check_share


def first_of(order: Tensor, counts: Tensor, capacity: int) -> Tensor:
    """The first ``counts`` entries of an order, ascending.

    Args:
        order: int64 ``[B, Hkv, N]``.
        counts: int64 ``[B, Hkv]``; no more than ``capacity`` are taken.
        capacity: places of the result.

    Returns:
        int64 ``[B, Hkv, capacity]``, -1 at the end.
    """
    order = order[..., :capacity]
    unused = torch.arange(order.shape[-1], device=order.device) >= counts[..., None]
    nothing = torch.iinfo(torch.int64).max
    order = order.masked_fill(unused, nothing).sort(-1).values
    return order.masked_fill(order == nothing, -1)


def by_mass(mass: Tensor, rest: float) -> tuple[Tensor, Tensor]:
    """As many of the heaviest as leave at most ``rest`` out (top-p).

    Args:
        mass: fp32 ``[B, Hkv, N]``, >= 0: shares of the attention.
        rest: largest sum of the masses not taken, 0 to 1.

    Returns:
        ``(order [B, Hkv, N], counts [B, Hkv])``: heaviest first, ties to the smaller index, and how many of them.

    Raises:
        ValueError: for a rest that is no share.
    """
    check_share("rest", rest)
    ordered, order = mass.sort(dim=-1, descending=True, stable=True)
    left = ordered.flip(-1).cumsum(-1).flip(-1)
    return order, (left > rest).sum(-1)


def by_bound(upper: Tensor, lower: Tensor, known: Tensor, limit: float) -> tuple[Tensor, Tensor, Tensor]:
    """As many nodes as make it certain that those not taken hold at most ``limit`` of the attention, in every head.

    The partition sum of a node is between ``exp(lower)`` and ``exp(upper)``. If the nodes not taken sum to at most U
    and everything else to at least K, their share is at most ``U / (K + U)``.

    Args:
        upper, lower: fp32 ``[B, Hkv, G, N]``: bounds of each node's log partition sum; -inf where no node is.
        known: fp32 ``[B, Hkv, G, 1]``: log partition sum of the keys that are read anyway.
        limit: largest share, in (0, 1).

    Returns:
        ``(order [B, Hkv, N], counts [B, Hkv], bounds [B, Hkv])``: the nodes by what they may hold, largest first; how
        many to take; and the bound of the missed share once they are taken, the largest of the heads'.
    """
    top = torch.maximum(upper.amax(-1, keepdim=True), known)
    upper, lower, known = (upper - top).exp(), (lower - top).exp(), (known - top).exp()
    order = (upper / (known + lower.sum(-1, keepdim=True))).amax(2).sort(dim=-1, descending=True, stable=True).indices
    index = order[:, :, None].expand(upper.shape)
    upper, lower = upper.gather(-1, index), lower.gather(-1, index)
    rest = torch.nn.functional.pad(upper.flip(-1).cumsum(-1).flip(-1), (0, 1))
    taken = torch.nn.functional.pad(lower.cumsum(-1), (1, 0))
    missed = (rest / (known + taken + rest).clamp_min(torch.finfo(torch.float32).tiny)).amax(2)
    counts = (missed[..., :-1] > limit).sum(-1)
    return order, counts, missed.gather(-1, counts[..., None])[..., 0]
