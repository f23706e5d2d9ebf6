"""What stays in the cache: the best slots at once, or all but the weakest, one step at a time."""

import torch
from torch import Tensor

from foveate.ops._math import on_host
from foveate.ops.checks import check_number
from foveate.ops.kv import KV


def keep_best(scores: Tensor, number: int, protected: Tensor) -> Tensor:
    """The slots to keep: the protected slots, and the best of the other slots; ties go to the smaller slot.

    Args:
        scores: floating-point ``[B, Hkv, S]``, larger is better. A slot with -inf is kept only if it is protected. NaN
            is an error on the CPU; on a GPU a row with NaN keeps its protected slots alone.
        number: how many slots to keep in all. If more are protected, the first of them stay.
        protected: bool, broadcastable to ``[B, Hkv, S]``.

    Returns:
        int64 ``[B, Hkv, min(number, S)]`` ascending; -1 at the end if fewer slots can be kept.

    Raises:
        ValueError: for a negative number, and on the CPU for scores that are NaN.
    """
    check_number("number", number, 0)
    if on_host(scores) and bool(scores.isnan().any()):
        raise ValueError("scores hold NaN: there is no best of them")
    number, protected = min(number, scores.shape[-1]), protected.expand(scores.shape)
    found = torch.full((*scores.shape[:-1], number + 1), -1, device=scores.device)
    if not number or not found.numel():
        return found[..., :number]
    least = scores.masked_fill(protected, float("inf")).topk(number, -1, sorted=False).values.amin(-1, keepdim=True)
    least = least.clamp_min(torch.finfo(scores.dtype).min)
    others = scores.masked_fill(protected, float("-inf"))
    sure, tied = protected | (others > least), others == least
    before, ties = torch.stack([sure, tied]).cumsum(-1, dtype=torch.int32)  # each slot's own included
    room = (number - before[..., -1:]).clamp_min(0)
    places = torch.where(sure | tied & (ties <= room), before + ties.minimum(room) - 1, number).clamp_max(number)
    slots = torch.arange(scores.shape[-1], device=scores.device)
    return found.scatter_(-1, places.long(), slots.expand(scores.shape))[..., :number]  # the last place is for the rest


def weakest(scores: Tensor, eligible: Tensor, positions: Tensor) -> Tensor:
    """The slot to give up: the smallest score among the eligible slots; ties go to the larger position.

    NaN is weaker than any score. The slots that stay are therefore those :func:`keep_best` would keep, whatever the
    order of the tokens in the slots.

    Args:
        scores: fp32 ``[B, Hkv, S]``.
        eligible: bool ``[B, Hkv, S]`` with at least one True in every row that matters.
        positions: int ``[B, Hkv, S]``, the tokens' original positions.

    Returns:
        int64 ``[B, Hkv]``.
    """
    scores = scores.masked_fill(scores.isnan(), float("-inf")).masked_fill(~eligible, float("inf"))
    tied = (scores == scores.amin(-1, keepdim=True)) & eligible
    return positions.masked_fill(~tied, -1).argmax(-1)


def check_give_up(positions, *, rows=None, scores=None, before=None, at=None, out=None):
    """Raise ValueError for invalid arguments of :func:`give_up`."""
    if (scores is None) == (at is None):
        raise ValueError("give_up takes either scores or at")
    if positions.dtype != torch.int32 or (scores is not None and scores.shape != positions.shape):
        given = "none" if scores is None else f"{tuple(scores.shape)}"
        raise ValueError(f"positions {tuple(positions.shape)} in {positions.dtype} do not fit scores {given}")
    for name, x in (("rows", rows), ("before", before), ("at", at)):
        if x is not None and x.shape != positions.shape[:1]:
            raise ValueError(f"{name} must be [{len(positions)}], not {list(x.shape)}")
    shape = positions.shape[:2]
    if out is not None and not (out.shape == shape and out.dtype == torch.int64 and out.is_contiguous()):
        raise ValueError(f"out must be contiguous int64 {tuple(shape)}, not {out.dtype} {tuple(out.shape)}")


def give_up(
    positions: Tensor,
    *,
    rows: Tensor | None = None,
    scores: Tensor | None = None,
    before: Tensor | None = None,
    at: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Give up one slot of every KV head: the :func:`weakest` slot, or the slot of a certain token.

    Args:
        positions: int32 ``[B, Hkv, S]``, the tokens' original positions; -1 marks an empty slot. The entry of the slot
            that is given up becomes -1.
        rows: bool ``[B]``: the rows that give up a slot; None: all rows.
        scores: fp32 ``[B, Hkv, S]``, see :func:`weakest`.
        before: int64 ``[B]``: only tokens before this position can leave, and a row must have one. None: any token can
            leave.
        at: int64 ``[B]``: the position of the token that leaves, instead of ``scores``. Each KV head must have the
            token.
        out: contiguous int64 ``[B, Hkv]``, to which the slots are written; None: new memory.

    Returns:
        int64 ``[B, Hkv]``: the slots that were given up; -1 in rows that give up none.

    Raises:
        ValueError: for ``scores`` and ``at`` together or neither; for shapes that do not fit each other; and on the CPU
            for a row that must give up a slot but has no token that can leave.
    """
    if at is not None:
        eligible = positions == at[:, None, None]
        slots = eligible.to(torch.uint8).argmax(-1)
    else:
        eligible = positions >= 0
        if before is not None:
            eligible &= positions < before[:, None, None]
        slots = weakest(scores, eligible, positions)
    if on_host(positions):
        found = eligible.any(-1) if rows is None else eligible.any(-1) | ~rows[:, None]
        if not found.all():
            what = "that can leave" if at is None else "at the given position"
            raise ValueError(f"row {int(found.all(1).int().argmin())} gives up a slot and has no token {what}")
    if rows is not None:
        slots = slots.masked_fill(~rows[:, None], -1)
    index = slots.clamp_min(0)[..., None]
    gone = torch.where(slots[..., None] >= 0, -1, positions.gather(2, index))
    positions.scatter_(2, index, gone.to(torch.int32))
    return slots if out is None else out.copy_(slots)


def put_token(
    kv: KV,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    *,
    freed: Tensor | None = None,
    take: bool = False,
    positions: Tensor | None = None,
    newest: Tensor | None = None,
    emptied: Tensor | None = None,
) -> Tensor:
    """Write one token of every row to the slot that the row has given up, or else to the row's next slot; or write n
    tokens to the row's next n slots.

    Args:
        kv: the memory that is written to, through its strides: ``k [B, Hkv, S, D]`` and ``v [B, Hkv, S, Dv]``, in one
            piece or in blocks, see :class:`~foveate.ops.KV`. Its lengths are ignored.
        k, v: ``[B, Hkv, n, D]`` and ``[B, Hkv, n, Dv]``, of the same dtypes as the memory.
        slots: int64 ``[B]``: each row's next slot. None is negative, so an engine must leave out padded rows.
        freed: int64 ``[B, Hkv]``: slots that were given up; -1 marks a head that gave up none.
        take: whether the entries of ``freed`` become -1.
        positions: int32 ``[B, Hkv, S]``, to which the token's position is written, from ``newest``, int32 ``[B]``.
        emptied: ``[B, Hkv, S]``, numbers of slots. The entry of the written slot becomes 0.

    Returns:
        int64 ``[B, Hkv]``: the slots that were written; of n tokens the first slot.

    Raises:
        ValueError: for several tokens with ``freed``, ``positions`` or ``emptied``, and for a block table with another
            number of rows.
    """
    keys, values, block_table = kv.k, kv.v, kv.block_table
    if k.shape[2] > 1 and not (freed is positions is emptied is None):
        raise ValueError(f"{k.shape[2]} tokens of a row go to its next slots, with nothing beside keys and values")
    beside = {"freed": freed, "take": take, "positions": positions, "newest": newest, "emptied": emptied}
    slot = place_token(slots, keys.shape[1], **beside)
    if block_table is not None:
        block_table.check_rows(k)
        head = torch.arange(keys.shape[1], device=keys.device)
        for n in range(k.shape[2]):
            block, place = block_table.slots(slot + n, keys)
            keys[block, head, place], values[block, head, place] = k[:, :, n], v[:, :, n]
    else:
        index = (slot[..., None] + torch.arange(k.shape[2], device=keys.device))[..., None]
        for memory, x in ((keys, k), (values, v)):
            memory.scatter_(2, index.expand(-1, -1, -1, x.shape[3]), x)
    return slot


def place_token(
    slots: Tensor,
    num_kv_heads: int,
    *,
    freed: Tensor | None = None,
    take: bool = False,
    positions: Tensor | None = None,
    newest: Tensor | None = None,
    emptied: Tensor | None = None,
) -> Tensor:
    """The slots ``[B, Hkv]``, int64, to which the keys and values of :func:`put_token` go.

    Does everything that :func:`put_token` does, except that it writes no keys and values. See :func:`put_token` for the
    arguments.
    """
    slot = slots[:, None].expand(-1, num_kv_heads)
    if freed is not None:
        slot = torch.where(freed >= 0, freed, slot)
        if take:
            freed.fill_(-1)
    if positions is not None:
        positions.scatter_(2, slot[..., None], newest[:, None, None].expand(-1, num_kv_heads, 1))
    if emptied is not None:
        emptied.scatter_(2, slot[..., None], 0)
    return slot
