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
"""Steps of a factor of two. A 16-bit logit is its distance from the largest of its block, in steps: :func:`steps`."""
_NOTHING = tl.constexpr(65535)
"""The largest distance, in steps. A logit at this distance counts as -inf; if logits themselves are pooled, it is the
floor of its block."""

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
        """The same logits, with the logits of sinks ``[Hq]`` as one more part of each head's log-sum-exp."""
        if sinks is None:
            return self
        sinks = (sinks.float() * LOG2E.value)[None, :, None].expand(len(self.lses), -1, 1)
        return self._replace(lses=torch.cat([self.lses, sinks], -1))


def room_for(q: Tensor, number: int, blocks: int, splits: int, block: int) -> Kept:
    """Room for the logits of ``number`` keys, padded so that rows are aligned and move in vectors."""
    (batch, num_heads), padded, coded = q.shape[:2], cdiv(number, 16) * 16, q.dtype != torch.float32
    return Kept(
        torch.empty(batch, num_heads, padded, dtype=torch.int16 if coded else torch.float32, device=q.device),
        torch.empty(batch, num_heads, blocks if coded else 0, dtype=torch.float32, device=q.device),
        torch.empty(batch, num_heads, splits, dtype=torch.float32, device=q.device),
        block,
    )


def steps(pooling: str) -> float:
    """The number of steps of a 16-bit logit in a factor of two, which is a difference of 1 to the base 2."""
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

    A key that does not exist has -inf. After the first place behind a row's keys the result may be anything, so that a
    short row costs no work for longer ones. ``pooling=sum`` sums over the heads, and a key that does not exist has 0;
    ``of_largest`` is the mean of each head's exponentials over its largest, which the parts hold in place of sums.

    Args:
        chosen: a mask of the keys, int8 ``[B, Hkv, N]``; or pages ``[B, Hkv, P]``, which all heads of a set share.
        page_size: keys of a page; 0: ``chosen`` is a mask.
        keys: how many keys exist; pages end there.
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
    """Writes a block of ``logits [M, N]`` to the tensors of :class:`Kept`; ``largest [M]`` holds its largest logits.

    ``rows [M]`` numbers the heads of the batch, which exist where ``exist [M]``; ``place [N]`` numbers the keys.
    """
    if CODED:
        below = tl.minimum((largest[:, None] - logits) * steps + 0.5, _NOTHING)  # [M, N]
        logits = (below.to(tl.int32) - 32768).to(tl.int16)  # [M, N]
        tl.store(top_ptr + rows * blocks + block, largest, mask=exist)
    moved = exist[:, None] & (place < padded)[None, :]  # [M, N]
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
    """Pools kept logits, which are to the base 2: writes ``score [B, sets, padded]``, contiguous, over the ``members``
    query heads of each set.

    A program owns one set in one row of the batch and every n-th block of ``KEYS`` keys, where n programs share the
    row. It reads its blocks in ascending order up to the place after the row's last key (``BOUNDED``), or up to the
    last of the row's ``count`` pages, and in each block the heads in ascending order, ``MEMBERS`` at a time.

    ``chosen`` is a mask of keys (``MASKED``), or, with ``PAGE_SIZE`` not 0, lists pages of ``PAGE_SIZE`` keys, the same
    for all members; a key of a page exists below ``keys`` and below ``length`` (``BOUNDED``). With ``LOGIT`` the score
    is the largest logit, to the base e, and log-sum-exps play no part. With ``LARGEST`` the parts hold their largest
    logits in place of log-sum-exps.

    Shapes: K = KEYS keys, M = MEMBERS heads, S = SPLITS parts of a log-sum-exp, H = KV_HEADS.
    """
    # 1. Find where the keys of the row end.
    row = tl.program_id(1).to(tl.int64)
    batch, first = row // sets, row % sets * members
    some, end, longest = tl.arange(0, SPLITS), number, number  # [S], scalars
    if count_ptr is not None:
        end = tl.minimum(end, tl.load(count_ptr + batch * count_stride).to(tl.int32) * PAGE_SIZE)
    elif BOUNDED and not PAGE_SIZE and not SUM:
        of_head, heads = first // group + tl.arange(0, KV_HEADS), tl.arange(0, KV_HEADS) < members // group  # [H], [H]
        length_at = length_ptr + batch * length_stride_b + of_head * length_stride_h  # [H]
        longest = tl.max(tl.load(length_at, mask=heads, other=0), 0).to(tl.int32)
        end = tl.minimum(end, longest + 1)

    # 2. Walk over the program's blocks of keys.
    for begin in tl.range(tl.program_id(0) * KEYS, end, tl.num_programs(0) * KEYS):
        place = begin + tl.arange(0, KEYS)  # [K]
        exist = place < number  # [K]
        score = tl.full([KEYS], float("-inf") if LOGIT else 0.0, tl.float32)  # [K]
        # A key is lost if it does not exist for one of the heads.
        lost, key = place >= longest, place  # [K], [K]
        if PAGE_SIZE:
            page_ptr = chosen_ptr + batch * chosen_stride_b + first // group * chosen_stride_h
            page = tl.load(page_ptr + place // PAGE_SIZE * chosen_stride_l, mask=exist, other=-1).to(tl.int32)  # [K]
            key = page * PAGE_SIZE + place % PAGE_SIZE  # [K]
            lost = (page < 0) | (key >= keys)  # [K]
        # 3. Walk over the heads of the set.
        for few in tl.range(0, tl.where(begin < longest, members, 0), MEMBERS):
            member = few + tl.arange(0, MEMBERS)  # [M]
            real = member < members  # [M]
            head, kv_head = batch * sets * members + first + member, (first + member) // group  # [M], [M]
            parts = real[:, None] & (some < splits)[None, :]  # [M, S]
            lse = tl.load(lse_ptr + head[:, None] * splits + some[None, :], mask=parts, other=float("-inf"))  # [M, S]
            # LOWEST instead of -inf: for a head without keys ``logit - lse`` would be NaN.
            top = tl.maximum(tl.max(lse, 1), LOWEST)  # [M]
            lse = top if LARGEST else tl.maximum(top + tl.log2(tl.sum(tl.exp2(lse - top[:, None]), 1)), LOWEST)  # [M]
            there = real[:, None] & (place < padded)[None, :]  # [M, K]
            if BOUNDED:
                lengths = length_ptr + batch * length_stride_b + kv_head * length_stride_h  # [M]
                length = tl.load(lengths, mask=real, other=0).to(tl.int32)  # [M]
                beyond = real[:, None] & (key[None, :] >= length[:, None])  # [M, K]
                lost = lost | (tl.max(beyond.to(tl.int32), 0) > 0)  # [K]
                # logits beyond the length are not read, except in the run of 16 that holds the last one
                if not PAGE_SIZE:
                    there = there & (place[None, :] < (tl.cdiv(length, 16) * 16)[:, None])  # [M, K]
            logit = tl.load(logit_ptr + head[:, None] * padded + place[None, :], mask=there, other=0)  # [M, K]
            if CODED:
                block = place // BLOCK_N  # [K]
                tops = real[:, None] & (block < blocks)[None, :]  # [M, K]
                largest = tl.load(top_ptr + head[:, None] * blocks + block[None, :], mask=tops, other=0.0)  # [M, K]
                below = logit.to(tl.int32) + 32768  # [M, K]
                logit = largest - below.to(tl.float32) * step  # [M, K]
                if not LOGIT:
                    logit = tl.where(below == _NOTHING, float("-inf"), logit)  # [M, K]
            mass = logit * _LN2 if LOGIT else tl.exp2((logit - lse[:, None]) * power)  # [M, K]
            mass = tl.where(real[:, None], mass, float("-inf") if LOGIT else 0.0)  # [M, K]
            score = tl.maximum(score, tl.max(mass, 0)) if MAX or LOGIT else score + tl.sum(mass, 0)  # [K]
            if MASKED:
                at = batch * chosen_stride_b + kv_head * chosen_stride_h  # [M]
                at = at[:, None] + place.to(tl.int64)[None, :] * chosen_stride_l  # [M, K]
                masked = tl.load(chosen_ptr + at, mask=real[:, None] & exist[None, :], other=1) == 0  # [M, K]
                lost = lost | (tl.max(masked.to(tl.int32), 0) > 0) | (place >= number)  # [K]
        # 4. Write the scores of the block.
        score = score if MAX or LOGIT or SUM else score / members  # [K]
        if MASKED or BOUNDED or PAGE_SIZE:
            score = tl.where(lost, 0.0 if SUM else float("-inf"), score)  # [K]
        tl.store(score_ptr + row * padded + place, score, mask=place < padded)
