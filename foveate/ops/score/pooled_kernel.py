"""Pooled attention of one query a row, keys read once: Triton kernel of :func:`pooled_mass` and
:func:`pooled_mass_of_pages`."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.ops.dispatch import UnsupportedError
from foveate.ops.gpu.block_table import arguments, block_size, located, offsets, reads, slots_at
from foveate.ops.gpu.eight_bits import queries_for
from foveate.ops.gpu.softcap import capped, constant
from foveate.ops.gpu.softmax import LOG2E, LOWEST
from foveate.ops.gpu.tiles import Tile, capability, cdiv, multiprocessors, next_power_of_2, split, split_of_row
from foveate.ops.kv import KV
from foveate.ops.logits import Logits
from foveate.ops.score.kept_logits_kernel import VARYING, counted, keep, per_head, pooled, room_for, steps
from foveate.ops.score.pooled import check

_LARGEST = 256
"""The largest head dim."""
_HEADS = 64
"""The most heads of a program."""
_RESIDENT = 3
"""Programs that a multiprocessor runs at a time."""


@functools.cache
def tile_for(dtype: torch.dtype, dim: int, group: int, capability: int) -> Tile:
    """Heads and keys of a program: blocks of 32 KB on Hopper, of 16 KB elsewhere, two of them under way."""
    heads = min(_HEADS, max(16, next_power_of_2(group)))
    if dtype == torch.float32:  # multiplied without tensor cores
        return Tile(16, 32, num_warps=8 if dim > 128 else 4, num_stages=1)
    keys = (64 if dim > 128 else 128) // (1 if capability >= 9 else 2)
    return Tile(heads, keys, num_warps=4, num_stages=3 if heads < 64 else 2)


def pooled_mass(q, kv, *, logits, pooling="post_softmax", pool="kv_head"):
    """See :func:`foveate.ops.score.pooled.pooled_mass`.

    One pass over the keys keeps every head's logits and their log-sum-exp; a second pass over the logits pools them.
    For keys in half precision, a logit is kept in 16 bits, in steps of 2^-11 of a factor of two below the largest of
    its block of keys: a mass is right to 2e-4 of itself, and a mass below 2^-32 of the block's largest counts as 0.
    With ``max_logit`` the steps are four times as wide: a logit is right to 7e-4, and a logit more than 88 below the
    block's largest counts as 88 below it. For fp32 keys, logits are kept in fp32. Keys that the lengths leave out are
    not read and may hold anything.
    """
    return _pooled_mass(q, kv, None, None, kv.num_keys, 0, logits, pooling, pool)


def pooled_mass_of_pages(q, kv, pages, page_size, *, logits, counts=None, pooling="post_softmax", pool="kv_head"):
    """See :func:`foveate.ops.score.pooled.pooled_mass_of_pages`, and :func:`pooled_mass`: keys are read where they are.

    Keys of no page and keys that do not exist are not read and may hold anything.
    """
    pages, number = pages.expand(-1, kv.k.shape[1], -1), pages.shape[2] * page_size
    return _pooled_mass(q, kv, pages, counts, number, page_size, logits, pooling, pool)


def _pooled_mass(
    q: Tensor,
    kv: KV,
    pages: Tensor | None,
    counts: Tensor | None,
    number: int,
    page_size: int,
    logits: Logits,
    pooling: str,
    pool: str,
) -> Tensor:
    """Scores of ``number`` keys or, with ``pages``, of the keys of pages: in row b, the first ``counts[b]`` pages."""
    check(pooling, pool)
    k, block_table, lengths = kv.k, kv.block_table, kv.lengths
    batch, num_heads, length, dim = q.shape
    num_kv_heads = k.shape[1]
    if not reads(q, k, block_table):
        raise UnsupportedError(f"queries in {q.dtype} with keys in {k.dtype}")
    if dim > _LARGEST:
        raise UnsupportedError(f"head dims above {_LARGEST}")
    if length != 1:
        raise ValueError(f"shapes do not fit one query a row: q {tuple(q.shape)}, k {tuple(k.shape)}")
    group = num_heads // num_kv_heads
    if not batch * number:
        return pooled(room_for(q, number, 0, 1, 16), num_kv_heads, number, None, None, pooling, pool)
    lengths = None if lengths is None else per_head(lengths, num_kv_heads)
    tile = tile_for(q.dtype, dim, group, capability(q.device))
    parts, blocks = cdiv(group, tile.block_m), cdiv(number, tile.block_n)
    room = _RESIDENT * multiprocessors(q.device)
    splits, _ = split(batch * num_kv_heads * parts, blocks, room)
    kept = room_for(q, number, blocks, splits, tile.block_n)
    keys = kv.num_keys if page_size else None
    _keep_logits[batch * num_kv_heads * parts, splits](
        q, k, pages, lengths, *counted(counts), *arguments(block_table), *kept[:3],
        (q.stride(0), q.stride(1), q.stride(3)), k.stride(), *((0, 0, 0) if pages is None else pages.stride()),
        *((0, 0) if lengths is None else lengths.stride()),
        num_kv_heads, group, parts, number, keys, kept.logits.shape[2], blocks, room, logits.scaling * LOG2E.value,
        steps(pooling),
        CODED=kept.coded, SOFTCAP=constant(logits.softcap), PAGE_SIZE=page_size, BLOCK_SIZE=block_size(block_table, k),
        **tile.sizes(dim) | tile.options,
    )  # fmt: skip
    more = {"page_size": page_size, "keys": keys, "counts": counts}
    return pooled(kept.beside(logits.sinks), num_kv_heads, number, pages, lengths, pooling, pool, **more)


@triton.jit(do_not_specialize=[*VARYING, "table_stride", "num_kv_heads", "parts", "room"])
def _keep_logits(
    q_ptr, k_ptr, chosen_ptr, length_ptr, count_ptr, count_stride, table_ptr, table_stride, logit_ptr, top_ptr, lse_ptr,
    q_strides, k_strides, chosen_stride_b, chosen_stride_h, chosen_stride_l, length_stride_b, length_stride_h,
    num_kv_heads, group, parts, number, keys, padded, blocks, room, scale, steps,
    CODED: tl.constexpr, SOFTCAP: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The logits of one query a row, kept to be pooled: writes ``logit [B, Hq, padded]``, ``top [B, Hq, blocks]``
    (``CODED``: the largest logit of each block) and ``lse [B, Hq, splits]``, all contiguous and to the base 2;
    ``scale`` includes log2(e).

    A program owns up to ``BLOCK_M`` heads of a group in one row of the batch and one split of the row's keys, which it
    reads once, in ascending order. Products and log-sum-exps are in fp32; ``CODED`` logits are rounded to 16 bits below
    the largest of their block.

    With ``BLOCK_SIZE`` not 0, keys are in blocks of ``BLOCK_SIZE`` slots, ``[N, Hkv, BLOCK_SIZE, D]``, and ``table``
    lists the blocks of each row. With ``PAGE_SIZE`` not 0, ``chosen`` lists pages of ``PAGE_SIZE`` keys, -1 for an
    unused place: ``number`` counts the keys of all places, ``count`` (or None) says how many places of a row are read,
    and a key exists below ``keys`` and ``length``.

    Shapes: M = BLOCK_M heads, N = BLOCK_N keys, D = BLOCK_D, which holds the head dim ``DIM``.
    """
    INDEXED: tl.constexpr = PAGE_SIZE != 0
    q_stride_b, q_stride_h, q_stride_d = q_strides
    k_stride_b, k_stride_h, k_stride_l, k_stride_d = k_strides
    row, part, split = tl.program_id(0) // parts, tl.program_id(0) % parts, tl.program_id(1)
    batch, head = (row // num_kv_heads).to(tl.int64), (row % num_kv_heads).to(tl.int64)
    member = part * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]
    exist = member < group  # [M]
    # [M]; heads beyond the group repeat its first one, so that all addresses are valid
    heads = head * group + tl.where(exist, member, 0)
    dims = tl.arange(0, BLOCK_D)  # [D]
    rows, splits = batch * num_kv_heads * group + heads, tl.num_programs(1)  # [M], scalar

    # 1. Find which keys exist, and the blocks of this split. Its log-sum-exp is -inf if the row needs no such split.
    if length_ptr is not None:
        length = tl.load(length_ptr + batch * length_stride_b + head * length_stride_h)
        if PAGE_SIZE:
            keys = tl.minimum(keys, length.to(tl.int32))
        else:
            number = tl.minimum(number, length.to(tl.int32))
    if count_ptr is not None:
        number = tl.minimum(number, tl.load(count_ptr + batch * count_stride).to(tl.int32) * PAGE_SIZE)
    here = tl.cdiv(number, BLOCK_N)
    each = tl.cdiv(here, splits)
    if count_ptr is not None or (length_ptr is not None and not PAGE_SIZE):  # fewer programs share a shorter row
        used, each = split_of_row(here, tl.num_programs(0), splits, room)
        if split >= used:
            none = tl.full([BLOCK_M], float("-inf"), tl.float32)  # [M]
            tl.store(lse_ptr + rows * splits + split, none, mask=exist)
            return
    begin, end = split * each, tl.minimum((split + 1) * each, here)

    # 2. Load the queries of the group.
    q_tile = batch * q_stride_b + heads[:, None] * q_stride_h + dims[None, :] * q_stride_d  # [M, D]
    q = tl.load(q_ptr + q_tile, mask=exist[:, None] & (dims < DIM)[None, :], other=0.0)  # [M, D]
    q, scale = queries_for(k_ptr, q, scale)  # [M, D]; scale may be [M, 1]
    if BLOCK_SIZE:
        table_ptr += batch * table_stride
        k_ptr += head * k_stride_h
    else:
        k_ptr += batch * k_stride_b + head * k_stride_h
    if PAGE_SIZE:
        chosen_ptr += batch * chosen_stride_b + head * chosen_stride_h

    # LOWEST is finite, so that ``top - higher`` is 0 and not NaN before the first key.
    top = tl.full([BLOCK_M], LOWEST, tl.float32)  # [M]
    weight = tl.zeros([BLOCK_M], tl.float32)  # [M]
    places = tl.arange(0, BLOCK_N)  # [N]
    following, later = places, places  # [N], [N]

    # 3. Look up the slots of the first block of keys, and for pages in blocks the pages of the second one. Slots are
    # looked up a block ahead, as in decoding, so that loads of keys do not wait for them.
    if INDEXED or BLOCK_SIZE:
        place = begin * BLOCK_N + places  # [N]
        following = slots_at(chosen_ptr, chosen_stride_l, place, number, keys, None, INDEXED, PAGE_SIZE)  # [N]
    if BLOCK_SIZE:
        following = located(table_ptr, following, BLOCK_SIZE)  # [N]
        if INDEXED:
            place += BLOCK_N
            later = slots_at(chosen_ptr, chosen_stride_l, place, number, keys, None, INDEXED, PAGE_SIZE)  # [N]

    # 4. Walk over the blocks of keys.
    for block in tl.range(begin, end):
        place = block * BLOCK_N + places  # [N]
        slots, stored = place, place < number  # [N], [N]
        if INDEXED or BLOCK_SIZE:
            slots, stored = following, following >= 0  # [N], [N]
            following = later
            if not (INDEXED and BLOCK_SIZE):
                ahead = place + BLOCK_N  # [N]
                following = slots_at(chosen_ptr, chosen_stride_l, ahead, number, keys, None, INDEXED, PAGE_SIZE)  # [N]
            if BLOCK_SIZE:
                following = located(table_ptr, following, BLOCK_SIZE)  # [N]
                if INDEXED:
                    ahead = place + 2 * BLOCK_N  # [N]
                    later = slots_at(chosen_ptr, chosen_stride_l, ahead, number, keys, None, INDEXED, PAGE_SIZE)  # [N]
        k_mask = stored[:, None]  # [N, 1]
        if BLOCK_D > DIM:
            k_mask = k_mask & (dims < DIM)[None, :]  # [N, D]
        k_rows = offsets(slots, k_stride_b, k_stride_l, BLOCK_SIZE)  # [N]
        k = tl.load(k_ptr + k_rows[:, None] + dims[None, :] * k_stride_d, mask=k_mask, other=0.0).to(q.dtype)  # [N, D]
        logits = capped(tl.dot(q, tl.trans(k), input_precision="ieee") * scale, SOFTCAP)  # [M, N]
        logits = tl.where(stored[None, :], logits, float("-inf"))  # [M, N]
        largest = tl.maximum(tl.max(logits, 1), LOWEST)  # [M]
        keep(logits, largest, logit_ptr, top_ptr, rows, exist, block, place, padded, blocks, steps, CODED)
        higher = tl.maximum(top, largest)  # [M]
        weight = weight * tl.exp2(top - higher) + tl.sum(tl.exp2(logits - higher[:, None]), 1)  # [M]
        top = higher

    # 5. Write the log-sum-exp of the split.
    lse = tl.where(weight == 0, float("-inf"), top + tl.log2(weight))  # [M]
    tl.store(lse_ptr + rows * splits + split, lse, mask=exist)
