"""A buffer that keeps the best tokens so far: which token leaves it when (laLTE, section 3.1.3)."""

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST_BUFFER = 1024
"""The most tokens of a buffer that the kernels hold in registers."""


class Leaving(NamedTuple):
    """For each token the number of the new token that makes it leave the buffer; ``n`` for a token that stays."""

    kept: Tensor
    """int64 ``[B, Hkv, K]``, of the tokens that were in the buffer."""
    new: Tensor
    """int64 ``[B, Hkv, n]``; a token that is never let in leaves at its own turn."""


def running_best(kept: Tensor, kept_positions: Tensor, margins: Tensor, positions: Tensor) -> Leaving:
    """Offer new tokens to a full or half-full buffer one after another.

    A token with a margin above 0 enters while the buffer has room. In a full buffer, a better token replaces the worst
    one. Of equal margins the earlier token is better. So the buffer holds the K best of all tokens offered so far,
    whatever the pieces they came in.

    Args:
        kept: fp32 ``[B, Hkv, K]``: margins in the buffer.
        kept_positions: int64 ``[B, Hkv, K]``: the tokens that the buffer holds; -1 for none.
        margins: fp32 ``[B, Hkv, n]`` of the new tokens; a token whose margin is NaN or at most 0 does not enter.
        positions: int64 ``[B, n]`` of the new tokens, later than the positions in the buffer; -1 for none.
    """
    size, count = kept.shape[2], margins.shape[2]
    offered = (margins > 0) & (positions >= 0)[:, None]
    value = torch.cat([kept.masked_fill(kept_positions < 0, float("-inf")), margins], 2)
    held = torch.cat([kept_positions >= 0, offered], 2)
    turn = torch.arange(count, device=kept.device)
    first = torch.cat([turn.new_zeros(size), turn])  # when a token can leave at the earliest
    if bool((held.sum(2) <= size).all()):
        leaves = torch.where(held, count, first)
        return Leaving(*leaves.split([size, count], 2))
    place = torch.cat([kept_positions, positions[:, None].expand_as(margins)], 2)
    new, at = value[:, :, None, size:], place[:, :, None, size:]
    old, where = value[:, :, None, :size], place[:, :, None, :size]
    one, its = value[..., None], place[..., None]
    before = (((old > one) | ((old == one) & (where < its))) & held[:, :, None, :size]).sum(3, keepdim=True)
    better = ((new > one) | ((new == one) & (at < its))) & offered[:, :, None]
    better = better.to(torch.int32).cumsum(3) + before  # [B, Hkv, K + n, n]: how many better ones by each turn
    leaves = torch.maximum((better < size).sum(3), first).masked_fill(~held, 0)
    return Leaving(*torch.where(held, leaves, first).split([size, count], 2))


def replace_weakest(
    keys: Tensor,
    values: Tensor,
    margins: Tensor,
    positions: Tensor,
    kept: Tensor,
    *,
    slots: Tensor,
    tokens: Tensor,
    ring: int,
) -> None:
    """Offer one token of every row to its KV heads' buffers, in place: :func:`running_best` for a decode step.

    Args:
        keys, values, margins: ``[B, Hkv, ring + K, ...]``; the buffer is what follows the first ``ring`` slots.
        positions: int64 ``[B, Hkv, K]``: the tokens that the buffer holds; -1 for none.
        kept: int64 ``[B, Hkv]``: how many it holds, in its first slots.
        slots: int64 ``[B]``: slots of the offered tokens in the ring.
        tokens: int64 ``[B]``: their positions; below 0 for a row without one.
    """
    index = slots[:, None, None].expand(-1, keys.shape[1], 1)
    margin = margins.gather(2, index)
    held = margins[:, :, ring:].masked_fill(positions < 0, float("inf"))
    least = held.amin(2, keepdim=True)
    worst = positions.masked_fill(held != least, -1).argmax(2, keepdim=True)
    full = (kept == positions.shape[2])[..., None]
    enters = (margin > 0) & (tokens >= 0)[:, None, None] & (~full | (margin > least))
    place = torch.where(full, worst, kept[..., None]).clamp_max(positions.shape[2] - 1)
    to = torch.where(enters, place + ring, index)  # a token that stays out is written where it is
    for memory in (keys, values):
        wide = index[..., None].expand(-1, -1, -1, memory.shape[3])
        memory.scatter_(2, to[..., None].expand_as(wide), memory.gather(2, wide))
    margins.scatter_(2, to, margin)
    positions.scatter_(2, place, torch.where(enters, tokens[:, None, None], positions.gather(2, place)))
    kept += (enters & ~full)[..., 0]
