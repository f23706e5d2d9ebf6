"""Attention of one query a row, over all keys or over chosen ones, and of the newest tokens: Triton kernels of
:func:`attend`, :func:`attend_newest`, :func:`attend_pooled`, :func:`attend_indices` and :func:`attend_pages`."""

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.ops.attend import decode
from foveate.ops.attend.attended import Attended
from foveate.ops.attend.splits_kernel import merge_splits
from foveate.ops.block_table import EIGHT_BITS
from foveate.ops.dispatch import UnsupportedError
from foveate.ops.gpu.block_table import arguments, block_size, located, offsets, reads, slots_at
from foveate.ops.gpu.eight_bits import lower, queries_for
from foveate.ops.gpu.softcap import capped, constant
from foveate.ops.gpu.softmax import LOG2E, LOWEST, accumulate, exponentials, log_sum_exp, normalised
from foveate.ops.gpu.tiles import (
    capability,
    cdiv,
    decode_tile,
    multiprocessors,
    newest_tile,
    next_power_of_2,
    split,
    split_of_row,
)
from foveate.ops.kv import KV
from foveate.ops.logits import Logits
from foveate.ops.score.kept_logits_kernel import counted, keep, per_head, pooled, room_for, steps
from foveate.ops.score.pooled import check

_LARGEST = 256
"""The largest head dim."""


def attend(q, kv, *, logits, mask=None, need_lse=False, need_mass=False, out=None):
    """See :func:`foveate.ops.attend.decode.attend`; several queries are left to the library.

    The heads of a group share a program, so that a key is read once. The keys are split among programs until these
    fill the GPU, and a second launch merges the programs' outputs by their log-sum-exps (FlashDecoding, Dao et al.
    2023). Repeats are equal bit for bit, and fp32 is multiplied in full precision. Keys that the mask or the
    lengths leave out are not read and may hold anything. For the mass, see :func:`attend_pooled`.
    """
    if q.shape[2] != 1:
        return decode.attend(q, kv, logits=logits, mask=mask, need_lse=need_lse, need_mass=need_mass, out=out)
    how, number = ("sum", "kv_head") if need_mass else None, kv.num_keys
    if mask is not None:
        mask = mask.expand(len(q), kv.k.shape[1], 1, number)[:, :, 0].view(torch.int8)
    return _decode(q, kv, None, mask, kv.lengths, number, logits, need_lse, how=how, out=out)


def attend_newest(q, kv, *, logits):
    """See :func:`foveate.ops.attend.newest.attend_newest` and :func:`attend`.

    The tokens of a KV head's group share a program as its heads do: up to 64 heads times tokens read a key once.
    """
    batch, num_heads, queries, dim = q.shape
    if logits.sinks is not None:
        logits = dataclasses.replace(logits, sinks=logits.sinks.repeat_interleave(queries))
    folded = q.reshape(batch, num_heads * queries, 1, dim)
    found = _decode(folded, kv, None, None, kv.lengths, kv.num_keys, logits, False, queries=queries)
    return Attended(found.out.view(batch, num_heads, queries, -1))


def attend_pooled(q, kv, *, logits, pooling="post_softmax", pool="kv_head", out=None):
    """See :func:`foveate.ops.attend.pooled.attend_pooled` and :func:`attend`.

    The launch stores the logits on the way, as :func:`foveate.ops.score.pooled_kernel.pooled_mass` does, so that a key
    is read once. A second pass over the logits turns them into attention, with the log-sum-exp, and pools it.
    """
    check(pooling, pool)
    return _decode(q, kv, None, None, kv.lengths, kv.num_keys, logits, True, how=(pooling, pool), out=out)


def attend_indices(
    q, kv, indices, *, logits, counts=None, heads=None, whole=None, need_lse=False, need_mass=False, out=None
):
    """See :func:`foveate.ops.attend.decode.attend_indices`, and :func:`attend`: keys are read in place."""
    if q.shape[2] != 1:
        raise UnsupportedError("more than one query")
    if need_mass:
        raise UnsupportedError("the mass of the keys")
    number, heads = indices.shape[2], None if heads is None else heads.contiguous()
    return _decode(q, kv, indices, None, counts, number, logits, need_lse, heads=heads, whole=whole, out=out)


def attend_pages(q, kv, pages, page_size, *, logits, counts=None, whole=None, need_lse=False, out=None):
    """See :func:`foveate.ops.attend.decode.attend_pages`, and :func:`attend`: keys are read in place.

    Query heads that choose for themselves have programs of their own. The programs of one GQA group have consecutive
    numbers, so that keys that several of them read come from the GPU's L2 cache.
    """
    if q.shape[2] != 1:
        raise UnsupportedError("more than one query")
    number = pages.shape[2] * page_size
    how = {"page_size": page_size, "counts": counts, "whole": whole, "out": out}
    return _decode(q, kv, pages, None, kv.lengths, number, logits, need_lse, **how)


def _decode(
    q: Tensor,
    kv: KV,
    indices: Tensor | None,
    mask: Tensor | None,
    lengths: Tensor | None,
    number: int,
    logits: Logits,
    need_lse: bool,
    how: tuple[str, str] | None = None,
    page_size: int = 0,
    counts: Tensor | None = None,
    heads: Tensor | None = None,
    whole: Tensor | None = None,
    out: Tensor | None = None,
    queries: int = 1,
) -> Attended:
    """Attention over ``number`` keys or places of ``indices``, or over the first ``lengths`` of them.

    Args:
        indices: slots ``[B, Hkv, K]``, or pages ``[B, Hkv or Hq, P]`` with ``page_size``; None: all keys.
        mask: int8 ``[B, Hkv, Lk]``, not 0 at the keys to read; None: all keys.
        how: pooling and pool of the mass of all keys; None: no mass.
        page_size: keys of a page; 0: ``indices`` holds slots. With pages ``number`` counts the keys of all of them.
        counts: ``[B]``: only a row's first pages, this number of them, are read; None: all.
        heads: the KV head whose indices each KV head reads; None: its own.
        whole: int ``[B]``: a row where it is not 0 reads its first ``whole`` keys and ignores ``indices``.
        queries: the newest tokens of a row. ``q`` holds each of them as a head of its own.
    """
    k, v, block_table = kv.k, kv.v, kv.block_table
    (batch, num_heads, _, dim), (_, num_kv_heads, _, value_dim) = q.shape, v.shape
    if k.dtype != v.dtype or not reads(q, k, block_table):
        raise UnsupportedError(f"queries in {q.dtype} with keys in {k.dtype} and values in {v.dtype}")
    if max(dim, value_dim) > _LARGEST:
        raise UnsupportedError(f"head dims above {_LARGEST}")
    sets = indices.shape[1] if page_size else num_kv_heads  # sets of heads that read the same keys
    keys = kv.num_keys
    group = num_heads // sets
    narrow = k.dtype == EIGHT_BITS and (how is not None or indices is not None)
    facts = q.dtype, max(dim, value_dim), group, capability(q.device), block_table is not None
    tile, resident = decode_tile(*facts, narrow) if queries == 1 else newest_tile(*facts)
    parts, blocks = cdiv(group, tile.block_m), cdiv(number if whole is None else max(number, keys), tile.block_n)
    room = resident * multiprocessors(q.device)
    splits, _ = split(batch * sets * parts, blocks, room)
    out = q.new_empty(batch, num_heads, 1, value_dim) if out is None else out
    lse = q.new_empty(batch, num_heads, 1, dtype=torch.float32)
    kept = room_for(q, number, blocks, splits, tile.block_n) if how else None
    lengths = None if lengths is None else per_head(lengths, num_kv_heads)
    if not out.numel():
        mass = pooled(kept, num_kv_heads, number, mask, lengths, *how) if how else None
        return Attended(out, lse if need_lse else None, mass)
    if v.dtype == EIGHT_BITS and q.dtype != torch.float32 and v.stride(-1) == 1:
        even = not any(size % 2 for size in (value_dim, v.storage_offset(), *v.stride()[:-1]))
        v = v.view(torch.int16) if even else v
    found, merged = (out, lse), splits > 1 or logits.sinks is not None
    ragged = whole is not None or (counts if page_size else lengths) is not None
    used = None if splits == 1 or not ragged else torch.empty(batch * sets, dtype=torch.int32, device=q.device)
    if merged:
        found = tuple(torch.empty((splits * batch, *x.shape[1:]), dtype=torch.float32, device=q.device) for x in found)
    chosen = indices if indices is not None else mask
    sizes = batch, sets, group, parts, number, keys if page_size else None
    sizes += kept.logits.shape[2] if kept else 0, blocks, room
    _attend_decode[batch * sets * parts, splits](
        q, k, v, chosen, heads, lengths, *counted(counts), None if whole is None else whole.contiguous(),
        *arguments(block_table), *found, used, kept[:3] if kept else None,
        (q.stride(0), q.stride(1), q.stride(3)), k.stride() + v.stride(),
        *((0, 0, 0) if chosen is None else chosen.stride()), *((0, 0) if lengths is None else lengths.stride()),
        *sizes, logits.scaling * LOG2E.value, steps(how[0]) if how else 0.0,
        INDEXED=indices is not None, PAGE_SIZE=page_size, BLOCK_SIZE=block_size(block_table, k),
        HEADS=(sets // num_kv_heads, queries), CODED=kept is not None and kept.coded,
        SOFTCAP=constant(logits.softcap), TILE=tile.shape(dim, value_dim), **tile.options,
    )  # fmt: skip
    if merged:
        merge_splits[num_heads, batch](
            *found, logits.sinks, used, out, lse,
            *found[0].stride()[:3], *out.stride()[:3], 0 if logits.sinks is None else logits.sinks.stride(0),
            batch, num_heads, 1, splits, group,
            SINKS=logits.sinks is not None, VALUE_DIM=value_dim, BLOCK_DV=max(16, next_power_of_2(value_dim)),
            BLOCK=min(16, next_power_of_2(splits)), num_warps=4,
        )  # fmt: skip
    mass = pooled(kept.beside(logits.sinks), num_kv_heads, number, mask, lengths, *how) if how else None
    return Attended(out, lse if need_lse else None, mass)


_VARYING = ["chosen_stride_b", "chosen_stride_h", "length_stride_b", "length_stride_h", "count_stride"]
_VARYING += ["table_stride", "batches", "num_kv_heads", "parts", "number", "keys", "blocks", "room"]
"""Arguments that change from step to step or from batch to batch, so that the kernel is not specialised on them."""


@triton.jit(do_not_specialize=_VARYING)
def _attend_decode(
    q_ptr, k_ptr, v_ptr, chosen_ptr, head_ptr, length_ptr, count_ptr, count_stride, whole_ptr, table_ptr, table_stride,
    out_ptr, lse_ptr, used_ptr,
    kept,
    q_strides, kv_strides, chosen_stride_b, chosen_stride_h, chosen_stride_l, length_stride_b, length_stride_h,
    batches, num_kv_heads, group, parts, number, keys, padded, blocks, room, scale, steps,
    INDEXED: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, CODED: tl.constexpr,
    SOFTCAP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Attention of a decode step over one split of a row's keys.

    A program owns up to ``BLOCK_M`` heads of a set in one row, and one split of their keys. A set is ``group`` heads
    that read the same keys: a GQA group, or fewer heads where query heads choose for themselves. The program writes its
    rows of ``out [splits * B, Hq, Dv]`` and ``lse [splits * B, Hq]``, contiguous and natural.

    It walks its blocks of keys once, in ascending order, with an online softmax in fp32. It reads indices and block
    table one and two blocks ahead of the keys. Nothing is added atomically, so repeats are equal bit for bit. ``scale``
    includes log2(e), so logits are to the base 2.

    - ``chosen``: with ``INDEXED`` the slots of the keys, -1 for none; otherwise a mask, not 0 at the slots to read;
      None: all keys are read.
    - ``head``: the head whose entries of ``chosen`` each KV head reads; None: its own.
    - ``length``: how many keys, or places of ``chosen``, a row has.
    - ``whole [B]``: a row where it is not 0 reads its first ``whole`` keys and ignores ``chosen``.
    - ``kept``: the logits, largest logits and log-sum-exps of :class:`Kept`, which the program writes, too; None: it
      keeps none.
    - ``used``: where it is not None, rows differ in their number of keys or places. A row uses the first splits
      that its number needs and writes the count to ``used [B, num_kv_heads]``. The other splits write only -inf to the
      kept log-sum-exps.
    - ``PAGE_SIZE``: where it is not 0, ``chosen`` holds pages of ``PAGE_SIZE`` keys, and ``number`` counts the keys of
      all its places. ``count``, unless it is None, says how many of the first pages are read; ``length`` and ``keys``
      say how many keys the row has.
    - ``HEADS`` is ``(SHARED, QUERIES)``. ``num_kv_heads`` counts the sets of a row, and ``SHARED`` sets read the keys
      of one KV head. Each head has ``QUERIES`` newest tokens, and each token reads the keys up to its own.
    - ``TILE``: see :meth:`Tile.shape`.
    - Values of int16 are values in e4m3, two dimensions in each.

    Shapes: M = BLOCK_M heads, N = BLOCK_N keys, D = BLOCK_D dimensions of keys, DV = BLOCK_DV dimensions of values, W =
    WIDE elements of a value in memory, which is DV, or DV / 2 where each element holds two dimensions.
    """
    # 1. Unpack the constants and strides, and find the row, heads and split that the program owns.
    SHARED: tl.constexpr = HEADS[0]
    QUERIES: tl.constexpr = HEADS[1]
    DIM: tl.constexpr = TILE[0]
    VALUE_DIM: tl.constexpr = TILE[1]
    BLOCK_D: tl.constexpr = TILE[2]
    BLOCK_DV: tl.constexpr = TILE[3]
    BLOCK_M: tl.constexpr = TILE[4]
    BLOCK_N: tl.constexpr = TILE[5]
    q_stride_b, q_stride_h, q_stride_d = q_strides
    k_stride_b, k_stride_h, k_stride_l, k_stride_d, v_stride_b, v_stride_h, v_stride_l, v_stride_d = kv_strides
    if kept is not None:
        logit_ptr, top_ptr, kept_lse_ptr = kept
    row, part, split = tl.program_id(0) // parts, tl.program_id(0) % parts, tl.program_id(1)
    batch, head = (row // num_kv_heads).to(tl.int64), (row % num_kv_heads).to(tl.int64)
    member = part * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]
    exist = member < group  # [M]
    heads = head * group + tl.where(exist, member, 0)  # [M]
    kv_head = head // SHARED if SHARED > 1 else head
    kept_rows = batch * num_kv_heads * group + heads  # [M]
    PAIRED: tl.constexpr = v_ptr.dtype.element_ty == tl.int16
    WIDE: tl.constexpr = BLOCK_DV // 2 if PAIRED else BLOCK_DV
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, WIDE)  # [D], [W]

    # 2. Find how many keys or places the row has.
    if length_ptr is not None:
        length = tl.load(length_ptr + batch * length_stride_b + kv_head * length_stride_h)
        if PAGE_SIZE:
            keys = tl.minimum(keys, length.to(tl.int32))
        else:
            number = tl.minimum(number, length.to(tl.int32))
    if count_ptr is not None:
        number = tl.minimum(number, tl.load(count_ptr + batch * count_stride).to(tl.int32) * PAGE_SIZE)
    first = None
    if whole_ptr is not None:
        first = tl.load(whole_ptr + batch).to(tl.int32)
        number = tl.where(first == 0, number, first)
    # 3. Find the blocks of the split; a split that the row does not use ends here.
    here = tl.cdiv(number, BLOCK_N)
    each = tl.cdiv(here, tl.num_programs(1))
    if used_ptr is not None:
        used, each = split_of_row(here, tl.num_programs(0), tl.num_programs(1), room)
        tl.store(used_ptr + row, used, mask=part + split == 0)
        if kept is not None:
            none = tl.full([BLOCK_M], float("-inf"), tl.float32)  # [M]
            tl.store(kept_lse_ptr + kept_rows * tl.num_programs(1) + split, none, mask=exist & (split >= used))
        if (split >= used) & (BLOCK_M < 64):  # with more heads, programs that go on would pay for it with registers
            return
        exist = exist & (split < used)  # [M]
    begin, end = split * each, tl.minimum((split + 1) * each, here)

    # 4. Load the queries, and move the pointers to the row and the KV head.
    q_tile = batch * q_stride_b + heads[:, None] * q_stride_h + dims[None, :] * q_stride_d  # [M, D]
    q = tl.load(q_ptr + q_tile, mask=exist[:, None] & (dims < DIM)[None, :], other=0.0)  # [M, D]
    q, scale = queries_for(k_ptr, q, scale)  # [M, D], scalar or [M, 1]
    if BLOCK_SIZE:
        table_ptr += batch * table_stride
        k_ptr += kv_head * k_stride_h
        v_ptr += kv_head * v_stride_h
    else:
        k_ptr += batch * k_stride_b + kv_head * k_stride_h
        v_ptr += batch * v_stride_b + kv_head * v_stride_h
    if chosen_ptr is not None:
        of_head = head if head_ptr is None else tl.load(head_ptr + head)
        chosen_ptr += batch * chosen_stride_b + of_head * chosen_stride_h

    # 5. Start the online softmax, and look up the slots of the first one or two blocks.
    top = tl.full([BLOCK_M], LOWEST, tl.float32)  # [M]
    weight = tl.zeros([BLOCK_M], tl.float32)  # [M]
    out = tl.zeros([BLOCK_M, WIDE], tl.float32)  # [M, W]
    if PAIRED:
        odd_out = out
    places, behind = tl.arange(0, BLOCK_N), QUERIES - 1 - member % QUERIES  # [N], [M]
    LISTED: tl.constexpr = chosen_ptr is not None
    following, later = places, places  # [N], [N]
    if LISTED or BLOCK_SIZE:  # looked up one block ahead, so that the compiler can pipeline the loads of keys
        place = begin * BLOCK_N + places  # [N]
        following = slots_at(chosen_ptr, chosen_stride_l, place, number, keys, first, INDEXED, PAGE_SIZE)  # [N]
    if BLOCK_SIZE:
        following = located(table_ptr, following, BLOCK_SIZE)  # [N]
        if LISTED:  # slots are looked up two blocks ahead, since reading the table one block ahead needs them
            place += BLOCK_N
            later = slots_at(chosen_ptr, chosen_stride_l, place, number, keys, first, INDEXED, PAGE_SIZE)  # [N]
    # 6. Read the blocks of keys.
    for block in tl.range(begin, end):
        # 6a. Take the slots of this block, and look up the slots of the next blocks.
        place = block * BLOCK_N + places  # [N]
        slots, stored = place, place < number  # [N], [N]
        if LISTED or BLOCK_SIZE:
            slots, stored = following, following >= 0  # [N], [N]
            following = later
            if not (LISTED and BLOCK_SIZE):
                ahead = place + BLOCK_N  # [N]
                following = slots_at(chosen_ptr, chosen_stride_l, ahead, number, keys, first, INDEXED, PAGE_SIZE)  # [N]
            if BLOCK_SIZE:
                following = located(table_ptr, following, BLOCK_SIZE)  # [N]
                if LISTED:
                    ahead = place + 2 * BLOCK_N  # [N]
                    later = slots_at(chosen_ptr, chosen_stride_l, ahead, number, keys, first, INDEXED, PAGE_SIZE)  # [N]
        # 6b. Load the keys and compute the logits.
        k_mask, v_mask = stored[:, None], stored[:, None]  # [N, 1], [N, 1]
        if BLOCK_D > DIM:
            k_mask = k_mask & (dims < DIM)[None, :]  # [N, D]
        if BLOCK_DV > VALUE_DIM:
            v_mask = v_mask & (value_dims < (VALUE_DIM // 2 if PAIRED else VALUE_DIM))[None, :]  # [N, W]
        k_tile = offsets(slots, k_stride_b, k_stride_l, BLOCK_SIZE)[:, None] + dims[None, :] * k_stride_d  # [N, D]
        k = tl.load(k_ptr + k_tile, mask=k_mask, other=0.0).to(q.dtype)  # [N, D]
        logits = capped(tl.dot(q, tl.trans(k), input_precision="ieee") * scale, SOFTCAP)  # [M, N]
        seen = stored[None, :]  # [1, N]
        if QUERIES > 1:
            seen = seen & (place[None, :] < number - behind[:, None])  # [M, N]
        logits = tl.where(seen, logits, float("-inf"))  # [M, N]
        if kept is not None:
            largest = tl.maximum(tl.max(logits, 1), LOWEST)  # [M]
            keep(logits, largest, logit_ptr, top_ptr, kept_rows, exist, block, place, padded, blocks, steps, CODED)
        # 6c. Rescale the running softmax, load the values and add them.
        top, p, fade = exponentials(logits, top)  # [M], [M, N], [M]
        # [N, W]
        v_tile = offsets(slots, v_stride_b, v_stride_l, BLOCK_SIZE)[:, None] + value_dims[None, :] * v_stride_d
        v = tl.load(v_ptr + v_tile, mask=v_mask, other=0 if PAIRED else 0.0)  # [N, W]
        if PAIRED:
            # a product for the upper bytes, the odd dimensions; the lower bytes, the even ones, follow below
            odd_out = tl.dot(p.to(tl.float16), lower(v >> 8), odd_out * fade[:, None])  # [M, W]
            v = lower(v)
        weight, out = accumulate(p, v if PAIRED else v.to(q.dtype), fade, weight, out)  # [M], [M, W]

    # 7. Interleave the even and the odd dimensions of values, normalise and store.
    if PAIRED:
        out = tl.reshape(tl.join(out, odd_out), [BLOCK_M, BLOCK_DV])  # [M, DV]
        value_dims = tl.arange(0, BLOCK_DV)  # [DV]
    out, lse = normalised(weight, out), log_sum_exp(top, weight)  # [M, DV], [M]
    if kept is not None:
        tl.store(kept_lse_ptr + kept_rows * tl.num_programs(1) + split, lse, mask=exist)
    rows = (split * batches + batch) * num_kv_heads * group + heads  # [M]
    out_mask = exist[:, None] & (value_dims < VALUE_DIM)[None, :]  # [M, DV]
    out_tile = rows[:, None] * VALUE_DIM + value_dims[None, :]  # [M, DV]
    tl.store(out_ptr + out_tile, out.to(out_ptr.dtype.element_ty), mask=out_mask)
    tl.store(lse_ptr + rows, lse / LOG2E, mask=exist)
