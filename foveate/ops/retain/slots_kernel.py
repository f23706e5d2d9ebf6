"""Which slot a decode step gives up, and writing its new token: Triton kernels of :func:`give_up` and
:func:`put_token`."""

import torch
import triton
import triton.language as tl

from foveate.ops.dispatch import UnsupportedError
from foveate.ops.gpu.block_table import arguments, block_size

_BLOCK = 2048
"""Slots that a program reads at a time."""
_NONE = tl.constexpr(0x7FFFFFFFFFFFFFFF)


def give_up(positions, *, rows=None, scores=None, before=None, at=None, out=None):
    """See :func:`foveate.ops.retain.reference.give_up`. One launch; a program owns a row and a KV head."""
    batch, heads, number = positions.shape
    if at is None and scores.dtype != torch.float32:
        raise UnsupportedError(f"scores in {scores.dtype}")
    slots = torch.empty(batch, heads, dtype=torch.int64, device=positions.device) if out is None else out
    if slots.numel():
        limit = before if at is None else at
        _give_up[batch * heads,](
            positions, scores if at is None else None, limit, rows, slots,
            *positions.stride(), *((0, 0, 0) if at is not None else scores.stride()),
            1 if limit is None else limit.stride(0), 1 if rows is None else rows.stride(0),
            heads, number,
            AT=at is not None, BLOCK=min(_BLOCK, max(128, triton.next_power_of_2(number))), num_warps=4,
        )  # fmt: skip
    return slots


def put_token(kv, k, v, slots, *, freed=None, take=False, positions=None, newest=None, emptied=None):
    """See :func:`foveate.ops.retain.reference.put_token`. One launch; a program owns a KV head and a token of a row."""
    keys, values, block_table = kv.k, kv.v, kv.block_table
    batch, heads, number, dim, value_dim = len(keys), keys.shape[1], k.shape[2], keys.shape[3], values.shape[3]
    if block_table is not None:
        block_table.check_rows(k)
        batch = len(k)
    if (k.dtype, v.dtype) != (keys.dtype, values.dtype) or (positions is not None and newest.dtype != positions.dtype):
        raise ValueError(f"a token in {k.dtype} and {v.dtype} for memory in {keys.dtype} and {values.dtype}")
    if number > 1 and not (freed is positions is emptied is None):
        raise ValueError(f"{number} tokens of a row go to its next slots, with nothing beside keys and values")
    if k.shape != (batch, heads, number, dim) or v.shape != (batch, heads, number, value_dim):
        raise ValueError(f"a token of k {tuple(k.shape)}, v {tuple(v.shape)} does not fit memory {tuple(keys.shape)}")
    freed = None if freed is None else freed.contiguous() if not take else freed
    found = torch.empty(batch, heads, dtype=torch.int64, device=keys.device)
    if found.numel():
        _put_token[batch * heads, number](
            keys, values, k, v, slots.contiguous(), freed, positions,
            None if positions is None else newest.contiguous(), emptied, *arguments(block_table), found,
            *keys.stride(), *values.stride(), k.stride(), v.stride(), *((0, 0) if freed is None else freed.stride()),
            *((0, 0, 0) if positions is None else positions.stride()),
            *((0, 0, 0) if emptied is None else emptied.stride()),
            heads,
            TAKE=take and freed is not None, BLOCK_SIZE=block_size(block_table, keys), DIM=dim, VALUE_DIM=value_dim,
            BLOCK=triton.next_power_of_2(max(dim, value_dim)), num_warps=1,
        )  # fmt: skip
    return found


_VARYING = ["position_stride_b", "position_stride_h", "score_stride_b", "score_stride_h"]
_VARYING += ["limit_stride", "row_stride", "heads", "number"]


@triton.jit(do_not_specialize=_VARYING)
def _give_up(
    position_ptr, score_ptr, limit_ptr, row_ptr, slot_ptr,
    position_stride_b, position_stride_h, position_stride_s, score_stride_b, score_stride_h, score_stride_s,
    limit_stride, row_stride,
    heads, number,
    AT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Finds the slot that one KV head of a row gives up, and empties it.

    A program owns a KV head of a row. It reads the head's positions ``[B, Hkv, S]``, and with ``AT`` False the scores,
    once in ascending order, and writes the slot to ``slot [B, Hkv]``, -1 if the row gives up none, and -1 to the slot's
    position.

    With ``AT`` the slot is the one whose position is ``limit``. Otherwise it is the slot of the smallest score among
    the positions below ``limit``, and of equal scores the slot of the largest position. Score and position are packed
    into one integer, which is different for every token, so that a single minimum finds the slot.

    Shapes: S = BLOCK slots.
    """
    # 1. Find the row and the KV head, and whether the row gives up a slot.
    row = tl.program_id(0)
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    position_ptr += batch * position_stride_b + head * position_stride_h
    lanes = tl.arange(0, BLOCK)  # [S]
    least, slot = tl.full([BLOCK], _NONE, tl.int64), tl.full([BLOCK], -1, tl.int32)  # [S], [S]
    limit, leaves = 0, True
    if limit_ptr is not None:
        limit = tl.load(limit_ptr + batch * limit_stride)
    if row_ptr is not None:
        leaves = tl.load(row_ptr + batch * row_stride) != 0
    if not AT:
        score_ptr += batch * score_stride_b + head * score_stride_h
    # 2. Keep the smallest integer and its slot in each lane; a row that gives up none reads nothing.
    for first in tl.range(0, tl.where(leaves, number, 0), BLOCK):
        place = first + lanes  # [S]
        position = tl.load(position_ptr + place * position_stride_s, mask=place < number, other=-1)  # [S]
        eligible = position >= 0  # [S]
        if AT:
            eligible = eligible & (position == limit)  # [S]
            key = tl.zeros([BLOCK], tl.int64)  # [S]
        else:
            if limit_ptr is not None:
                eligible = eligible & (position < limit)  # [S]
            x = tl.load(score_ptr + place * score_stride_s, mask=eligible, other=0.0)  # [S]
            x = tl.where(x == x, x, float("-inf")) + 0.0  # [S]; -0.0 as 0.0
            bits = x.to(tl.int32, bitcast=True)  # [S]
            order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # [S]; integers in the order of the scores
            key = (order.to(tl.int64) << 32) | (0x7FFFFFFF - position).to(tl.int64)  # [S]
        key = tl.where(eligible, key, _NONE)  # [S]
        slot = tl.where(key < least, place, slot)  # [S]
        least = tl.minimum(key, least)  # [S]
    # 3. Reduce over the lanes and store.
    weakest = tl.max(tl.where(least == tl.min(least, 0), slot, -1), 0)
    tl.store(slot_ptr + row, weakest.to(tl.int64))
    tl.store(position_ptr + weakest * position_stride_s, -1, mask=weakest >= 0)


_STRIDES = [f"{x}_stride_{axis}" for x in ("key", "value", "freed", "position", "emptied") for axis in "bh"]


@triton.jit(do_not_specialize=[*_STRIDES, "table_stride", "heads"])
def _put_token(
    key_ptr, value_ptr, k_ptr, v_ptr, slot_ptr, freed_ptr, position_ptr, newest_ptr, emptied_ptr, table_ptr,
    table_stride, found_ptr,
    key_stride_b, key_stride_h, key_stride_s, key_stride_d,
    value_stride_b, value_stride_h, value_stride_s, value_stride_d, k_strides, v_strides,
    freed_stride_b, freed_stride_h,
    position_stride_b, position_stride_h, position_stride_s, emptied_stride_b, emptied_stride_h, emptied_stride_s,
    heads,
    TAKE: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes one token of one KV head to memory.

    A program owns a token of a KV head in a row. It reads the token's key ``k [B, Hkv, n, D]`` and value ``v
    [B, Hkv, n, Dv]``, and writes them to the slot that the KV head gave up (``freed [B, Hkv]``, -1 for none), or else
    to the row's next slot ``slot [B]`` plus the token's number. It also writes the slot of the first token to ``found
    [B, Hkv]``, ``newest [B]`` to the slot's position, 0 to its place in ``emptied``, and with ``TAKE`` -1 to ``freed``;
    tensors that are None are left out.

    Shapes: D = BLOCK, the power of two that holds the dimensions of a key and of a value.
    """
    # 1. Find the row, the KV head and the token that the program owns.
    row, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    # 2. Find the slot.
    slot, dims = tl.load(slot_ptr + batch), tl.arange(0, BLOCK)  # scalar, [D]
    if freed_ptr is not None:
        at = freed_ptr + batch * freed_stride_b + head * freed_stride_h
        freed = tl.load(at)
        slot = tl.where(freed >= 0, freed, slot)
        if TAKE:
            tl.store(at, -1)
    tl.store(found_ptr + row, slot, mask=token == 0)
    slot += token
    # 3. Load the key and the value.
    k_ptr += batch * k_strides[0] + head * k_strides[1] + token * k_strides[2]
    v_ptr += batch * v_strides[0] + head * v_strides[1] + token * v_strides[2]
    k = tl.load(k_ptr + dims * k_strides[3], mask=dims < DIM)  # [D]
    v = tl.load(v_ptr + dims * v_strides[3], mask=dims < VALUE_DIM)  # [D]
    # 4. Store them, in memory of blocks or of one piece, and then the numbers beside them.
    if BLOCK_SIZE:
        in_block = tl.load(table_ptr + batch * table_stride + slot // BLOCK_SIZE).to(tl.int64)
        key_ptr += in_block * key_stride_b + head * key_stride_h + slot % BLOCK_SIZE * key_stride_s
        value_ptr += in_block * value_stride_b + head * value_stride_h + slot % BLOCK_SIZE * value_stride_s
    else:
        key_ptr += batch * key_stride_b + head * key_stride_h + slot * key_stride_s
        value_ptr += batch * value_stride_b + head * value_stride_h + slot * value_stride_s
    tl.store(key_ptr + dims * key_stride_d, k, mask=dims < DIM)
    tl.store(value_ptr + dims * value_stride_d, v, mask=dims < VALUE_DIM)
    if position_ptr is not None:
        position_ptr += batch * position_stride_b + head * position_stride_h + slot * position_stride_s
        tl.store(position_ptr, tl.load(newest_ptr + batch))
    if emptied_ptr is not None:
        tl.store(emptied_ptr + batch * emptied_stride_b + head * emptied_stride_h + slot * emptied_stride_s, 0)
