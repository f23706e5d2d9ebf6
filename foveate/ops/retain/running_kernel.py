"""A buffer of the best tokens so far: Triton kernels of :func:`running_best` and :func:`replace_weakest`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.ops._dispatch import UnsupportedError
from foveate.ops.retain.running import LARGEST_BUFFER, Leaving

_BLOCK = 256
"""New tokens that a program looks at at once."""
_EMPTY, _NO_SLOT = tl.constexpr(-0x80000000), tl.constexpr(0x7FFFFFFF)
"""Below every token's margin and above it, as :func:`_ordered` has them."""


def running_best(kept: Tensor, kept_positions: Tensor, margins: Tensor, positions: Tensor) -> Leaving:
    """See :func:`foveate.ops.retain.running.running_best`. One launch; a program owns a row and a KV head.

    The buffer stays in the registers of one warp. Only a token that enters costs a step, and nothing waits for the
    device. Positions are below 2^31.
    """
    batch, heads, size = kept.shape
    count = margins.shape[2]
    _check_buffer(size, kept, margins)
    if kept_positions.shape != kept.shape or margins.shape[:2] != (batch, heads) or positions.shape != (batch, count):
        given = {"kept": kept, "kept_positions": kept_positions, "margins": margins, "positions": positions}
        raise ValueError("shapes do not fit: " + ", ".join(f"{name} {tuple(x.shape)}" for name, x in given.items()))
    leaves = torch.empty(batch, heads, size + count, dtype=torch.int64, device=kept.device)
    if leaves.numel():
        _running_best[batch * heads,](
            kept,
            kept_positions,
            margins,
            positions,
            leaves,
            *kept.stride(),
            *kept_positions.stride(),
            *margins.stride(),
            *positions.stride(),
            heads,
            size,
            count,
            SLOTS=max(32, triton.next_power_of_2(size)),
            BLOCK=_BLOCK,
            num_warps=1,
        )
    return Leaving(*leaves.split([size, count], 2))


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
    """See :func:`foveate.ops.retain.running.replace_weakest`. One launch; a program owns a row and a KV head."""
    batch, heads, number, dim = keys.shape
    size, value_dim = positions.shape[2], values.shape[3]
    _check_buffer(size, margins)
    fits = values.shape[:3] == margins.shape == keys.shape[:3] and number == ring + size and size > 0
    if not fits or positions.shape[:2] != (batch, heads) or kept.shape != (batch, heads):
        given = {"keys": keys, "values": values, "margins": margins, "positions": positions, "kept": kept}
        told = ", ".join(f"{name} {tuple(x.shape)}" for name, x in given.items())
        raise ValueError(f"shapes do not fit a ring of {ring} slots: {told}")
    if keys.numel():
        _replace_weakest[batch * heads,](
            keys,
            values,
            margins,
            positions,
            kept,
            slots,
            tokens,
            *keys.stride(),
            *values.stride(),
            *margins.stride(),
            *positions.stride(),
            *kept.stride(),
            slots.stride(0),
            tokens.stride(0),
            heads,
            ring,
            size,
            DIM=dim,
            VALUE_DIM=value_dim,
            BLOCK_D=triton.next_power_of_2(max(dim, value_dim)),
            SLOTS=max(128, triton.next_power_of_2(size)),
            num_warps=1 if size <= 256 else 4,
        )


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


_STRIDES = [f"{x}_stride_{axis}" for x in ("kept", "place", "margin") for axis in "bh"]


@triton.jit(do_not_specialize=[*_STRIDES, "position_stride_b", "heads", "size", "count"])
def _running_best(
    kept_ptr,
    place_ptr,
    margin_ptr,
    position_ptr,
    leave_ptr,
    kept_stride_b,
    kept_stride_h,
    kept_stride_s,
    place_stride_b,
    place_stride_h,
    place_stride_s,
    margin_stride_b,
    margin_stride_h,
    margin_stride_l,
    position_stride_b,
    position_stride_l,
    heads,
    size,
    count,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes ``leave [B, Hkv, K + n]``, contiguous: every entry once, so that no store has to wait for another."""
    row = tl.program_id(0)
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    kept_ptr += batch * kept_stride_b + head * kept_stride_h
    place_ptr += batch * place_stride_b + head * place_stride_h
    margin_ptr += batch * margin_stride_b + head * margin_stride_h
    position_ptr += batch * position_stride_b
    leave_ptr += row.to(tl.int64) * (size + count)

    slots, lanes = tl.arange(0, SLOTS), tl.arange(0, BLOCK)
    place = tl.load(place_ptr + slots * place_stride_s, mask=slots < size, other=-1).to(tl.int32)
    kept = tl.load(kept_ptr + slots * kept_stride_s, mask=(slots < size) & (place >= 0), other=0.0)
    held = tl.where(place >= 0, _ordered(kept), _EMPTY)
    tl.store(leave_ptr + slots, 0, mask=(slots < size) & (place < 0))
    held = tl.where(slots < size, held, _NO_SLOT)  # never the weakest
    place = tl.where(place >= 0, place, slots)  # different ones, of which the latest is written over first
    which = slots  # of the entries of leave
    least = tl.min(held, 0)
    for first in tl.range(0, count, BLOCK):
        turns = first + lanes
        margin = tl.load(margin_ptr + turns * margin_stride_l, mask=turns < count, other=0.0)
        position = tl.load(position_ptr + turns * position_stride_l, mask=turns < count, other=-1)
        offer = tl.where((margin > 0) & (position >= 0), _ordered(margin), _EMPTY)
        entered = lanes < 0
        turn = tl.min(tl.where(offer > least, lanes, BLOCK), 0)
        while turn < BLOCK:  # of equal margins the new token, which is the latest, stays out
            entered = entered | (lanes == turn)
            own = first + turn
            latest = tl.max(tl.where(held == least, place, -1), 0)
            weakest = (held == least) & (place == latest)
            tl.store(leave_ptr + which, own.to(tl.int64), mask=weakest & (held != _EMPTY))
            held = tl.where(weakest, _ordered(tl.load(margin_ptr + own * margin_stride_l)), held)
            place = tl.where(weakest, tl.load(position_ptr + own * position_stride_l).to(tl.int32), place)
            which = tl.where(weakest, size + own, which)
            least = tl.min(held, 0)
            turn = tl.min(tl.where((offer > least) & (lanes > turn), lanes, BLOCK), 0)
        tl.store(leave_ptr + size + turns, turns.to(tl.int64), mask=(turns < count) & (entered == 0))
    stays = (slots < size) & (held != _EMPTY)
    tl.store(leave_ptr + which, count.to(tl.int64), mask=stays)


_IN_PLACE = [f"{x}_stride_{axis}" for x in ("key", "value", "margin", "position", "kept") for axis in "bh"]


@triton.jit(do_not_specialize=[*_IN_PLACE, "slot_stride", "token_stride", "heads", "ring", "size"])
def _replace_weakest(
    key_ptr,
    value_ptr,
    margin_ptr,
    position_ptr,
    kept_ptr,
    slot_ptr,
    token_ptr,
    key_stride_b,
    key_stride_h,
    key_stride_s,
    key_stride_d,
    value_stride_b,
    value_stride_h,
    value_stride_s,
    value_stride_d,
    margin_stride_b,
    margin_stride_h,
    margin_stride_s,
    position_stride_b,
    position_stride_h,
    position_stride_s,
    kept_stride_b,
    kept_stride_h,
    slot_stride,
    token_stride,
    heads,
    ring,
    size,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SLOTS: tl.constexpr,
):
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
