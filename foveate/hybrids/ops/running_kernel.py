"""A buffer of the best tokens so far: Triton kernels of :func:`running_best` and :func:`replace_weakest`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.hybrids.ops.running import LARGEST_BUFFER, Leaving
from foveate.ops.dispatch import UnsupportedError

_FIRST = 512
"""New tokens before the first floor; each further floor comes after twice as many."""
_SCAN = 4096
"""Tokens that a program looks at at once."""
_OWN, _OTHERS = 32, 128
"""Tokens whose turns a program finds, and those that it compares them with at a time."""
_EMPTY = tl.constexpr(-0x80000000)
"""Below every token's margin, as :func:`_ordered` has them."""


def running_best(kept: Tensor, kept_positions: Tensor, margins: Tensor, positions: Tensor) -> Leaving:
    """See :func:`foveate.hybrids.ops.running.running_best`. Three launches, parallel in the tokens.

    A token leaves with the first turn by which as many better ones have come as the buffer holds. The second launch
    lists the tokens that may be let in: those above a floor, a value that a full buffer's tokens all reach before that
    turn. Each floor serves as many turns as came before it. The third launch compares the listed tokens in pairs. The
    best tokens so far have all been let in, so leaving out the others changes no turn.

    Nothing waits for the device. Positions are below 2^31, and those of new tokens rise.
    """
    batch, heads, size = kept.shape
    count = margins.shape[2]
    _check_buffer(size, kept, margins)
    if kept_positions.shape != kept.shape or margins.shape[:2] != (batch, heads) or positions.shape != (batch, count):
        given = {"kept": kept, "kept_positions": kept_positions, "margins": margins, "positions": positions}
        raise ValueError("shapes do not fit: " + ", ".join(f"{name} {tuple(x.shape)}" for name, x in given.items()))
    leaves = torch.empty(batch, heads, size + count, dtype=torch.int64, device=kept.device)
    if not leaves.numel():
        return Leaving(*leaves.split([size, count], 2))
    rows, levels = batch * heads, max(0, triton.cdiv(count, _FIRST) - 1).bit_length() + 1
    offers, values, turns = torch.empty(3, rows, count, dtype=torch.int32, device=kept.device)
    found = torch.empty(rows, levels, dtype=torch.int32, device=kept.device)
    if count:
        _offer[rows, triton.cdiv(count, _SCAN)](
            margins, positions, offers, leaves,
            *margins.stride(), *positions.stride(),
            heads, size, count,
            SCAN=_SCAN, num_warps=4,
        )  # fmt: skip
    buffer = kept, kept_positions, *kept.stride(), *kept_positions.stride(), heads, size, count
    _list_best[rows, levels](
        offers, values, turns, found, *buffer,
        FIRST=_FIRST, SLOTS=triton.next_power_of_2(max(size, 1)), SCAN=_SCAN, num_warps=16,
    )  # fmt: skip
    _leave[rows * (triton.cdiv(size, _OWN) + triton.cdiv(count, _OWN)),](
        values, turns, found, leaves, *buffer, rows, levels,
        FIRST=_FIRST, OWN=_OWN, OTHERS=_OTHERS, num_warps=4,
    )  # fmt: skip
    return Leaving(*leaves.split([size, count], 2))


def replace_weakest(keys, values, margins, positions, kept, *, slots, tokens, ring):
    """See :func:`foveate.hybrids.ops.running.replace_weakest`. One launch; a program owns a row and a KV head."""
    batch, heads, number, dim = keys.shape
    size, value_dim = positions.shape[2], values.shape[3]
    _check_buffer(size, margins)
    fits = values.shape[:3] == margins.shape == keys.shape[:3] and number == ring + size and size > 0
    if not fits or positions.shape[:2] != (batch, heads) or kept.shape != (batch, heads):
        given = {"keys": keys, "values": values, "margins": margins, "positions": positions, "kept": kept}
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in given.items())
        raise ValueError(f"shapes do not fit a ring of {ring} slots: {shapes}")
    if keys.numel():
        _replace_weakest[batch * heads,](
            keys, values, margins, positions, kept, slots, tokens,
            *keys.stride(), *values.stride(), *margins.stride(), *positions.stride(), *kept.stride(), slots.stride(0),
            tokens.stride(0),
            heads, ring, size,
            DIM=dim, VALUE_DIM=value_dim, BLOCK_D=triton.next_power_of_2(max(dim, value_dim)),
            SLOTS=max(128, triton.next_power_of_2(size)), num_warps=1 if size <= 256 else 4,
        )  # fmt: skip


def _check_buffer(size: int, *margins: Tensor) -> None:
    if size > LARGEST_BUFFER:
        raise UnsupportedError(f"buffers above {LARGEST_BUFFER} tokens")
    strange = [x.dtype for x in margins if x.dtype != torch.float32]
    if strange:
        raise UnsupportedError(f"margins in {strange[0]}")


@triton.jit
def _ordered(margin):
    """Integers in the order of the margins: a warp finds the least of integers in one instruction."""
    bits = (margin + 0.0).to(tl.int32, bitcast=True)  # -0.0 as 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _level_begins(level, FIRST: tl.constexpr):
    """The first turn to which a floor applies: 0, FIRST, 2 FIRST, 4 FIRST and so on."""
    return tl.where(level == 0, 0, (FIRST << level) // 2)


@triton.jit
def _buffered(kept_ptr, place_ptr, kept_stride, place_stride, slots, size):
    """What some of the buffer's slots hold: margins in order, and positions."""
    place = tl.load(place_ptr + slots * place_stride, mask=slots < size, other=-1).to(tl.int32)
    kept = tl.load(kept_ptr + slots * kept_stride, mask=(slots < size) & (place >= 0), other=0.0)
    return tl.where(place >= 0, _ordered(kept), _EMPTY), place


_OFFER_STRIDES = ["margin_stride_b", "margin_stride_h", "position_stride_b"]


@triton.jit(do_not_specialize=[*_OFFER_STRIDES, "heads", "size", "count"])
def _offer(
    margin_ptr, position_ptr, offer_ptr, leave_ptr,
    margin_stride_b, margin_stride_h, margin_stride_l, position_stride_b, position_stride_l,
    heads, size, count,
    SCAN: tl.constexpr,
):  # fmt: skip
    """Writes ``offer [B * Hkv, n]``: margins in order, and of all new tokens that they leave at their own turn."""
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // heads, row % heads
    turns = tl.program_id(1) * SCAN + tl.arange(0, SCAN)
    there = turns < count
    margin_ptr += batch * margin_stride_b + head * margin_stride_h
    margin = tl.load(margin_ptr + turns * margin_stride_l, mask=there, other=0.0)
    position = tl.load(position_ptr + batch * position_stride_b + turns * position_stride_l, mask=there, other=-1)
    offer = tl.where((margin > 0) & (position >= 0), _ordered(margin), _EMPTY)
    tl.store(offer_ptr + row * count + turns, offer, mask=there)
    tl.store(leave_ptr + row * (size + count) + size + turns, turns.to(tl.int64), mask=there)


_BUFFER_STRIDES = [f"{x}_stride_{axis}" for x in ("kept", "place") for axis in "bh"]


@triton.jit(do_not_specialize=[*_BUFFER_STRIDES, "heads", "size", "count"])
def _list_best(
    offer_ptr, value_ptr, turn_ptr, found_ptr, kept_ptr, place_ptr,
    kept_stride_b, kept_stride_h, kept_stride_s, place_stride_b, place_stride_h, place_stride_s,
    heads, size, count,
    FIRST: tl.constexpr, SLOTS: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Writes the tokens of a level that exceed its floor, in order from the level's first turn on: ``value`` and
    ``turn [B * Hkv, n]``; and ``found [B * Hkv, levels]``, how many there are.

    The floor is a value that K of the tokens before the level reach: the largest of 16 leading bits.
    """
    row, level = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = row // heads, row % heads
    kept_ptr += batch * kept_stride_b + head * kept_stride_h
    place_ptr += batch * place_stride_b + head * place_stride_h
    offer_ptr += row * count
    value_ptr += row * count
    turn_ptr += row * count
    begin = _level_begins(level, FIRST)
    end = tl.minimum(_level_begins(level + 1, FIRST), count)
    lanes = tl.arange(0, SCAN)
    held, _ = _buffered(kept_ptr, place_ptr, kept_stride_s, place_stride_s, tl.arange(0, SLOTS), size)

    floor = 0
    for digit in tl.range(0, 8):  # two bits at a time
        step = 1 << (29 - 2 * digit)
        low, middle, high = floor + step, floor + 2 * step, floor + 3 * step
        of_low, of_middle, of_high = (lanes < 0).to(tl.int32), (lanes < 0).to(tl.int32), (lanes < 0).to(tl.int32)
        for first in tl.range(0, begin, SCAN):
            offer = tl.load(offer_ptr + first + lanes, mask=first + lanes < begin, other=_EMPTY)
            of_low += (offer >= low).to(tl.int32)
            of_middle += (offer >= middle).to(tl.int32)
            of_high += (offer >= high).to(tl.int32)
        reach_low = tl.sum(of_low, 0) + tl.sum((held >= low).to(tl.int32), 0)
        reach_middle = tl.sum(of_middle, 0) + tl.sum((held >= middle).to(tl.int32), 0)
        reach_high = tl.sum(of_high, 0) + tl.sum((held >= high).to(tl.int32), 0)
        floor += tl.where(reach_low >= size, step, 0)
        floor += tl.where(reach_middle >= size, step, 0) + tl.where(reach_high >= size, step, 0)

    found = 0
    for first in tl.range(begin, end, SCAN):
        turns = first + lanes
        offer = tl.load(offer_ptr + turns, mask=turns < end, other=_EMPTY)
        passes = offer > floor  # of equal margins the earlier tokens, which reach the floor, are better
        place = begin + found + tl.cumsum(passes.to(tl.int32), 0) - 1
        tl.store(value_ptr + place, offer, mask=passes)
        tl.store(turn_ptr + place, turns, mask=passes)
        found += tl.sum(passes.to(tl.int32), 0)
    tl.store(found_ptr + row * tl.num_programs(1) + level, found)


@triton.jit(do_not_specialize=[*_BUFFER_STRIDES, "heads", "size", "count", "rows", "levels"])
def _leave(
    value_ptr, turn_ptr, found_ptr, leave_ptr, kept_ptr, place_ptr,
    kept_stride_b, kept_stride_h, kept_stride_s, place_stride_b, place_stride_h, place_stride_s,
    heads, size, count, rows, levels,
    FIRST: tl.constexpr, OWN: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Writes ``leave [B, Hkv, K + n]``, contiguous, of the buffer's and the listed tokens.

    The first programs of a row own slots of the buffer, the others places of the list, and most of these are empty.
    """
    row, program = (tl.program_id(0) % rows).to(tl.int64), tl.program_id(0) // rows
    batch, head = row // heads, row % heads
    kept_ptr += batch * kept_stride_b + head * kept_stride_h
    place_ptr += batch * place_stride_b + head * place_stride_h
    value_ptr += row * count
    turn_ptr += row * count
    found_ptr += row * levels
    leave_ptr += row * (size + count)
    buffers = tl.cdiv(size, OWN)
    of_buffer, of_list = program < buffers, program >= buffers
    first = (program - tl.where(of_buffer, 0, buffers)) * OWN
    own = first + tl.arange(0, OWN)
    others = tl.arange(0, OTHERS)

    level = 0  # of the list's places
    while of_list & (level + 1 < levels) & (_level_begins(level + 1, FIRST) <= first):
        level += 1
    listed = _level_begins(level, FIRST) + tl.load(found_ptr + level)
    if of_buffer | (first < listed):
        slots = tl.where(of_buffer, own, size)
        held, place = _buffered(kept_ptr, place_ptr, kept_stride_s, place_stride_s, slots, size)
        exists = tl.where(of_buffer, held != _EMPTY, own < listed)
        value = tl.where(of_buffer, held, tl.load(value_ptr + own, mask=exists & of_list, other=_EMPTY))
        place = tl.where(of_buffer, place, 0x7FFFFFFF)

        better = tl.zeros([OWN], tl.int32)  # tokens that are better, of those so far
        for begin in tl.range(0, size, OTHERS):
            its, where = _buffered(kept_ptr, place_ptr, kept_stride_s, place_stride_s, begin + others, size)
            before = where[None, :] < place[:, None]
            won = (its[None, :] > value[:, None]) | ((its[None, :] == value[:, None]) & before)
            better += tl.sum((won & (its != _EMPTY)[None, :]).to(tl.int32), 1)
        better = tl.where(exists, better, size)
        at_first = better
        # The block of others with which as many better ones have come as the buffer holds, and how many before it.
        reached = tl.full([OWN], -1, tl.int32)
        missing = size - better
        least = tl.min(better, 0)
        level = 0
        while (level < levels) & (least < size):
            begin = _level_begins(level, FIRST)
            end = begin + tl.load(found_ptr + level)
            while (begin < end) & (least < size):
                its = tl.load(value_ptr + begin + others, mask=begin + others < end, other=_EMPTY)
                # of equal ones the earlier is better; all of a buffer's tokens are earlier than those listed
                bound = tl.where(of_list & (begin + OTHERS <= first), value - 1, value)
                won = its[None, :] > bound[:, None]
                if of_list & (begin < first + OWN) & (begin + OTHERS > first):
                    earlier = (begin + others)[None, :] < own[:, None]
                    won = won | ((its[None, :] == value[:, None]) & earlier)
                more = better + tl.sum(won.to(tl.int32), 1)
                reaches = (better < size) & (more >= size)
                reached = tl.where(reaches, begin, reached)
                missing = tl.where(reaches, size - better, missing)
                better = more
                least = tl.min(better, 0)
                begin += OTHERS
            level += 1

        # Once more that block, of every token its own.
        at = tl.maximum(reached, 0)[:, None] + others[None, :]
        ends = tl.zeros([OWN], tl.int32)
        for level in tl.range(0, levels):
            begin = _level_begins(level, FIRST)
            ends = tl.where(reached >= begin, begin + tl.load(found_ptr + level), ends)
        its = tl.load(value_ptr + at, mask=(reached >= 0)[:, None] & (at < ends[:, None]), other=_EMPTY)
        earlier = (at < own[:, None]) & of_list
        won = (its > value[:, None]) | ((its == value[:, None]) & earlier)
        passed = tl.sum((tl.cumsum(won.to(tl.int32), 1) < missing[:, None]).to(tl.int32), 1)
        last = tl.maximum(reached, 0) + passed  # the token that makes it leave
        last = tl.where(of_buffer, last, tl.maximum(last, own))
        last = tl.where((at_first >= size) & of_list, own, last)
        leaves = tl.load(turn_ptr + last, mask=exists & ((reached >= 0) | (at_first >= size)), other=count)
        tl.store(leave_ptr + own, tl.where(exists, leaves, 0).to(tl.int64), mask=of_buffer & (own < size))
        turn = tl.load(turn_ptr + own, mask=exists & of_list, other=0)
        tl.store(leave_ptr + size + turn, leaves.to(tl.int64), mask=exists & of_list)


_IN_PLACE = [f"{x}_stride_{axis}" for x in ("key", "value", "margin", "position", "kept") for axis in "bh"]


@triton.jit(do_not_specialize=[*_IN_PLACE, "slot_stride", "token_stride", "heads", "ring", "size"])
def _replace_weakest(
    key_ptr, value_ptr, margin_ptr, position_ptr, kept_ptr, slot_ptr, token_ptr,
    key_stride_b, key_stride_h, key_stride_s, key_stride_d,
    value_stride_b, value_stride_h, value_stride_s, value_stride_d, margin_stride_b, margin_stride_h, margin_stride_s,
    position_stride_b, position_stride_h, position_stride_s, kept_stride_b, kept_stride_h, slot_stride, token_stride,
    heads, ring, size,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Writes the token's key, value, margin and position over those of the weakest, or into the first empty slot."""
    row = tl.program_id(0)
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    slot, token = tl.load(slot_ptr + batch * slot_stride), tl.load(token_ptr + batch * token_stride)
    margin_ptr += batch * margin_stride_b + head * margin_stride_h
    position_ptr += batch * position_stride_b + head * position_stride_h
    kept_ptr += batch * kept_stride_b + head * kept_stride_h
    margin, kept = tl.load(margin_ptr + slot * margin_stride_s), tl.load(kept_ptr)

    slots = tl.arange(0, SLOTS)
    position = tl.load(position_ptr + slots * position_stride_s, mask=slots < size, other=-1)
    held = tl.load(margin_ptr + (ring + slots) * margin_stride_s, mask=position >= 0, other=float("inf"))
    least = tl.min(held, 0)
    latest = tl.where(held == least, position, -1)
    weakest = tl.max(tl.where(latest == tl.max(latest, 0), slots, -1), 0)
    full = kept == size
    enters = (margin > 0) & (token >= 0) & ((kept < size) | (margin > least))
    place = tl.where(full, weakest, kept.to(tl.int32)).to(tl.int64)

    dims = tl.arange(0, BLOCK_D)
    key_ptr += batch * key_stride_b + head * key_stride_h + dims * key_stride_d
    value_ptr += batch * value_stride_b + head * value_stride_h + dims * value_stride_d
    key = tl.load(key_ptr + slot * key_stride_s, mask=dims < DIM)
    value = tl.load(value_ptr + slot * value_stride_s, mask=dims < VALUE_DIM)
    tl.store(key_ptr + (ring + place) * key_stride_s, key, mask=dims < tl.where(enters, DIM, 0))
    tl.store(value_ptr + (ring + place) * value_stride_s, value, mask=dims < tl.where(enters, VALUE_DIM, 0))
    tl.debug_barrier()  # all have read what is written over now
    tl.store(margin_ptr + (ring + place) * margin_stride_s, margin, mask=enters)
    tl.store(position_ptr + place * position_stride_s, token, mask=enters)
    tl.store(kept_ptr, kept + 1, mask=enters & (kept < size))
