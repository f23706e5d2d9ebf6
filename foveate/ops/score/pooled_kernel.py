"""Pooled attention of one query a row, keys read once: Triton kernels of :func:`pooled_mass`."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.ops._dispatch import UnsupportedError
from foveate.ops.block_table import BlockTable
from foveate.ops.gpu.block_table import arguments, block_size
from foveate.ops.gpu.softcap import capped, constant
from foveate.ops.gpu.tiles import Tile, multiprocessors, split
from foveate.ops.score.fp8 import FP8
from foveate.ops.score.pooled import check

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_LOWEST = tl.constexpr(-3.4e38)
"""Where a running maximum starts: finite, so that a head which has seen nothing yet weighs its past with 1."""
_STEPS = 2048.0
"""Steps of a factor of two, of what is pooled, in which 16 bits say how far a logit is below its block's largest."""
_NOTHING = tl.constexpr(65535)
"""That many steps and more are nothing; of logits pooled as such, the floor of their block."""

_LARGEST = 256
"""The largest head dim."""
_HEADS = 64
"""The most heads of a program."""
_RESIDENT = 3
"""Programs that a multiprocessor runs at a time."""
_POOLED = 1024
"""Keys of a program that pools."""
_FP8_SINCE = (8, 9)
"""Compute capability from which on fp8 is converted by instructions."""
_VARYING = ["mask_stride_b", "mask_stride_h", "length_stride_b", "length_stride_h", "number", "blocks", "splits"]
"""What changes from step to step, or from batch to batch: no reason to compile anew."""


def tile_for(dtype: torch.dtype, dim: int, group: int, capability: int, scaled: bool = False) -> Tile:
    """Heads and keys of a program: blocks of 32 KB on Hopper, of 16 KB elsewhere, two of them under way.

    ``scaled``: keys in fp8 in blocks of half that, with more warps for registers to convert them in.
    """
    heads = min(_HEADS, max(16, triton.next_power_of_2(group)))
    if dtype == torch.float32:  # multiplied without tensor cores
        return Tile(16, 32, num_warps=8 if dim > 128 or scaled else 4, num_stages=1)
    keys = (64 if dim > 128 else 128) // (1 if capability >= 9 else 2)
    return Tile(heads, keys, num_warps=8 if scaled else 4, num_stages=3 if heads < 64 else 2)


def pooled_mass(
    q: Tensor,
    k: Tensor,
    *,
    scaling: float,
    key_scales: Tensor | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    sink_logits: Tensor | None = None,
    softcap: float | None = None,
    pooling: str = "post_softmax",
    pool: str = "kv_head",
    block_table: BlockTable | None = None,
) -> Tensor:
    """See :func:`foveate.ops.score.pooled.pooled_mass`.

    One pass over the keys keeps every head's logits and their log-sum-exp, a second one over the logits pools them. Of
    keys in half precision a logit is kept in 16 bits, in steps of 2^-11 of a factor of two below the largest of its
    block of keys: a mass is right to 2e-4 of itself, and one of less than 2^-32 of the block's largest counts as 0.
    With ``max_logit`` the steps are four times as wide: a logit is right to 7e-4, and one of more than 88 below the
    block's largest counts as 88 below. Of fp32 the logits are kept as they are. Keys in fp8 are converted in registers,
    by GPUs with instructions for it. Keys that the mask or the lengths leave out are not read and may hold anything.
    """
    check(pooling, pool)
    batch, num_heads, length, dim = q.shape
    num_kv_heads, number, rows = k.shape[1], k.shape[2], batch
    if block_table is not None:
        block_table.check(q, k)
        rows = len(k)
    expected = q.dtype if key_scales is None else FP8
    if k.dtype != expected or q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise UnsupportedError(f"queries in {q.dtype} with keys in {k.dtype}")
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (8, 9)
    if key_scales is not None and capability < _FP8_SINCE:
        raise UnsupportedError("keys in fp8 below compute capability {}.{}".format(*_FP8_SINCE))
    if dim > _LARGEST:
        raise UnsupportedError(f"head dims above {_LARGEST}")
    if num_heads % num_kv_heads or length != 1 or k.shape != (rows, num_kv_heads, number, dim):
        raise ValueError(f"shapes do not fit one query a row: q {tuple(q.shape)}, k {tuple(k.shape)}")
    if key_scales is not None and key_scales.shape != (batch, num_kv_heads, dim):
        raise ValueError(f"key_scales {tuple(key_scales.shape)} do not fit k {tuple(k.shape)}")
    group, number = num_heads // num_kv_heads, number if block_table is None else block_table.length
    if not batch * number:
        return pooled(room_for(q, number, 0, 1, 16), num_kv_heads, number, None, None, pooling, pool)
    if mask is not None:
        mask = mask.expand(batch, num_kv_heads, number).view(torch.int8)
    mask_strides = (0, 0, 0) if mask is None else mask.stride()
    lengths = None if lengths is None else per_head(lengths, num_kv_heads)
    length_strides = (0, 0) if lengths is None else lengths.stride()

    tile = tile_for(q.dtype, dim, group, capability[0], key_scales is not None)
    parts, blocks = triton.cdiv(group, tile.block_m), triton.cdiv(number, tile.block_n)
    splits, each = split(batch * num_kv_heads * parts, blocks, _RESIDENT * multiprocessors(q.device))
    kept = room_for(q, number, blocks, splits, tile.block_n)
    _keep_logits[batch * num_kv_heads * parts, splits](
        q,
        k,
        key_scales,
        mask,
        lengths,
        *arguments(block_table),
        *kept[:3],
        *(q.stride(axis) for axis in (0, 1, 3)),
        *k.stride(),
        *((0, 0, 0) if key_scales is None else key_scales.stride()),
        *mask_strides,
        *length_strides,
        num_kv_heads,
        group,
        parts,
        number,
        kept.logits.shape[2],
        blocks,
        splits,
        each,
        scaling * _LOG2E.value,
        steps(pooling),
        CODED=kept.coded,
        SOFTCAP=constant(softcap),
        SCALED=key_scales is not None,
        MASKED=mask is not None,
        BOUNDED=lengths is not None,
        BLOCK_SIZE=block_size(block_table, k),
        DIM=dim,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        **tile.options,
    )
    return pooled(kept.beside(sink_logits), num_kv_heads, number, mask, lengths, pooling, pool)


class Kept(NamedTuple):
    """Logits of one query a row, to the base 2; all contiguous."""

    logits: Tensor
    """``[B, Hq, padded]``: fp32, or int16, the steps below the largest of its block, minus 2^15."""
    tops: Tensor
    """fp32 ``[B, Hq, blocks]``: the largest of each block; of fp32 logits ``[B, Hq, 0]``."""
    lses: Tensor
    """fp32 ``[B, Hq, splits]``: the log-sum-exp of each part."""
    block: int
    """Keys of a block."""

    @property
    def coded(self) -> bool:
        return self.logits.dtype == torch.int16

    def beside(self, sink_logits: Tensor | None) -> "Kept":
        """The same logits with those of sinks, ``[Hq]``, as one more part of each head's log-sum-exp."""
        if sink_logits is None:
            return self
        sinks = (sink_logits.float() * _LOG2E.value)[None, :, None].expand(len(self.lses), -1, 1)
        return self._replace(lses=torch.cat([self.lses, sinks], -1))


def room_for(q: Tensor, number: int, blocks: int, splits: int, block: int) -> Kept:
    """Room for the logits of ``number`` keys, of a length of which many are moved at a time."""
    (batch, num_heads), padded, coded = q.shape[:2], triton.cdiv(number, 16) * 16, q.dtype != torch.float32
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
    kept: Kept, num_kv_heads: int, number: int, mask: Tensor | None, lengths: Tensor | None, pooling: str, pool: str
) -> Tensor:
    """Attention from logits that were kept, pooled; ``mask`` int8 ``[B, Hkv, N]``, ``lengths [B, Hkv]``.

    Of keys that are not there it is -inf. ``pooling=sum``: the sum over the heads, which is 0 of these.
    """
    batch, num_heads, padded = kept.logits.shape
    sets, splits = 1 if pool == "layer" else num_kv_heads, kept.lses.shape[2]
    scores = torch.empty(batch, sets, padded, dtype=torch.float32, device=kept.logits.device)
    if scores.numel():
        _pool_logits[triton.cdiv(number, _POOLED), batch * sets](
            mask,
            lengths,
            *kept[:3],
            scores,
            *((0, 0, 0) if mask is None else mask.stride()),
            *((0, 0) if lengths is None else lengths.stride()),
            sets,
            num_heads // sets,
            num_heads // num_kv_heads,
            number,
            padded,
            kept.tops.shape[2],
            splits,
            0.5 if pooling == "sqrt" else 1.0,
            1 / steps(pooling),
            CODED=kept.coded,
            MASKED=mask is not None,
            BOUNDED=lengths is not None,
            MAX=pooling == "max",
            LOGIT=pooling == "max_logit",
            SUM=pooling == "sum",
            KEYS=_POOLED,
            BLOCK_N=kept.block,
            SPLITS=triton.next_power_of_2(splits),
            num_warps=4,
        )
    return scores[..., :number]


def per_head(lengths: Tensor, num_kv_heads: int) -> Tensor:
    """Lengths ``[B]`` or ``[B, Hkv]`` as ``[B, Hkv]``, a view."""
    return lengths[:, None].expand(-1, num_kv_heads) if lengths.dim() == 1 else lengths


@triton.jit
def _keep(logits, largest, logit_ptr, top_ptr, rows, exist, block, place, padded, blocks, steps, CODED: tl.constexpr):
    """Writes a block of some heads to what :class:`Kept` holds: ``logits [M, N]`` and ``largest [M]``, the largest."""
    if CODED:
        below = tl.minimum((largest[:, None] - logits) * steps + 0.5, _NOTHING)
        logits = (below.to(tl.int32) - 32768).to(tl.int16)
        tl.store(top_ptr + rows * blocks + block, largest, mask=exist)
    moved = exist[:, None] & (place < padded)[None, :]
    tl.store(logit_ptr + rows[:, None] * padded + place[None, :], logits, mask=moved)


@triton.jit(do_not_specialize=[*_VARYING, "table_stride", "num_kv_heads", "parts", "each"])
def _keep_logits(
    q_ptr,
    k_ptr,
    scale_ptr,
    mask_ptr,
    length_ptr,
    table_ptr,
    table_stride,
    logit_ptr,
    top_ptr,
    lse_ptr,
    q_stride_b,
    q_stride_h,
    q_stride_d,
    k_stride_b,
    k_stride_h,
    k_stride_l,
    k_stride_d,
    scale_stride_b,
    scale_stride_h,
    scale_stride_d,
    mask_stride_b,
    mask_stride_h,
    mask_stride_l,
    length_stride_b,
    length_stride_h,
    num_kv_heads,
    group,
    parts,
    number,
    padded,
    blocks,
    splits,
    each,
    scale,
    steps,
    CODED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
    MASKED: tl.constexpr,
    BOUNDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Writes ``logit [B, Hq, padded]``, ``top [B, Hq, blocks]`` (``CODED``: the largest logit of each block) and
    ``lse [B, Hq, splits]``, all contiguous and to the base 2; ``scale`` includes log2(e). ``SCALED``: the keys are in
    fp8, over scales ``[B, Hkv, D]``, which the queries take on. ``BLOCK_SIZE``, where it is not 0: keys are in blocks
    of so many slots, ``[N, Hkv, BLOCK_SIZE, D]``, and ``table`` has the blocks of each row."""
    row, part, split = tl.program_id(0) // parts, tl.program_id(0) % parts, tl.program_id(1)
    batch, head = (row // num_kv_heads).to(tl.int64), (row % num_kv_heads).to(tl.int64)
    member = part * BLOCK_M + tl.arange(0, BLOCK_M)
    exist = member < group
    heads = head * group + tl.where(exist, member, 0)
    dims = tl.arange(0, BLOCK_D)

    q_tile = batch * q_stride_b + heads[:, None] * q_stride_h + dims[None, :] * q_stride_d
    q = tl.load(q_ptr + q_tile, mask=exist[:, None] & (dims < DIM)[None, :], other=0.0)
    if SCALED:
        scales = scale_ptr + batch * scale_stride_b + head * scale_stride_h + dims * scale_stride_d
        q = (q.to(tl.float32) * tl.load(scales, mask=dims < DIM, other=0.0)[None, :]).to(q.dtype)
    if BLOCK_SIZE:
        table_ptr += batch * table_stride
        k_ptr += head * k_stride_h
    else:
        k_ptr += batch * k_stride_b + head * k_stride_h
    if MASKED:
        mask_ptr += batch * mask_stride_b + head * mask_stride_h
    if BOUNDED:
        length = tl.load(length_ptr + batch * length_stride_b + head * length_stride_h)
        number = tl.minimum(number, length.to(tl.int32))
    rows = batch * num_kv_heads * group + heads

    top = tl.full([BLOCK_M], _LOWEST, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    begin, end = split * each, tl.minimum((split + 1) * each, tl.cdiv(number, BLOCK_N))
    places = tl.arange(0, BLOCK_N)
    if MASKED:  # read one block ahead, so that reading keys ahead is left to the compiler
        next_place = begin * BLOCK_N + places
        following = tl.load(mask_ptr + next_place * mask_stride_l, mask=next_place < number, other=0)
    if BLOCK_SIZE:  # one block ahead, too
        next_place = begin * BLOCK_N + places
        next_block = tl.load(table_ptr + next_place // BLOCK_SIZE, mask=next_place < number, other=0)
    for block in tl.range(begin, end):
        place = block * BLOCK_N + places
        slots, stored = place.to(tl.int64), place < number
        if MASKED:
            stored, next_place = following != 0, place + BLOCK_N
            following = tl.load(mask_ptr + next_place * mask_stride_l, mask=next_place < number, other=0)
        k_mask = stored[:, None]
        if BLOCK_D > DIM:
            k_mask = k_mask & (dims < DIM)[None, :]
        k_rows = slots * k_stride_l
        if BLOCK_SIZE:
            k_rows = (place % BLOCK_SIZE).to(tl.int64) * k_stride_l + next_block.to(tl.int64) * k_stride_b
            next_place = place + BLOCK_N
            next_block = tl.load(table_ptr + next_place // BLOCK_SIZE, mask=next_place < number, other=0)
        k = tl.load(k_ptr + k_rows[:, None] + dims[None, :] * k_stride_d, mask=k_mask, other=0.0)
        if SCALED:
            k = k.to(q.dtype)
        logits = capped(tl.dot(q, tl.trans(k), input_precision="ieee") * scale, SOFTCAP)
        logits = tl.where(stored[None, :], logits, float("-inf"))
        largest = tl.maximum(tl.max(logits, 1), _LOWEST)
        _keep(logits, largest, logit_ptr, top_ptr, rows, exist, block, place, padded, blocks, steps, CODED)
        higher = tl.maximum(top, largest)
        weight = weight * tl.exp2(top - higher) + tl.sum(tl.exp2(logits - higher[:, None]), 1)
        top = higher
    lse = tl.where(weight == 0, float("-inf"), top + tl.log2(weight))
    tl.store(lse_ptr + rows * splits + split, lse, mask=exist)


@triton.jit(do_not_specialize=[*_VARYING, "sets", "members"])
def _pool_logits(
    mask_ptr,
    length_ptr,
    logit_ptr,
    top_ptr,
    lse_ptr,
    score_ptr,
    mask_stride_b,
    mask_stride_h,
    mask_stride_l,
    length_stride_b,
    length_stride_h,
    sets,
    members,
    group,
    number,
    padded,
    blocks,
    splits,
    power,
    step,
    CODED: tl.constexpr,
    MASKED: tl.constexpr,
    BOUNDED: tl.constexpr,
    MAX: tl.constexpr,
    LOGIT: tl.constexpr,
    SUM: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Writes ``score [B, sets, padded]``, contiguous: of the ``members`` query heads of each set.

    ``LOGIT``: the largest logit, to the base e, whatever the log-sum-exps.
    """
    row = tl.program_id(1).to(tl.int64)
    batch, first = row // sets, row % sets * members
    block = tl.program_id(0) * (KEYS // BLOCK_N) + tl.arange(0, KEYS // BLOCK_N)
    place = block[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    exist, some = place < number, tl.arange(0, SPLITS)
    if MASKED:
        mask_ptr += batch * mask_stride_b + place.to(tl.int64) * mask_stride_l
    score = tl.full([KEYS // BLOCK_N, BLOCK_N], float("-inf") if LOGIT else 0.0, tl.float32)
    lost = place < 0
    for member in tl.range(0, members):
        head = batch * sets * members + first + member
        lse = tl.load(lse_ptr + head * splits + some, mask=some < splits, other=float("-inf"))
        top = tl.maximum(tl.max(lse, 0), _LOWEST)
        lse = tl.maximum(top + tl.log2(tl.sum(tl.exp2(lse - top), 0)), _LOWEST)
        logit = tl.load(logit_ptr + head * padded + place, mask=place < padded, other=0)
        if CODED:
            largest = tl.load(top_ptr + head * blocks + block, mask=block < blocks, other=0.0)
            below = logit.to(tl.int32) + 32768
            logit = largest[:, None] - below.to(tl.float32) * step
            if not LOGIT:
                logit = tl.where(below == _NOTHING, float("-inf"), logit)
        mass = logit * _LN2 if LOGIT else tl.exp2((logit - lse) * power)
        score = tl.maximum(score, mass) if MAX or LOGIT else score + mass
        if MASKED:
            there = tl.load(mask_ptr + (first + member) // group * mask_stride_h, mask=exist, other=0)
            lost = lost | (there == 0)
        if BOUNDED:
            of_head = batch * length_stride_b + (first + member) // group * length_stride_h
            lost = lost | (place >= tl.load(length_ptr + of_head).to(tl.int32))
    score = score if MAX or LOGIT or SUM else score / members
    if MASKED or BOUNDED:
        score = tl.where(lost, 0.0 if SUM else float("-inf"), score)
    tl.store(score_ptr + row * padded + place, score, mask=place < padded)
