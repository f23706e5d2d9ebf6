"""Keys of tiles to bits and back: Triton kernels of :func:`set_bits` and :func:`keys_of_bits`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.ops.select.bits import WORD_KEYS, KeyLists

_BITS = tl.constexpr(WORD_KEYS)
_PLACES = 1024
"""Keys that a program enters."""
_WORDS = 128
"""Words that a program, which is one warp, reads at once."""


def set_bits(words: Tensor, indices: Tensor, begins: Tensor) -> None:
    """See :func:`foveate.ops.select.bits.set_bits`. Bits are entered atomically, in any order."""
    batch, heads, tiles, number = indices.shape
    if indices.numel():
        _set_bits[triton.cdiv(number, _PLACES) * tiles, batch * heads](
            words, indices, begins.contiguous(),
            *words.stride(), *indices.stride(),
            heads, tiles, number,
            BLOCK=_PLACES, num_warps=4,
        )  # fmt: skip


def keys_of_bits(words: Tensor, begins: Tensor, starts: Tensor, number: int) -> KeyLists:
    """See :func:`foveate.ops.select.bits.keys_of_bits`. A program has one tile's words of a head."""
    batch, heads = words.shape[:2]
    tiles = len(begins) - 1
    found = torch.empty(batch, heads, number, dtype=torch.int32, device=words.device)
    counts = torch.zeros(batch, heads, tiles, dtype=torch.int32, device=words.device)
    if found.numel():
        _keys_of_bits[tiles, batch * heads](
            words, begins.contiguous(), starts.contiguous(), found, counts,
            *words.stride(),
            heads, number,
            WORDS=_WORDS, num_warps=1,
        )  # fmt: skip
    return KeyLists(found, counts)


# Sizes change from call to call; unspecialised, one compiled kernel serves all of them.
@triton.jit(do_not_specialize=["heads", "tiles", "number"])
def _set_bits(
    word_ptr, index_ptr, begin_ptr,
    word_stride_b, word_stride_h, word_stride_p, index_stride_b, index_stride_h, index_stride_t, index_stride_k,
    heads, tiles, number,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Enters keys as bits: changes ``word [B, H, P]`` in place.

    A program owns ``BLOCK`` places of the list of one tile and head, and reads each place once. Keys of other programs
    may be in the same words, so bits are entered by atomic OR.

    Shapes: N = BLOCK places.
    """
    t, row = (tl.program_id(0) % tiles).to(tl.int64), tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) // tiles * BLOCK + tl.arange(0, BLOCK)  # [N]
    index_ptr += row // heads * index_stride_b + row % heads * index_stride_h + t * index_stride_t
    key = tl.load(index_ptr + place.to(tl.int64) * index_stride_k, mask=place < number, other=-1).to(tl.int32)  # [N]
    word_ptr += row // heads * word_stride_b + row % heads * word_stride_h + tl.load(begin_ptr + t) * word_stride_p
    bit = tl.full([BLOCK], 1, tl.int32) << (key & (_BITS - 1))  # [N]
    tl.atomic_or(word_ptr + (key >> 5).to(tl.int64) * word_stride_p, bit, mask=key >= 0, sem="relaxed")


@triton.jit
def count_ones(x):
    """How many bits of each uint32 in ``x`` are set, in the shape of x."""
    x -= (x >> 1) & 0x55555555  # sums of pairs of bits
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)  # sums of four bits
    x = (x + (x >> 4)) & 0x0F0F0F0F  # sums of the bits of bytes
    return ((x * 0x01010101) >> 24).to(tl.int32)  # the product's highest byte is the sum of all bytes


# Sizes change from call to call; unspecialised, one compiled kernel serves all of them.
@triton.jit(do_not_specialize=["heads", "number"])
def _keys_of_bits(
    word_ptr, begin_ptr, start_ptr, found_ptr, count_ptr,
    word_stride_b, word_stride_h, word_stride_p,
    heads, number,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Lists the keys of bits: writes ``found [B, H, number]``, where a tile's places hold its keys ascending and then
    -1, and ``count [B, H, T]``.

    A program owns the words of one tile of a head, and reads them once, in ascending order, ``WORDS`` at a time. In
    each turn every word gives up its lowest bit.

    Shapes: W = WORDS words.
    """
    # 1. Find the words and the places of the tile.
    t, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    begin, start = tl.load(begin_ptr + t), tl.load(start_ptr + t)
    count, room = (tl.load(begin_ptr + t + 1) - begin).to(tl.int32), (tl.load(start_ptr + t + 1) - start).to(tl.int32)
    word_ptr += row // heads * word_stride_b + row % heads * word_stride_h + begin * word_stride_p
    found_ptr += row * number + start - tl.load(start_ptr)
    places = tl.arange(0, WORDS)  # [W]

    # 2. Walk over the words. The next words are loaded ahead, while the present ones are listed.
    following = tl.load(word_ptr + places.to(tl.int64) * word_stride_p, mask=places < count, other=0)  # [W]
    written = tl.zeros([], tl.int32)
    for first in tl.range(0, count, WORDS):
        left, after = following.to(tl.uint32, bitcast=True), first + WORDS + places  # [W], [W]
        following = tl.load(word_ptr + after.to(tl.int64) * word_stride_p, mask=after < count, other=0)  # [W]
        ones = count_ones(left)  # [W]
        at = written + tl.cumsum(ones, 0) - ones  # [W]
        for _ in tl.range(0, tl.max(ones, 0)):
            below = (left ^ (left - 1)) >> 1  # [W]; ones at the bits below the lowest one
            tl.store(found_ptr + at, (first + places) * _BITS + count_ones(below), mask=(left != 0) & (at < room))
            left &= left - 1
            at += 1
        written += tl.sum(ones, 0)

    # 3. Write the count, and -1 to the places that remain.
    tl.store(count_ptr + row * tl.num_programs(0) + t, tl.minimum(written, room))
    for first in tl.range(written, room, WORDS):
        tl.store(found_ptr + first + places, -1, mask=first + places < room)
