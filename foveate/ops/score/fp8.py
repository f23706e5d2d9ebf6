"""Keys in eight bits, to be scored in place of the keys themselves: a copy of half their size or less."""

import torch
from torch import Tensor

from foveate.ops._math import block_length

FP8 = torch.float8_e4m3fn
"""A sign, four bits of exponent and three of mantissa: numbers are kept to 1/16, down to 2^-15 of the largest."""
_LARGEST = 448.0
"""Its largest number."""
_HEADROOM = 4.0
"""Later keys may be this many times as large as those that the scales were made of: fp8 is finest about 0."""
_LEAST = torch.finfo(torch.float32).tiny
"""The least scale: a normal number."""


def fp8_range(k: Tensor) -> tuple[Tensor, Tensor]:
    """What a copy of the keys ``[B, Hkv, N, D]``, N at least 1, is taken from and divided by.

    Attention is the same when all keys are moved alike, and fp8 is finest around 0: a channel that is large in all keys
    would lose what they differ by.

    Returns:
        ``(centres, scales)``, fp32 ``[B, Hkv, D]``: the mean of each channel; and the least power of two that takes the
        largest of its numbers to a quarter of fp8's largest or less, 1 where all are 0. A query that is multiplied by a
        power of two loses nothing, within its range.
    """
    largest = torch.maximum(k.amax(2), -k.amin(2)).float()
    scales = torch.where(largest > 0, (largest * (_HEADROOM / _LARGEST)).clamp_min(_LEAST).log2().ceil().exp2(), 1.0)
    return k.mean(2, dtype=torch.float32), scales


def _to_fp8(k: Tensor, centres: Tensor, scales: Tensor) -> Tensor:
    """Keys ``[B, Hkv, n, D]`` less ``centres``, over ``scales [B, Hkv, D]``; what is beyond fp8's range at its end."""
    return (k - centres[:, :, None]).div_(scales[:, :, None]).clamp_(-_LARGEST, _LARGEST).to(FP8)


def write_fp8(copy: Tensor, k: Tensor, centres: Tensor, scales: Tensor, slots: Tensor | None = None) -> None:
    """Write keys ``[B, Hkv, N, D]`` to their copy in fp8, of the same shape.

    Args:
        centres, scales: fp32 ``[B, Hkv, D]``, see :func:`fp8_range`.
        slots: int64 ``[B, n]``: which of each row; None: all, without a whole copy in another dtype on the way.
    """
    batch, num_kv_heads, number, dim = k.shape
    if slots is None:
        block = block_length(batch * num_kv_heads * dim * 4, number)
        for first in range(0, number, block):
            copy[:, :, first : first + block] = _to_fp8(k[:, :, first : first + block], centres, scales)
        return
    index = slots[:, None, :, None].expand(-1, num_kv_heads, -1, dim)
    # fp8 itself can be neither gathered nor scattered
    copy.view(torch.uint8).scatter_(2, index, _to_fp8(k.gather(2, index), centres, scales).view(torch.uint8))
