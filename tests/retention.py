"""Problems of retention scores that their tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foveate.ops import Rotary
from foveate.ops.score import Convolution


def weights(
    heads: int, channels: int, kind: str, dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> tuple[list[Convolution], Convolution]:
    """The convolutions and the head of a kind of scores, every one of which matters to them."""
    generator = torch.Generator().manual_seed(seed)

    def one(taps: int, wide: int, narrow: int) -> Convolution:
        weight = torch.randn(heads, taps, wide, narrow, generator=generator) * (2 / wide / taps) ** 0.5
        bias = torch.randn(heads, narrow, generator=generator)
        return Convolution(weight.to(device, dtype), bias.to(device, dtype))

    widths = [channels >> halvings for halvings in range(4 if kind == "conv" else 2)]
    taps = 3 if kind == "conv" else 1
    convolutions = [one(taps, wide, wide // 2) for wide in widths[:-1]]
    return convolutions, one(1, widths[-1], 1)


def in_slots(
    batch: int,
    heads: int,
    length: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    device: str = "cpu",
    spare: int = 5,
    seed: int = 1,
) -> tuple[Tensor, Tensor, dict[str, Any], tuple[Tensor, Tensor]]:
    """Tokens in slots of any order, rotated, the first ones of the second row on padding; all other slots have NaN.

    Returns:
        Memory of keys and of values, the options, and keys before rotation and values in order.
    """
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(batch, heads, length, dim, generator=generator).to(device, dtype) for dim in dims)
    slots = torch.rand(batch, length + spare, generator=generator).argsort(1)[:, :length].to(device)
    positions = torch.arange(batch, device=device)[:, None] * 1000 + torch.arange(length, device=device)
    rotary = Rotary(10000.0 ** (-torch.arange(0, dims[0], 2, device=device) / dims[0]))
    turned = (positions[..., None] * rotary.inv_freq).repeat(1, 1, 2)
    angles = turned.cos(), turned.sin()
    real = torch.ones(batch, length, dtype=torch.bool, device=device)
    real[1:, : length // 3] = False
    memories = []
    for x in (rotary.apply(k, positions[:, None]).to(dtype), v):
        memory = torch.full((batch, length + spare, heads, x.shape[3]), float("nan"), device=device, dtype=dtype)
        memory = memory.transpose(1, 2)
        index = slots[:, None, :, None].expand_as(x)
        memory.scatter_(2, index, x.masked_fill(~real[:, None, :, None], float("nan")))
        memories.append(memory)
    return *memories, {"slots": slots, "angles": angles, "real": real}, (k, v)
