"""Softmax attention over all keys, chosen keys or chosen pages, with log-sum-exp."""

from typing import Any

import torch
from torch import Tensor

from foveate.ops._math import capped, first_keys, fold_group, matmul_fp32, on_host, unfold_group
from foveate.ops.attend.attended import Attended, rows_of_heads
from foveate.ops.attend.gather import gather_fields, membership_mask, page_slots
from foveate.ops.attend.sdpa import scaled_dot_product
from foveate.ops.checks import (
    check_counts,
    check_mask,
    check_number,
    check_out,
    check_places,
)
from foveate.ops.kv import KV
from foveate.ops.logits import Logits


def attend(
    q: Tensor,
    kv: KV,
    *,
    logits: Logits,
    mask: Tensor | None = None,
    need_lse: bool = False,
    need_mass: bool = False,
    out: Tensor | None = None,
) -> Attended:
    """Attention of every query over all keys that the mask and the lengths allow.

    Args:
        q: ``[B, Hq, Lq, D]``.
        kv: ``k [B, Hkv, Lk, D]`` and ``v [B, Hkv, Lk, Dv]``, in one piece or in blocks, see :class:`~foveate.ops.KV`.
        logits: how logits are made, see :class:`~foveate.ops.Logits`.
        mask: bool, broadcastable to ``[B, Hkv, Lq, Lk]``; True where a query may read a key. A masked key may hold
            anything finite.
        need_lse, need_mass: whether to return the log-sum-exp and the pooled mass. Without both, and without sinks or a
            cap, the fastest library kernel runs.
        out: contiguous ``[B, Hq, Lq, Dv]``, to which the output is written; None: new memory.

    Raises:
        ValueError: for queries that do not fit the keys, a KV without values, a mask that is not of bools, sinks of
            other heads, or a cap that is not a finite number above 0. On the CPU also for a block table that names no
            block for a key that is read. A GPU does not wait for this check, and its result is then undefined.
    """
    (k, v), lengths = kv.in_one_piece(q), kv.lengths
    num_heads, length = q.shape[1:3]
    rows = fold_group(q, k.shape[1])
    if lengths is not None:
        there = first_keys(lengths, k.shape[2])[:, :, None]
        mask = there if mask is None else mask & there
    if mask is not None:
        mask = mask.expand(*mask.shape[:2], length, mask.shape[3])
        mask = mask.repeat(1, 1, rows.shape[2] // length, 1) if length > 1 else mask
    if not (need_lse or need_mass or logits.sinks is not None or logits.softcap is not None):
        return Attended(unfold_group(scaled_dot_product(rows, k, v, logits.scaling, mask=mask), num_heads)).into(out)
    scores = capped(matmul_fp32(rows, k.transpose(-1, -2)).mul_(logits.scaling), logits.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    blind = mask is not None or not k.shape[2]  # a row may see nothing
    top = scores.amax(-1, keepdim=True) if k.shape[2] else scores.new_full((*scores.shape[:-1], 1), float("-inf"))
    top = top.masked_fill(top.isneginf(), 0.0) if blind else top
    if logits.sinks is not None:
        sinks = rows_of_heads(logits.sinks, k.shape[1], length)
        top = top.maximum(sinks)
    weights = (scores - top).exp_()
    total = weights.sum(-1, keepdim=True)
    if logits.sinks is not None:
        total = total + (sinks - top).exp()
    weights = weights / (total.clamp_min(torch.finfo(torch.float32).tiny) if blind else total)
    attended = (weights.to(v.dtype) @ v).to(q.dtype)
    lse = (total.log() + top).squeeze(-1) if need_lse else None
    return Attended(
        unfold_group(attended, num_heads),
        unfold_group(lse, num_heads) if need_lse else None,
        weights.sum(2) if need_mass else None,
    ).into(out)


def attend_indices(
    q: Tensor,
    kv: KV,
    indices: Tensor,
    *,
    logits: Logits,
    counts: Tensor | None = None,
    heads: Tensor | None = None,
    whole: Tensor | None = None,
    need_lse: bool = False,
    need_mass: bool = False,
    out: Tensor | None = None,
) -> Attended:
    """Attention over gathered keys: only the selected keys are read.

    Args:
        kv: see :func:`attend`. Its lengths are ignored; the indices must name keys within them.
        indices: int ``[B, Hkv, K]`` into the keys; -1 marks an unused place.
        counts: int ``[B]`` or ``[B, Hkv]``: number of places of a row that are used; later places are ignored. None:
            all places are used.
        heads: int64 ``[Hkv]``: the head of ``indices`` whose keys each KV head reads; None: its own.
        whole: int ``[B]``: a row with a number above 0 reads that many of its first keys instead of the selected keys.
            None: every row reads its selected keys. It excludes ``need_mass``.
        logits, out: see :func:`attend`.

    Returns:
        With ``need_mass``, ``mass [B, Hkv, K]`` belongs to the places of ``indices``.

    Raises:
        ValueError: as :func:`attend`; for indices of other shapes or not of integers; and on the CPU for an index
            outside the keys.
    """
    k, v = kv.in_one_piece(q)
    indices = indices if heads is None else indices.index_select(1, heads)
    used = indices >= 0
    if counts is not None:
        used &= first_keys(counts, indices.shape[2])
    keys, values = gather_fields([k, v], indices)
    found = _attend_gathered(q, keys, values, used, logits=logits, need_lse=need_lse, need_mass=need_mass)
    return _or_whole(found, q, k, v, whole, logits).into(out)


def attend_pages(
    q: Tensor,
    kv: KV,
    pages: Tensor,
    page_size: int,
    *,
    logits: Logits,
    counts: Tensor | None = None,
    whole: Tensor | None = None,
    need_lse: bool = False,
    out: Tensor | None = None,
) -> Attended:
    """Attention over pages: page p is the keys ``p * page_size .. (p + 1) * page_size - 1`` that exist.

    Args:
        kv: see :func:`attend`. Pages need not have the size of blocks. Keys outside the given pages, and keys beyond a
            row's length, may hold anything.
        pages: int ``[B, H, P]``, where H counts the KV heads or the query heads. With query heads each one reads its
            own pages. -1 marks an unused place. A row has no page twice.
        counts: int ``[B]``: number of places of a row that are used; later places are ignored. None: all places are
            used.
        whole: see :func:`attend_indices`.
        logits, out: see :func:`attend`.

    Raises:
        ValueError: as :func:`attend`; for a page size below 1, or pages with another number of heads or not of
            integers; and on the CPU for a page that does not exist.
    """
    (k, v), lengths = kv.in_one_piece(q), kv.lengths
    num_kv_heads, number = k.shape[1:3]
    shared = pages.shape[1] // num_kv_heads
    ends = number
    if lengths is not None:
        ends = lengths.clamp_max(number)[..., None]
        ends = ends[:, None] if lengths.dim() == 1 else ends.repeat_interleave(shared, 1)
    if counts is not None:
        pages = pages.masked_fill(~first_keys(counts, pages.shape[2]), -1)
    slots = page_slots(pages, page_size).flatten(2)
    slots = slots.masked_fill(slots >= ends, -1)
    fields = gather_fields([k, v], slots.unflatten(1, (num_kv_heads, shared)).flatten(2))
    keys, values = (x.unflatten(2, (shared, slots.shape[2])).flatten(1, 2) for x in fields)
    found = _attend_gathered(q, keys, values, slots >= 0, logits=logits, need_lse=need_lse)
    return _or_whole(found, q, k, v, whole, logits).into(out)


def check_attend(q, kv, *, logits, mask=None, out=None, **_):
    """Raise ValueError for invalid arguments of :func:`attend`."""
    kv.check_queries(q, values=True)
    lengths, number = kv.lengths, kv.num_keys
    check_mask(mask, (len(q), kv.k.shape[1], q.shape[2], number))
    logits.check_heads(q)
    check_out(out, q, kv.v)

    def read() -> Tensor:
        there = torch.ones(1, 1, number, dtype=torch.bool) if lengths is None else first_keys(lengths, number)
        return there if mask is None else there & mask.any(2)

    if kv.block_table is not None:
        kv.check_blocks(read)


def check_indices(q, kv, indices, *, logits, counts=None, heads=None, whole=None, need_mass=False, out=None, **_):
    """Raise ValueError for invalid arguments of :func:`attend_indices`."""
    kv.check_queries(q, values=True)
    kv_heads, number = kv.k.shape[1], kv.num_keys
    check_places("indices", indices, len(q), (kv_heads,), number)
    check_counts(counts, len(q), kv_heads)
    _check_whole(whole, len(q), number, need_mass)
    logits.check_heads(q)
    check_out(out, q, kv.v)
    if heads is not None and heads.shape != (kv_heads,):
        raise ValueError(f"heads must be [{kv_heads}], not {list(heads.shape)}")
    if kv.block_table is not None:
        kv.check_blocks(lambda: membership_mask(indices, number))


def check_pages(q, kv, pages, page_size, *, logits, counts=None, whole=None, out=None, **_):
    """Raise ValueError for invalid arguments of :func:`attend_pages`."""
    kv.check_queries(q, values=True)
    kv_heads, number, lengths = kv.k.shape[1], kv.num_keys, kv.lengths
    _check_whole(whole, len(q), number)
    check_number("page_size", page_size, 1)
    check_places("pages", pages, len(q), (kv_heads, q.shape[1]), -(-number // page_size))
    check_counts(counts, len(q))
    logits.check_heads(q)
    check_out(out, q, kv.v)

    def read() -> Tensor:
        there = membership_mask(page_slots(pages, page_size).flatten(2), number)
        if lengths is None:
            return there
        ends = lengths if lengths.dim() == 1 else lengths.repeat_interleave(pages.shape[1] // kv_heads, 1)
        return there & first_keys(ends, number)

    if kv.block_table is not None:
        kv.check_blocks(read)


def _check_whole(whole: Tensor | None, batch: int, number: int, need_mass: bool = False) -> None:
    if whole is None:
        return
    if need_mass:
        raise ValueError("rows that read their first keys have no mass of the selected ones")
    check_counts(whole, batch, name="whole")
    if on_host(whole) and whole.numel() and not 0 <= int(whole.min()) <= int(whole.max()) <= number:
        raise ValueError(f"whole must be 0 to {number}, the keys that are there, not {whole.tolist()}")


def _or_whole(found: Attended, q: Tensor, k: Tensor, v: Tensor, whole: Tensor | None, logits: Logits) -> Attended:
    """``found``, in which rows with ``whole`` above 0 have the attention over that many of their first keys instead."""
    if whole is None:
        return found
    rows = (whole > 0)[:, None, None]
    every = attend(q, KV(k, v, lengths=whole), logits=logits, need_lse=found.lse is not None)
    lse = None if found.lse is None else every.lse.where(rows, found.lse)
    return Attended(every.out.where(rows[..., None], found.out), lse)


def _attend_gathered(q: Tensor, k: Tensor, v: Tensor, used: Tensor, **how: Any) -> Attended:
    """Attention over gathered keys; the content of unused places, NaN included, has no influence."""
    unused = ~used[..., None]
    k, v = k.masked_fill(unused, 0), v.masked_fill(unused, 0)
    return attend(q, KV(k, v), mask=used[:, :, None], **how)
