"""Logits of one query a row that are kept to be pooled: how they are stored, and the Triton kernel that pools them."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.ops.gpu.softmax import LOG2E, LOWEST
from foveate.ops.gpu.tiles import cdiv, multiprocessors, next_power_of_2

_LN2 = tl.constexpr(0.6931471805599453)
_STEPS = 2048.0
"""A 16-bit logit is its distance from the largest of its block, in steps. So many steps halve what is pooled."""
_NOTHING = tl.constexpr(65535)
"""That many steps and more are nothing; of logits pooled as such, the floor of their block."""

_POOLED = 256
"""Keys that a program pools at once."""
_MEMBERS = 8
"""Query heads that it pools together."""
_RESIDENT = 16
"""Programs that pool for each multiprocessor, at most."""
VARYING = ["chosen_stride_b", "chosen_stride_h", "length_stride_b", "length_stride_h", "count_stride"]
VARYING += ["number", "keys", "blocks", "splits"]
"""What changes from step to step, or from batch to batch: no reason to compile anew."""


class Kept(NamedTuple):
    """Logits of one query a row, to the base 2; all contiguous."""

    logits: Tensor
    """``[B, Hq, padded]``: fp32, or int16, the steps below the largest of its block, minus 2^15."""
    tops: Tensor
    """fp32 ``[B, Hq, blocks]``: the largest of each block; of fp32 logits ``[B, Hq, 0]``."""
    lses: Tensor
    """fp32 ``[B, Hq, splits]``: the log-sum-exp of each part, or the largest logit, see :func:`pooled`."""
    block: int
    """Keys of a block."""

    @property
    def coded(self) -> bool:
        return self.logits.dtype == torch.int16

    def beside(self, sinks: Tensor | None) -> "Kept":
        """The same logits with those of sinks, ``[Hq]``, as one more part of each head's log-sum-exp."""
        if sinks is None:
            return self
        sinks = (sinks.float() * LOG2E.value)[None, :, None].expand(len(self.lses), -1, 1)
        return self._replace(lses=torch.cat([self.lses, sinks], -1))


def room_for(q: Tensor, number: int, blocks: int, splits: int, block: int) -> Kept:
    """Room for the logits of ``number`` keys, padded so that many are moved at a time."""
    (batch, num_heads), padded, coded = q.shape[:2], cdiv(number, 16) * 16, q.dtype != torch.float32
    return Kept(
        torch.empty(batch, num_heads, padded, dtype=torch.int16 if coded else torch.float32, device=q.device),
        torch.empty(batch, num_heads, blocks if coded else 0, dtype=torch.float32, device=q.device),
        torch.empty(batch, num_heads, splits, dtype=torch.float32, device=q.device),
        block,
    )


def steps(pooling: str) -> float:
    """In how many steps of a logit's 16 bits what is pooled doubles."""
    return _STEPS * {"sqrt": 0.5, "max_logit": 0.25}.get(pooling, 1.0)


def pooled(
    kept: Kept,
    num_kv_heads: int,
    number: int,
    chosen: Tensor | None,
    lengths: Tensor | None,
    pooling: str,
    pool: str,
    page_size: int = 0,
    keys: int | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Attention from logits that were kept, pooled; ``lengths [B, Hkv]``.

    Of keys that are not there it is -inf; but what is after the first of these in a row may be anything, so that no
    work depends on rows that are longer. ``pooling=sum``: the sum over the heads, which is 0 of all these;
    ``of_largest``: the mean of each head's exponentials over its largest, which the parts have in place of their sums.

    Args:
        chosen: a mask of the keys, int8 ``[B, Hkv, N]``; or pages ``[B, Hkv, P]``, which all heads of a set share.
        page_size: keys of a page; 0: ``chosen`` is a mask.
        keys: how many keys there are to have pages of.
        counts: int ``[B]``: pages of each row, its first ones; None: all.
    """
    batch, num_heads, padded = kept.logits.shape
    sets, splits = 1 if pool == "layer" else num_kv_heads, kept.lses.shape[2]
    scores = torch.empty(batch, sets, padded, dtype=torch.float32, device=kept.logits.device)
    if scores.numel():
        programs = max(1, _RESIDENT * multiprocessors(scores.device) // (batch * sets))
        _pool_logits[min(cdiv(number, _POOLED), programs), batch * sets](
            chosen, lengths, *counted(counts), *kept[:3], scores,
            *((0, 0, 0) if chosen is None else chosen.stride()), *((0, 0) if lengths is None else lengths.stride()),
            sets, num_heads // sets, num_heads // num_kv_heads, number, keys, padded, kept.tops.shape[2], splits,
            0.5 if pooling == "sqrt" else 1.0, 1 / steps(pooling),
            CODED=kept.coded, MASKED=chosen is not None and not page_size, BOUNDED=lengths is not None,
            PAGE_SIZE=page_size, MAX=pooling == "max", LOGIT=pooling == "max_logit", SUM=pooling == "sum",
            LARGEST=pooling == "of_largest", KEYS=_POOLED, MEMBERS=min(_MEMBERS, next_power_of_2(num_heads // sets)),
            BLOCK_N=kept.block, SPLITS=next_power_of_2(splits), KV_HEADS=next_power_of_2(num_kv_heads // sets),
            num_warps=4,
        )  # fmt: skip
    return scores[..., :number]


def per_head(lengths: Tensor, num_kv_heads: int) -> Tensor:
    """Lengths ``[B]`` or ``[B, Hkv]`` as ``[B, Hkv]``, a view."""
    return lengths[:, None].expand(-1, num_kv_heads) if lengths.dim() == 1 else lengths


def counted(counts: Tensor | None) -> tuple[Tensor | None, int | None]:
    """A kernel's ``count_ptr`` and ``count_stride``; None without counts ``[B]``."""
    return (None, None) if counts is None else (counts, counts.stride(0))


@triton.jit
def keep(logits, largest, logit_ptr, top_ptr, rows, exist, block, place, padded, blocks, steps, CODED: tl.constexpr):
    """Writes a block of some heads to what :class:`Kept` holds: ``logits [M, N]`` and ``largest [M]``, the largest."""
    if CODED:
        below = tl.minimum((largest[:, None] - logits) * steps + 0.5, _NOTHING)
        logits = (below.to(tl.int32) - 32768).to(tl.int16)
        tl.store(top_ptr + rows * blocks + block, largest, mask=exist)
    moved = exist[:, None] & (place < padded)[None, :]
    tl.store(logit_ptr + rows[:, None] * padded + place[None, :], logits, mask=moved)


@triton.jit(do_not_specialize=[*VARYING, "sets", "members"])
def _pool_logits(
    chosen_ptr, length_ptr, count_ptr, count_stride, logit_ptr, top_ptr, lse_ptr, score_ptr,
    chosen_stride_b, chosen_stride_h, chosen_stride_l, length_stride_b, length_stride_h,
    sets, members, group, number, keys, padded, blocks, splits, power, step,
    CODED: tl.constexpr, MASKED: tl.constexpr, BOUNDED: tl.constexpr, PAGE_SIZE: tl.constexpr, MAX: tl.constexpr,
    LOGIT: tl.constexpr, SUM: tl.constexpr, LARGEST: tl.constexpr, KEYS: tl.constexpr, MEMBERS: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, KV_HEADS: tl.constexpr,
):  # fmt: skip
    """Writes ``score [B, sets, padded]``, contiguous: of the ``members`` query heads of each set.

    ``chosen`` holds what is not 0 at keys that are there (``MASKED``), or (``PAGE_SIZE`` not 0) pages of so many keys,
    the same for all members; keys of pages count below ``keys``, and below ``length`` (``BOUNDED``). ``LOGIT``: the
    largest logit, to the base e, whatever the log-sum-exps. ``LARGEST``: these are the largest logits of each part.

    A program pools every so many-th ``KEYS`` keys, up to that after a row's last one (``BOUNDED``), or to the last of
    its ``count`` pages.
    """
    row = tl.program_id(1).to(tl.int64)
    batch, first = row // sets, row % sets * members
    some, end, longest = tl.arange(0, SPLITS), number, number
    if count_ptr is not None:
        end = tl.minimum(end, tl.load(count_ptr + batch * count_stride).to(tl.int32) * PAGE_SIZE)
    elif BOUNDED and not PAGE_SIZE and not SUM:
        of_head, heads = first // group + tl.arange(0, KV_HEADS), tl.arange(0, KV_HEADS) < members // group
        length_at = length_ptr + batch * length_stride_b + of_head * length_stride_h
        longest = tl.max(tl.load(length_at, mask=heads, other=0), 0).to(tl.int32)
        end = tl.minimum(end, longest + 1)
    for begin in tl.range(tl.program_id(0) * KEYS, end, tl.num_programs(0) * KEYS):
        place = begin + tl.arange(0, KEYS)
        exist = place < number
        score = tl.full([KEYS], float("-inf") if LOGIT else 0.0, tl.float32)
        lost, key = place >= longest, place
        if PAGE_SIZE:
            page_ptr = chosen_ptr + batch * chosen_stride_b + first // group * chosen_stride_h
            page = tl.load(page_ptr + place // PAGE_SIZE * chosen_stride_l, mask=exist, other=-1).to(tl.int32)
            key = page * PAGE_SIZE + place % PAGE_SIZE
            lost = (page < 0) | (key >= keys)
        for few in tl.range(0, tl.where(begin < longest, members, 0), MEMBERS):
            member = few + tl.arange(0, MEMBERS)
            real = member < members
            head, kv_head = batch * sets * members + first + member, (first + member) // group
            parts = real[:, None] & (some < splits)[None, :]
            lse = tl.load(lse_ptr + head[:, None] * splits + some[None, :], mask=parts, other=float("-inf"))
            top = tl.maximum(tl.max(lse, 1), LOWEST)
            lse = top if LARGEST else tl.maximum(top + tl.log2(tl.sum(tl.exp2(lse - top[:, None]), 1)), LOWEST)
            there = real[:, None] & (place < padded)[None, :]
            if BOUNDED:
                lengths = length_ptr + batch * length_stride_b + kv_head * length_stride_h
                length = tl.load(lengths, mask=real, other=0).to(tl.int32)
                beyond = real[:, None] & (key[None, :] >= length[:, None])
                lost = lost | (tl.max(beyond.to(tl.int32), 0) > 0)
                if not PAGE_SIZE:  # logits beyond the length are not read, but for those read with others at once
                    there = there & (place[None, :] < (tl.cdiv(length, 16) * 16)[:, None])
            logit = tl.load(logit_ptr + head[:, None] * padded + place[None, :], mask=there, other=0)
            if CODED:
                block = place // BLOCK_N
                tops = real[:, None] & (block < blocks)[None, :]
                largest = tl.load(top_ptr + head[:, None] * blocks + block[None, :], mask=tops, other=0.0)
                below = logit.to(tl.int32) + 32768
                logit = largest - below.to(tl.float32) * step
                if not LOGIT:
                    logit = tl.where(below == _NOTHING, float("-inf"), logit)
            mass = logit * _LN2 if LOGIT else tl.exp2((logit - lse[:, None]) * power)
            mass = tl.where(real[:, None], mass, float("-inf") if LOGIT else 0.0)
            score = tl.maximum(score, tl.max(mass, 0)) if MAX or LOGIT else score + tl.sum(mass, 0)
            if MASKED:
                at = batch * chosen_stride_b + kv_head * chosen_stride_h
                at = at[:, None] + place.to(tl.int64)[None, :] * chosen_stride_l
                masked = tl.load(chosen_ptr + at, mask=real[:, None] & exist[None, :], other=1) == 0
                lost = lost | (tl.max(masked.to(tl.int32), 0) > 0) | (place >= number)
        score = score if MAX or LOGIT or SUM else score / members
        if MASKED or BOUNDED or PAGE_SIZE:
            score = tl.where(lost, 0.0 if SUM else float("-inf"), score)
        tl.store(score_ptr + row * padded + place, score, mask=place < padded)
