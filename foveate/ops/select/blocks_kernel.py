"""Top-k of long rows whose blocks have known maxima: Triton kernel of :func:`topk_of_blocks`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.ops._dispatch import UnsupportedError

_CHUNK = 2048
"""Scores that a program looks at at once."""
_LOWEST = tl.constexpr(0x007FFFFF)
"""What :func:`_ordered` makes of -inf."""


def topk_of_blocks(
    scores: Tensor, maxima: Tensor, visible: Tensor, k: int, block: int, starts: Tensor | None = None
) -> Tensor:
    """See :func:`foveate.ops.select.blocks.topk_of_blocks`.

    A program owns a row. The k-th largest maximum is a bound that at least k scores reach, and few more: only blocks
    whose maximum reaches it are read, four times for the k-th score (eight bits of it a time) and once for the result.
    What ties or trends do to the number of those blocks costs time and never a wrong set: nothing has a capacity.
    """
    batch, rows, number = scores.shape
    blocks = maxima.shape[-1]
    if scores.dtype != torch.float32 or maxima.dtype != torch.float32:
        raise UnsupportedError(f"scores in {scores.dtype} with maxima in {maxima.dtype}")
    if block & (block - 1) or maxima.shape != (batch, rows, -(-number // block)) or visible.shape != (rows,):
        shapes = f"scores {tuple(scores.shape)}, maxima {tuple(maxima.shape)}, visible {tuple(visible.shape)}"
        raise ValueError(f"shapes do not fit blocks of {block}, a power of two: {shapes}")
    found = torch.empty(batch, rows, k, dtype=torch.int32, device=scores.device)
    if not number or not rows:
        return found.fill_(-1)
    scores, maxima = scores.contiguous(), maxima.contiguous()
    listed = torch.empty(batch, rows, blocks, dtype=torch.int32, device=scores.device)
    _topk_of_blocks[rows, batch](
        scores,
        maxima,
        visible,
        starts,
        listed,
        found,
        rows,
        number,
        blocks,
        k,
        BLOCK=block,
        CHUNK=_CHUNK,
        PADDED=starts is not None,
        num_warps=8,
    )
    return found


@triton.jit
def _ordered(x):
    """Floats as unsigned integers of the same order, -0.0 as 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _score(ptr, list_ptr, place, count, begin, limit, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """The scores in some places of the listed blocks, or of the row: indices, :func:`_ordered`, and which count."""
    index = place
    if LISTED:
        index = tl.load(list_ptr + place // BLOCK, mask=place < count, other=0) * BLOCK + place % BLOCK
    there = (place < count) & (index >= begin) & (index < limit)
    x = _ordered(tl.load(ptr + index, mask=there, other=float("-inf")))
    return index, x, there & (x > _LOWEST)


@triton.jit
def _kth(ptr, list_ptr, count, begin, limit, k, LISTED: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """The k-th largest, and how many equal to it are among the k; 0 and all if there are fewer than k."""
    bins = tl.arange(0, 256)
    prefix, room = tl.zeros([], tl.uint32), k
    enough = k > 0
    for part in tl.range(0, 4):
        shift = tl.zeros([], tl.uint32) + (24 - 8 * part)
        counts = tl.zeros([256], tl.int32)
        for first in tl.range(0, count, CHUNK):
            _, x, valid = _score(ptr, list_ptr, first + tl.arange(0, CHUNK), count, begin, limit, LISTED, BLOCK)
            of_prefix = valid & ((x >> shift >> 8) == prefix)
            counts += tl.histogram(((x >> shift) & 255).to(tl.int32), 256, mask=of_prefix)
        at_least = tl.cumsum(counts, 0, reverse=True)
        enough = enough & (tl.max(at_least, 0) >= room)
        digit = tl.maximum(tl.sum((at_least >= room).to(tl.int32), 0) - 1, 0)
        room -= tl.sum(tl.where(bins > digit, counts, 0), 0)
        prefix = (prefix << 8) | digit.to(tl.uint32)
    return tl.where(enough, prefix, 0), tl.where(enough, room, count)


@triton.jit(do_not_specialize=["rows", "number", "blocks", "k"])
def _topk_of_blocks(
    score_ptr,
    max_ptr,
    visible_ptr,
    start_ptr,
    list_ptr,
    found_ptr,
    rows,
    number,
    blocks,
    k,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Writes ``found [B, S, k]``; all tensors are contiguous, ``list [B, S, blocks]`` is room to work in."""
    s = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64) * rows + s
    score_ptr += row * number
    max_ptr += row * blocks
    list_ptr += row * blocks
    found_ptr += row * k
    visible = tl.minimum(tl.load(visible_ptr + s), number).to(tl.int32)
    some = (visible + BLOCK - 1) // BLOCK
    places = tl.arange(0, CHUNK)
    begin = 0
    if PADDED:
        begin = tl.load(start_ptr + tl.program_id(1)).to(tl.int32)

    bound, _ = _kth(max_ptr, list_ptr, some, 0, some, k, False, BLOCK, CHUNK)
    listed = 0
    for first in tl.range(0, some, CHUNK):
        block, top, valid = _score(max_ptr, list_ptr, first + places, some, 0, some, False, BLOCK)
        reach = valid & (top >= bound)
        tl.store(list_ptr + listed + tl.cumsum(reach.to(tl.int32), 0) - 1, block, mask=reach)
        listed += tl.sum(reach.to(tl.int32), 0)
    tl.debug_barrier()

    count = listed * BLOCK
    kth, room = _kth(score_ptr, list_ptr, count, begin, visible, k, True, BLOCK, CHUNK)
    written, equal = 0, 0
    for first in tl.range(0, count, CHUNK):
        index, x, valid = _score(score_ptr, list_ptr, first + places, count, begin, visible, True, BLOCK)
        tie = valid & (x == kth)
        chosen = (valid & (x > kth)) | (tie & (equal + tl.cumsum(tie.to(tl.int32), 0) <= room))
        tl.store(found_ptr + written + tl.cumsum(chosen.to(tl.int32), 0) - 1, index, mask=chosen)
        written += tl.sum(chosen.to(tl.int32), 0)
        equal += tl.sum(tie.to(tl.int32), 0)
    for first in tl.range(written, k, CHUNK):
        tl.store(found_ptr + first + places, -1, mask=first + places < k)
