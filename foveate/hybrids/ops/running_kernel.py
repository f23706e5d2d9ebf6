"""A buffer of the best tokens so far: Triton kernels of :func:`running_best` and :func:`replace_weakest`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.hybrids.ops.running import LARGEST_BUFFER, Leaving
from foveate.ops.dispatch import UnsupportedError

_FIRST = 512
"""New tokens before the first floor; each further floor comes after twice the number of tokens."""
_SCAN = 4096
"""Tokens that a program examines at a time."""
_OWN, _OTHERS = 32, 128
"""Tokens whose leaving turns a program finds, and tokens that it compares them with at a time."""
_EMPTY = tl.constexpr(-0x80000000)
"""An integer below every token's margin, in the order of :func:`_ordered`."""


def running_best(kept: Tensor, kept_positions: Tensor, margins: Tensor, positions: Tensor) -> Leaving:
    """See :func:`foveate.hybrids.ops.running.running_best`. Three launches, parallel in the tokens.

    A token leaves with the first turn by which K better tokens have come, where K is the size of the buffer. The second
    launch lists the tokens that may be let in: the tokens above a floor, a value that all tokens of a full buffer reach
    before that turn. Each floor serves the turns from its own to twice its own. The third launch compares the listed
    tokens in pairs. The best tokens so far have all been let in, so leaving out the others changes no turn.

    Nothing waits for the device. Positions are below 2^31, and the positions of new tokens rise.
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
    """Integers in the order of the margins, of any shape: a warp finds the smallest of integers in one instruction."""
    bits = (margin + 0.0).to(tl.int32, bitcast=True)  # -0.0 as 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _level_begins(level, FIRST: tl.constexpr):
    """The first turn to which a level's floor applies: 0, FIRST, 2 FIRST, 4 FIRST and so on."""
    return tl.where(level == 0, 0, (FIRST << level) // 2)


@triton.jit
def _buffered(kept_ptr, place_ptr, kept_stride, place_stride, slots, size):
    """The contents of the buffer's slots ``slots [S]``: ordered margins ``[S]`` and positions ``[S]``, ``_EMPTY`` and
    -1 in empty slots."""
    place = tl.load(place_ptr + slots * place_stride, mask=slots < size, other=-1).to(tl.int32)  # [S]
    kept = tl.load(kept_ptr + slots * kept_stride, mask=(slots < size) & (place >= 0), other=0.0)  # [S]
    return tl.where(place >= 0, _ordered(kept), _EMPTY), place  # [S], [S]


_OFFER_STRIDES = ["margin_stride_b", "margin_stride_h", "position_stride_b"]


@triton.jit(do_not_specialize=[*_OFFER_STRIDES, "heads", "size", "count"])
def _offer(
    margin_ptr, position_ptr, offer_ptr, leave_ptr,
    margin_stride_b, margin_stride_h, margin_stride_l, position_stride_b, position_stride_l,
    heads, size, count,
    SCAN: tl.constexpr,
):  # fmt: skip
    """Orders the margins of new tokens.

    A program owns ``SCAN`` new tokens of a KV head in a row. It reads their margins ``[B, Hkv, n]`` and positions
    ``[B, n]``, and writes ``offer [B * Hkv, n]``, the ordered margins, ``_EMPTY`` for tokens that are not let in. It
    also writes to ``leave [B, Hkv, K + n]`` that each new token leaves at its own turn; the third launch replaces the
    entries of listed tokens.

    Shapes: S = SCAN tokens.
    """
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // heads, row % heads
    turns = tl.program_id(1) * SCAN + tl.arange(0, SCAN)  # [S]
    there = turns < count  # [S]
    margin_ptr += batch * margin_stride_b + head * margin_stride_h
    margin = tl.load(margin_ptr + turns * margin_stride_l, mask=there, other=0.0)  # [S]
    # [S]
    position = tl.load(position_ptr + batch * position_stride_b + turns * position_stride_l, mask=there, other=-1)
    offer = tl.where((margin > 0) & (position >= 0), _ordered(margin), _EMPTY)  # [S]
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
    """Lists the tokens of one level that exceed the level's floor.

    A program owns a level, a range of turns, of a KV head in a row. The floor is a value that K of the tokens before
    the level reach, the buffer's tokens included: the largest such number whose 15 lowest bits are 0, or 0 for none.
    The program finds it by reading all tokens before the level eight times, and then reads the level's own tokens once,
    in ascending order.

    It writes the tokens above the floor in the order of their turns, from the level's first turn on, to ``value`` and
    ``turn [B * Hkv, n]``, and their count to ``found [B * Hkv, levels]``.

    Shapes: S = SCAN tokens, K = SLOTS slots of the buffer, padded.
    """
    # 1. Find the row and the KV head, and the level's range of turns, ``begin .. end - 1``.
    row, level = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = row // heads, row % heads
    kept_ptr += batch * kept_stride_b + head * kept_stride_h
    place_ptr += batch * place_stride_b + head * place_stride_h
    offer_ptr += row * count
    value_ptr += row * count
    turn_ptr += row * count
    begin = _level_begins(level, FIRST)
    end = tl.minimum(_level_begins(level + 1, FIRST), count)
    # 2. Load the buffer.
    lanes = tl.arange(0, SCAN)  # [S]
    held, _ = _buffered(kept_ptr, place_ptr, kept_stride_s, place_stride_s, tl.arange(0, SLOTS), size)  # [K]

    # 3. Find the floor from its highest bit down, two bits at a time: count the tokens that reach each of three
    # candidates.
    floor = 0
    for digit in tl.range(0, 8):
        step = 1 << (29 - 2 * digit)
        low, middle, high = floor + step, floor + 2 * step, floor + 3 * step
        # [S], [S], [S]
        of_low, of_middle, of_high = (lanes < 0).to(tl.int32), (lanes < 0).to(tl.int32), (lanes < 0).to(tl.int32)
        for first in tl.range(0, begin, SCAN):
            offer = tl.load(offer_ptr + first + lanes, mask=first + lanes < begin, other=_EMPTY)  # [S]
            of_low += (offer >= low).to(tl.int32)  # [S]
            of_middle += (offer >= middle).to(tl.int32)  # [S]
            of_high += (offer >= high).to(tl.int32)  # [S]
        reach_low = tl.sum(of_low, 0) + tl.sum((held >= low).to(tl.int32), 0)
        reach_middle = tl.sum(of_middle, 0) + tl.sum((held >= middle).to(tl.int32), 0)
        reach_high = tl.sum(of_high, 0) + tl.sum((held >= high).to(tl.int32), 0)
        floor += tl.where(reach_low >= size, step, 0)
        floor += tl.where(reach_middle >= size, step, 0) + tl.where(reach_high >= size, step, 0)

    # 4. List the level's tokens above the floor.
    found = 0
    for first in tl.range(begin, end, SCAN):
        turns = first + lanes  # [S]
        offer = tl.load(offer_ptr + turns, mask=turns < end, other=_EMPTY)  # [S]
        # A token that equals the floor is not let in: K earlier tokens reach a floor above 0, and of equal margins the
        # earlier token is better.
        passes = offer > floor  # [S]
        place = begin + found + tl.cumsum(passes.to(tl.int32), 0) - 1  # [S]
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
    """Finds the turns at which tokens leave the buffer.

    A program owns ``OWN`` tokens of a KV head in a row. The first programs of a row own slots of the buffer, the others
    own places of the list that :func:`_list_best` wrote, and most of the latter are empty and end at once. The program
    compares its tokens with the buffer's tokens and then with the listed tokens, ``OTHERS`` at a time, in the order of
    their turns, until K better tokens have come for each of its own. It then finds the exact turn in the block of
    tokens in which this happens.

    It writes ``leave [B, Hkv, K + n]``, contiguous, for the buffer's and the listed tokens: the turn at which each
    leaves, or n if it stays.

    Shapes: W = OWN tokens of the program, X = OTHERS tokens that they are compared with.
    """
    # 1. Find the row and the KV head, and whether the program owns slots of the buffer or places of the list.
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
    own = first + tl.arange(0, OWN)  # [W]
    others = tl.arange(0, OTHERS)  # [X]

    # 2. Find the level in which the list's places are, and how far the level's tokens reach.
    level = 0
    while of_list & (level + 1 < levels) & (_level_begins(level + 1, FIRST) <= first):
        level += 1
    listed = _level_begins(level, FIRST) + tl.load(found_ptr + level)
    if of_buffer | (first < listed):
        # 3. Load the program's tokens.
        slots = tl.where(of_buffer, own, size)  # [W]
        held, place = _buffered(kept_ptr, place_ptr, kept_stride_s, place_stride_s, slots, size)  # [W], [W]
        exists = tl.where(of_buffer, held != _EMPTY, own < listed)  # [W]
        value = tl.where(of_buffer, held, tl.load(value_ptr + own, mask=exists & of_list, other=_EMPTY))  # [W]
        place = tl.where(of_buffer, place, 0x7FFFFFFF)  # [W]

        # 4. Count the better tokens of the buffer.
        better = tl.zeros([OWN], tl.int32)  # [W]; the better tokens so far
        for begin in tl.range(0, size, OTHERS):
            its, where = _buffered(kept_ptr, place_ptr, kept_stride_s, place_stride_s, begin + others, size)  # [X], [X]
            before = where[None, :] < place[:, None]  # [W, X]
            won = (its[None, :] > value[:, None]) | ((its[None, :] == value[:, None]) & before)  # [W, X]
            better += tl.sum((won & (its != _EMPTY)[None, :]).to(tl.int32), 1)  # [W]
        better = tl.where(exists, better, size)  # [W]
        at_first = better  # [W]
        # 5. Go on with the listed tokens, level by level, until K better tokens have come for each of the program's
        # tokens. ``reached`` is the block of others with which this happens, -1 for none, and ``missing`` the number of
        # better tokens that were still missing before that block.
        reached = tl.full([OWN], -1, tl.int32)  # [W]
        missing = size - better  # [W]
        least = tl.min(better, 0)
        level = 0
        while (level < levels) & (least < size):
            begin = _level_begins(level, FIRST)
            end = begin + tl.load(found_ptr + level)
            while (begin < end) & (least < size):
                its = tl.load(value_ptr + begin + others, mask=begin + others < end, other=_EMPTY)  # [X]
                # Of equal margins the earlier token is better: an equal token wins only in a block before the program's
                # own places, and never against a token of the buffer, which is earlier than all listed tokens.
                bound = tl.where(of_list & (begin + OTHERS <= first), value - 1, value)  # [W]
                won = its[None, :] > bound[:, None]  # [W, X]
                if of_list & (begin < first + OWN) & (begin + OTHERS > first):
                    earlier = (begin + others)[None, :] < own[:, None]  # [W, X]
                    won = won | ((its[None, :] == value[:, None]) & earlier)  # [W, X]
                more = better + tl.sum(won.to(tl.int32), 1)  # [W]
                reaches = (better < size) & (more >= size)  # [W]
                reached = tl.where(reaches, begin, reached)  # [W]
                missing = tl.where(reaches, size - better, missing)  # [W]
                better = more  # [W]
                least = tl.min(better, 0)
                begin += OTHERS
            level += 1

        # 6. Read that block again, a different one for each of the program's tokens, to find the exact turn.
        at = tl.maximum(reached, 0)[:, None] + others[None, :]  # [W, X]
        ends = tl.zeros([OWN], tl.int32)  # [W]
        for level in tl.range(0, levels):
            begin = _level_begins(level, FIRST)
            ends = tl.where(reached >= begin, begin + tl.load(found_ptr + level), ends)  # [W]
        its = tl.load(value_ptr + at, mask=(reached >= 0)[:, None] & (at < ends[:, None]), other=_EMPTY)  # [W, X]
        earlier = (at < own[:, None]) & of_list  # [W, X]
        won = (its > value[:, None]) | ((its == value[:, None]) & earlier)  # [W, X]
        passed = tl.sum((tl.cumsum(won.to(tl.int32), 1) < missing[:, None]).to(tl.int32), 1)  # [W]
        last = tl.maximum(reached, 0) + passed  # [W]; the token that makes it leave
        last = tl.where(of_buffer, last, tl.maximum(last, own))  # [W]
        last = tl.where((at_first >= size) & of_list, own, last)  # [W]
        # 7. Store the turns.
        leaves = tl.load(turn_ptr + last, mask=exists & ((reached >= 0) | (at_first >= size)), other=count)  # [W]
        tl.store(leave_ptr + own, tl.where(exists, leaves, 0).to(tl.int64), mask=of_buffer & (own < size))
        turn = tl.load(turn_ptr + own, mask=exists & of_list, other=0)  # [W]
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
    """Offers one token to the buffer of one KV head: it replaces the weakest token, or takes the first empty slot.

    A program owns a KV head of a row. It reads the buffer's positions ``[B, Hkv, K]`` and margins once. If the token
    enters, the program copies its key, value and margin from slot ``slot [B]`` of the ring of ``ring`` slots to a slot
    of the buffer, which follows the ring, and writes its position ``token [B]`` and the new count ``kept [B, Hkv]``.
    The weakest token has the smallest margin, and of equal margins the latest position.

    Shapes: S = SLOTS slots of the buffer, padded; D = BLOCK_D, the power of two that holds the dimensions of a key and
    of a value.
    """
    # 1. Find the row and the KV head, and load the token's margin.
    row = tl.program_id(0)
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    slot, token = tl.load(slot_ptr + batch * slot_stride), tl.load(token_ptr + batch * token_stride)
    margin_ptr += batch * margin_stride_b + head * margin_stride_h
    position_ptr += batch * position_stride_b + head * position_stride_h
    kept_ptr += batch * kept_stride_b + head * kept_stride_h
    margin, kept = tl.load(margin_ptr + slot * margin_stride_s), tl.load(kept_ptr)

    # 2. Find the weakest token, and decide whether and where the new token enters.
    slots = tl.arange(0, SLOTS)  # [S]
    position = tl.load(position_ptr + slots * position_stride_s, mask=slots < size, other=-1)  # [S]
    held = tl.load(margin_ptr + (ring + slots) * margin_stride_s, mask=position >= 0, other=float("inf"))  # [S]
    least = tl.min(held, 0)
    latest = tl.where(held == least, position, -1)  # [S]
    weakest = tl.max(tl.where(latest == tl.max(latest, 0), slots, -1), 0)
    full = kept == size
    enters = (margin > 0) & (token >= 0) & ((kept < size) | (margin > least))
    place = tl.where(full, weakest, kept.to(tl.int32)).to(tl.int64)

    # 3. Copy the key and the value.
    dims = tl.arange(0, BLOCK_D)  # [D]
    key_ptr += batch * key_stride_b + head * key_stride_h + dims * key_stride_d  # [D]
    value_ptr += batch * value_stride_b + head * value_stride_h + dims * value_stride_d  # [D]
    key = tl.load(key_ptr + slot * key_stride_s, mask=dims < DIM)  # [D]
    value = tl.load(value_ptr + slot * value_stride_s, mask=dims < VALUE_DIM)  # [D]
    tl.store(key_ptr + (ring + place) * key_stride_s, key, mask=dims < tl.where(enters, DIM, 0))
    tl.store(value_ptr + (ring + place) * value_stride_s, value, mask=dims < tl.where(enters, VALUE_DIM, 0))
    # 4. Store the numbers beside them, when all threads have read the values that these replace.
    tl.debug_barrier()
    tl.store(margin_ptr + (ring + place) * margin_stride_s, margin, mask=enters)
    tl.store(position_ptr + place * position_stride_s, token, mask=enters)
    tl.store(kept_ptr, kept + 1, mask=enters & (kept < size))
