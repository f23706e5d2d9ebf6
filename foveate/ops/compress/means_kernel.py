"""The mean of the keys that a tile does not read: Triton kernel of :func:`unchosen_means`."""

import torch
import triton
import triton.language as tl

from foveate.ops.compress.means import TileMeans
from foveate.ops.dispatch import UnsupportedError
from foveate.ops.gpu.block_table import FLOATS, arguments, block_size
from foveate.ops.gpu.tiles import Tile, tile_of_width
from foveate.ops.select.bits import WORD_KEYS
from foveate.ops.select.bits_kernel import count_ones

_BITS = tl.constexpr(WORD_KEYS)

_TILES = {
    64: Tile(128, 64, num_warps=8, num_stages=3),
    128: Tile(128, 64, num_warps=8, num_stages=3),
    256: Tile(64, 64, num_warps=8, num_stages=2),
}
"""Tiles of queries and keys of a step, by the head dim, padded. All fit into 99 KB of shared memory."""

_WORDS = 16
"""Words of a tile that are counted at a time."""

_TILE_FP32 = Tile(16, 32, num_warps=4, num_stages=1)
"""For fp32, which is multiplied without tensor cores."""


def tile_for(dtype: torch.dtype, dim: int) -> Tile:
    """Tiles of queries and keys of a step for ``dim``, the larger of head and value dim, at most 256."""
    return _TILE_FP32 if dtype == torch.float32 else tile_of_width(_TILES, dim)


def unchosen_means(kv, words, begins, *, tile, offset=0, heads=None):
    """See :func:`foveate.ops.compress.means.unchosen_means`.

    A program multiplies the bits of a block of tiles with the keys, or with the values, of one KV head. It walks over
    the keys before its last tile in order, so repeats are equal bit for bit.
    """
    k, v, block_table = kv.k, kv.v, kv.block_table
    dim, value_dim, num_kv_heads = k.shape[3], v.shape[3], k.shape[1]
    batch, tiles = len(words), len(begins) - 1
    if k.dtype != v.dtype or k.dtype not in FLOATS:
        raise UnsupportedError(f"means of keys in {k.dtype} and values in {v.dtype}")
    if max(dim, value_dim) > max(_TILES):
        raise UnsupportedError(f"head dims above {max(_TILES)}")
    keys, values = (
        torch.empty(batch, num_kv_heads, tiles, width, dtype=torch.float32, device=k.device)
        for width in (dim, value_dim)
    )
    numbers = torch.empty(batch, num_kv_heads, tiles, dtype=torch.int32, device=k.device)
    block = tile_for(k.dtype, max(dim, value_dim))
    if tiles and batch:
        _unchosen_means[triton.cdiv(tiles, block.block_m), 2, batch * num_kv_heads](
            k, v, words, begins.contiguous(), heads, *arguments(block_table), keys, values, numbers,
            k.stride(), v.stride(), words.stride(),
            num_kv_heads, tiles, tile, offset // tile * tile,
            BLOCK_SIZE=block_size(block_table, k), WORDS=_WORDS, **block.sizes(dim, value_dim) | block.options,
        )  # fmt: skip
    return TileMeans(keys, values, numbers)


@triton.jit
def _keys_of_a_word(before, word):
    """Ones at the bits of a word, int32 ``[T, W]``, whose keys are before each tile."""
    keys = tl.minimum(tl.maximum(before[:, None] - word[None, :] * _BITS, 0), _BITS)
    return tl.where(keys == _BITS, -1, (1 << (keys & (_BITS - 1))) - 1)


@triton.jit
def _add(
    sums, first, end, x_ptr, word_ptr, table_ptr, x_stride_b, x_stride_l, x_stride_d, word_stride_p,
    before, first_word, own_words,
    WHOLE: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds ``BLOCK_N`` keys from ``first`` on to the sums of all tiles that have not chosen them. ``WHOLE``: all of
    these keys are before every tile."""
    dims = tl.arange(0, BLOCK_D)
    word = first // _BITS + tl.arange(0, BLOCK_N // _BITS)  # [W]
    at = (first_word[:, None] + word[None, :]) * word_stride_p
    unchosen = ~tl.load(word_ptr + at, mask=word[None, :] < own_words[:, None], other=0)  # [T, W]
    if not WHOLE:
        unchosen &= _keys_of_a_word(before, word)
    bits = (unchosen[:, :, None] >> tl.arange(0, _BITS)[None, None, :]) & 1  # [T, W, 32]
    bits = tl.reshape(bits, [BLOCK_M, BLOCK_N]).to(x_ptr.dtype.element_ty)  # [T, N]

    keys = first + tl.arange(0, BLOCK_N)  # [N]
    stored = keys < end
    slots = tl.where(stored, keys, 0).to(tl.int64)
    if BLOCK_SIZE:
        in_block = tl.load(table_ptr + slots // BLOCK_SIZE, mask=stored, other=0).to(tl.int64)
        slots = in_block * x_stride_b + slots % BLOCK_SIZE * x_stride_l
    else:
        slots = slots * x_stride_l
    x_tile = slots[:, None] + dims[None, :] * x_stride_d
    x = tl.load(x_ptr + x_tile, mask=stored[:, None] & (dims < DIM)[None, :], other=0.0)  # [N, D]
    return tl.dot(bits, x, sums, input_precision="ieee")


@triton.jit
def _mean(
    x_ptr, word_ptr, begin_ptr, table_ptr, mean_ptr, number_ptr, x_stride_b, x_stride_l, x_stride_d, word_stride_p,
    row, first_tile, tiles, tile, start,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """The means of the keys, or of the values, of a program's tiles. ``x``, ``word`` and ``table`` are of its batch
    entry and head."""
    t = first_tile + tl.arange(0, BLOCK_M)  # [T]
    exist = t < tiles
    dims = tl.arange(0, BLOCK_D)
    before = tl.where(exist, start + t * tile, 0)  # [T] keys before each tile
    first_word = tl.load(begin_ptr + t, mask=exist, other=0)  # [T]
    own_words = (tl.load(begin_ptr + t + 1, mask=exist, other=0) - first_word).to(tl.int32)  # [T]

    # 1. How many keys are not chosen
    last = start + (tl.minimum(first_tile + BLOCK_M, tiles) - 1) * tile  # keys before the last tile
    ones = tl.zeros([BLOCK_M, WORDS], tl.int32)
    for first in tl.range(0, tl.cdiv(last, _BITS), WORDS):
        word = first + tl.arange(0, WORDS)  # [W]
        at = (first_word[:, None] + word[None, :]) * word_stride_p
        chosen = tl.load(word_ptr + at, mask=word[None, :] < own_words[:, None], other=0)  # [T, W]
        ones += count_ones((_keys_of_a_word(before, word) & ~chosen).to(tl.uint32, bitcast=True))
    number = tl.sum(ones, 1)  # [T]

    # 2. Their sum: blocks of keys before all tiles, and then blocks that some tiles see in part
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    whole = (start + first_tile * tile) // BLOCK_N * BLOCK_N
    for first in tl.range(0, whole, BLOCK_N):
        sums = _add(
            sums, first, whole, x_ptr, word_ptr, table_ptr, x_stride_b, x_stride_l, x_stride_d, word_stride_p,
            before, first_word, own_words, True, BLOCK_SIZE, DIM, BLOCK_D, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    for first in tl.range(whole, last, BLOCK_N):
        sums = _add(
            sums, first, last, x_ptr, word_ptr, table_ptr, x_stride_b, x_stride_l, x_stride_d, word_stride_p,
            before, first_word, own_words, False, BLOCK_SIZE, DIM, BLOCK_D, BLOCK_M, BLOCK_N,
        )  # fmt: skip

    # 3. Their mean
    means = sums / tl.maximum(number, 1).to(tl.float32)[:, None]  # [T, D]
    place = row * tiles + t
    mean_mask = exist[:, None] & (dims < DIM)[None, :]
    tl.store(mean_ptr + place[:, None] * DIM + dims[None, :], means, mask=mean_mask)
    if number_ptr is not None:
        tl.store(number_ptr + place, number, mask=exist)


@triton.jit(do_not_specialize=["table_stride", "num_kv_heads", "tiles", "tile", "start"])
def _unchosen_means(
    k_ptr, v_ptr, word_ptr, begin_ptr, heads_ptr, table_ptr, table_stride, mean_k_ptr, mean_v_ptr, number_ptr,
    k_strides, v_strides, word_strides,
    num_kv_heads, tiles, tile, start,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Writes ``mean_k [B, Hkv, T, D]``, ``mean_v [B, Hkv, T, Dv]`` and ``number [B, Hkv, T]``, contiguous. Tile t
    begins at position ``start + t * tile``.

    A program owns ``BLOCK_M`` tiles of one KV head, and of it the keys (axis 1 is 0) or the values (1). The last tiles,
    which have the most keys before them, have the lowest numbers and start first.

    1. It counts the keys before each tile that the tile has not chosen. Words that a tile does not have count as 0.
    2. A step loads the words of ``BLOCK_N`` keys for each tile, inverts their bits, and multiplies these, as zeros and
       ones of the keys' dtype, with the keys. Sums are in fp32. Only the last steps mask keys that are not before a
       tile.
    3. It divides the sums by the numbers.
    """
    k_stride_b, k_stride_h, k_stride_l, k_stride_d = k_strides
    v_stride_b, v_stride_h, v_stride_l, v_stride_d = v_strides
    word_stride_b, word_stride_h, word_stride_p = word_strides
    first_tile = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    row = tl.program_id(2).to(tl.int64)
    batch, head = row // num_kv_heads, row % num_kv_heads
    source = head if heads_ptr is None else tl.load(heads_ptr + head)
    word_ptr += batch * word_stride_b + source * word_stride_h
    k_ptr += head * k_stride_h
    v_ptr += head * v_stride_h
    if BLOCK_SIZE:
        table_ptr += batch * table_stride
    else:
        k_ptr += batch * k_stride_b
        v_ptr += batch * v_stride_b
    if tl.program_id(1) == 0:
        _mean(
            k_ptr, word_ptr, begin_ptr, table_ptr, mean_k_ptr, number_ptr, k_stride_b, k_stride_l, k_stride_d,
            word_stride_p, row, first_tile, tiles, tile, start, BLOCK_SIZE, DIM, BLOCK_D, BLOCK_M, BLOCK_N, WORDS,
        )  # fmt: skip
    else:
        _mean(
            v_ptr, word_ptr, begin_ptr, table_ptr, mean_v_ptr, None, v_stride_b, v_stride_l, v_stride_d,
            word_stride_p, row, first_tile, tiles, tile, start, BLOCK_SIZE, VALUE_DIM, BLOCK_DV, BLOCK_M, BLOCK_N,
            WORDS,
        )  # fmt: skip
