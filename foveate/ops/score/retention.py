"""The scores of learned token eviction: how much each token deserves to be retained (laLTE, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from foveate.ops._math import matmul_fp32


class Convolution(NamedTuple):
    """A convolution over time with weights for each KV head. Input and output have the same number of tokens."""

    weight: Tensor
    """``[Hkv, taps, channels, new channels]`` with an odd number of taps; the middle one reads the token itself."""
    bias: Tensor
    """``[Hkv, new channels]``"""


def retention_logits(
    k: Tensor,
    v: Tensor,
    convolutions: Sequence[Convolution],
    head: Convolution,
    *,
    dilation: int = 2,
    real: Tensor | None = None,
    slots: Tensor | None = None,
    angles: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Scores of tokens before the sigmoid: convolutions over keys and values, each with SiLU after it, and a head.

    Channels have the dtype of the weights, and sums are fp32. The input of every convolution is padded with zeros
    before the first token and after the last one.

    Args:
        k: ``[B, Hkv, S, D]``, rotated by ``angles``.
        v: ``[B, Hkv, S, Dv]``.
        convolutions: the layers before the head. The first has ``D + Dv`` channels: the key's and then the value's.
        head: a linear layer with one output channel, given as a convolution of one tap.
        dilation: tokens from one tap to the next.
        real: bool ``[B, L]``: True where a token is; elsewhere the input of every convolution is zero. None: every
            place has a token.
        slots: int64 ``[B, L]``: the slots of the tokens in ``k`` and ``v``, in the tokens' order. None: ``L = S``
            tokens in order.
        angles: cosines and sines, fp32 ``[B or 1, L, D]``, by which the two halves of a token's key were rotated
            against each other; the last ``D / 2`` equal the first. The rotation is undone. None: keys are not rotated.

    Returns:
        fp32 ``[B, Hkv, L]``.

    Raises:
        ValueError: when shapes do not fit.
    """
    if slots is not None:
        index = slots[:, None, :, None]
        k, v = k.take_along_dim(index, 2), v.take_along_dim(index, 2)
    if angles is not None:
        k = _rotated_back(k, *angles)
    x = torch.cat([k.transpose(0, 1), v.transpose(0, 1)], -1).to(head.weight.dtype)  # [Hkv, B, L, channels]
    absent = None if real is None else real.logical_not()[:, :, None]
    x = x if absent is None else x.masked_fill(absent, 0)
    for weight, bias in convolutions:
        count, (heads, batch, length, _) = weight.shape[1], x.shape
        reach = count // 2 * dilation
        padded = F.pad(x, (0, 0, reach, reach))
        found = bias[:, None].to(torch.promote_types(x.dtype, torch.float32))
        for tap in range(count):
            found = found + matmul_fp32(padded.narrow(2, tap * dilation, length).flatten(1, 2), weight[:, tap])
        x = F.silu(found).to(x.dtype).view(heads, batch, length, -1)
        x = x if absent is None else x.masked_fill(absent, 0)
    exact = torch.promote_types(x.dtype, torch.float32)
    logits = (x.to(exact) * head.weight[:, :, None, :, 0].to(exact)).sum(-1) + head.bias[:, None].to(exact)
    return logits.transpose(0, 1).float()


def _rotated_back(k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    exact = k.to(torch.promote_types(k.dtype, torch.float32))
    a, b = exact.chunk(2, -1)
    return (exact * cos[:, None] + torch.cat([b, -a], -1) * sin[:, None]).to(k.dtype)


def check_retention(k, v, convolutions, head, *, dilation=2, real=None, slots=None, angles=None):
    """Raise ValueError unless the arguments of :func:`retention_logits` fit each other."""
    heads, channels = k.shape[1], k.shape[3] + v.shape[3]
    tokens = (len(k), k.shape[2] if slots is None else slots.shape[-1])
    fit = v.shape[:3] == k.shape[:3] and (slots is None or slots.shape == tokens)
    fit = fit and (real is None or real.shape == tokens) and len(convolutions) > 0
    if angles is not None:
        fit = fit and k.shape[3] % 2 == 0
        fit = fit and all(x.shape[1:] == (tokens[1], k.shape[3]) and len(x) in (1, len(k)) for x in angles)
    for weight, bias in (*convolutions, head):
        fit = fit and weight.dim() == 4 and weight.shape[0] == heads and weight.shape[2] == channels
        fit = fit and weight.shape[1] % 2 == 1 and bias.shape == (heads, weight.shape[3])
        channels = weight.shape[-1]
    if not fit or head.weight.shape[1] != 1 or channels != 1:
        named = {"k": k, "v": v, "real": real, "slots": slots, "cosines": None if angles is None else angles[0]}
        shapes = [f"{name} {tuple(x.shape)}" for name, x in named.items() if x is not None]
        shapes += [f"weights {tuple(one.weight.shape)}" for one in (*convolutions, head)]
        raise ValueError(f"shapes do not fit: {', '.join(shapes)}")
