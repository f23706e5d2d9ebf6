"""Scores of learned token eviction: Triton kernel of :func:`retention_logits`, one launch per convolution."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from foveate.ops.dispatch import UnsupportedError
from foveate.ops.gpu.block_table import FLOATS
from foveate.ops.gpu.tiles import capability, padded

_LARGEST_DIM = 128
"""The most dimensions of a key or a value."""


class _Tile(NamedTuple):
    """What a program computes at once. Registers suffice at these sizes for any head dim."""

    tokens: int
    columns: int
    """New channels."""
    warps: int


def retention_logits(k, v, convolutions, head, *, dilation=2, real=None, slots=None, angles=None):
    """See :func:`foveate.ops.score.retention.retention_logits`.

    The first launch reads keys and values in their slots and rotates the keys back in registers. Between two launches
    the new channels are in memory, in the dtype of the weights.
    """
    batch, heads, _, dim = k.shape
    value_dim, length = v.shape[3], k.shape[2] if slots is None else slots.shape[1]
    weights = [x for one in (*convolutions, head) for x in one]
    if torch.is_grad_enabled() and any(x.requires_grad for x in weights):
        raise UnsupportedError("gradients of the weights")
    dtypes = {x.dtype for x in weights}
    if len(dtypes) > 1 or not {k.dtype, v.dtype, *dtypes} <= set(FLOATS):
        given = ", ".join(str(x.dtype) for x in (k, v, *weights))
        raise UnsupportedError(f"keys, values and weights in {given}")
    if dim % 2 or max(dim, value_dim) > _LARGEST_DIM:
        raise UnsupportedError(f"head dims {dim} and {value_dim}: odd ones of keys, or above {_LARGEST_DIM}")
    out = torch.empty(batch, heads, length, dtype=torch.float32, device=k.device)
    if not out.numel():
        return out
    dtype = head.weight.dtype
    tile = tile_for(dtype, max(dim, value_dim), capability(k.device))
    real = None if real is None else real.contiguous().view(torch.uint8)
    cos, sin = (None, None) if angles is None else (x.contiguous() for x in angles)
    x, y = k, v
    for number, (weight, bias) in enumerate(convolutions):
        first, last = number == 0, number == len(convolutions) - 1
        taps, channels, new = weight.shape[1:]
        found = out if last else torch.empty(batch, heads, length, new, dtype=dtype, device=k.device)
        _convolve[batch * heads, triton.cdiv(length, tile.tokens)](
            x, y, weight.contiguous(), bias.contiguous(), real,
            slots.contiguous() if first and slots is not None else None, cos if first else None, sin if first else None,
            head.weight.contiguous() if last else None, head.bias.contiguous() if last else None, found,
            *x.stride(), *y.stride(), 0 if cos is None or len(cos) == 1 else cos.stride(0),
            heads, length,
            FIRST=first, LAST=last, TAPS=taps, DILATION=dilation, VALUES=value_dim if first else 0, CHANNELS=channels,
            NEW=new, BLOCK_T=tile.tokens, BLOCK_D=padded(dim // 2 if first else channels), BLOCK_V=padded(value_dim),
            BLOCK_N=min(tile.columns, padded(new)), num_warps=tile.warps,
        )  # fmt: skip
        x = y = found
    return out


def tile_for(dtype: torch.dtype, dim: int, capability: int) -> _Tile:
    """By the dtype of the weights, the larger head dim and the major compute capability.

    fp32 is multiplied without tensor cores. On Hopper all new channels are one tile: with two of 32 channels beside 64
    tokens, Triton 3.6 reads wrong shared memory, and two of 64 take 3.4 times as long. Newer devices were not tried.
    """
    if dtype == torch.float32:
        return _Tile(tokens=32, columns=32, warps=8)
    return _Tile(tokens=64, columns=64 if dim <= 64 else 128 if capability == 9 else 32, warps=4)


@triton.jit
def _weights(ptr, begin, rows, columns, COUNT: tl.constexpr, NEW: tl.constexpr):
    """Weights ``[R, N]`` of the ``COUNT`` input channels from ``begin`` on, counted over all taps: ``rows [R]`` numbers
    them from 0, and ``columns [N]`` holds new channels."""
    mask = (rows < COUNT)[:, None] & (columns < NEW)[None, :]  # [R, N]
    return tl.load(ptr + (begin + rows)[:, None] * NEW + columns[None, :], mask=mask, other=0.0)


# Sizes change from call to call; unspecialised, one compiled kernel serves all of them.
@triton.jit(do_not_specialize=["heads", "length"])
def _convolve(
    x_ptr, y_ptr, weight_ptr, bias_ptr, real_ptr, slot_ptr, cos_ptr, sin_ptr, head_ptr, head_bias_ptr, out_ptr,
    x_stride_b, x_stride_h, x_stride_l, x_stride_d, y_stride_b, y_stride_h, y_stride_l, y_stride_d, angle_stride_b,
    heads, length,
    FIRST: tl.constexpr, LAST: tl.constexpr, TAPS: tl.constexpr, DILATION: tl.constexpr, VALUES: tl.constexpr,
    CHANNELS: tl.constexpr, NEW: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One convolution with SiLU: writes ``out [B, H, L, NEW]``, or, with the head after the last convolution
    (``LAST``), fp32 ``out [B, H, L]``; both contiguous.

    A program owns ``BLOCK_T`` neighbouring tokens of one KV head in one row of the batch. For each block of new
    channels it reads the taps in ascending order, and the input of a tap in the order value, second half of the key,
    first half. The first convolution (``FIRST``) reads a value ``y``, and a key ``x`` as two halves, which it rotates
    back; the others read ``x`` alone. Where ``real`` is 0, the input and the result are 0.

    Shapes: T = BLOCK_T tokens, N = BLOCK_N new channels, D = BLOCK_D channels of ``x`` (of the first convolution, half
    of a key), V = BLOCK_V dimensions of a value.
    """
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // heads, row % heads
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)  # [T]
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)  # [D], [V]
    x_ptr += batch * x_stride_b + head * x_stride_h
    y_ptr += batch * y_stride_b + head * y_stride_h
    weight_ptr += head * TAPS * CHANNELS * NEW
    dtype: tl.constexpr = weight_ptr.dtype.element_ty
    KEYS: tl.constexpr = CHANNELS - VALUES
    PART: tl.constexpr = KEYS // 2 if FIRST else KEYS

    # 1. Find which tokens of the program exist.
    stands = token < length  # [T]
    if real_ptr is not None:
        stands = stands & (tl.load(real_ptr + batch * length + token, mask=stands, other=0) != 0)  # [T]
    logits = tl.zeros([BLOCK_T], tl.float32)  # [T]

    # 2. Walk over the blocks of new channels.
    for first in tl.range(0, NEW, BLOCK_N, num_stages=1):  # loads ahead would take the products' registers
        new = first + tl.arange(0, BLOCK_N)  # [N]
        found = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)  # [T, N]
        # 3. Walk over the taps; tokens outside of the row are zeros.
        for tap in tl.range(0, TAPS, num_stages=1):
            at = token + (tap - TAPS // 2) * DILATION  # [T]
            there = (at >= 0) & (at < length)  # [T]
            if real_ptr is not None:
                there = there & (tl.load(real_ptr + batch * length + at, mask=there, other=0) != 0)  # [T]
            slot = at.to(tl.int64)  # [T]
            if slot_ptr is not None:
                slot = tl.load(slot_ptr + batch * length + at, mask=there, other=0)  # [T]
            begin = tap * CHANNELS
            if FIRST:
                tile = y_ptr + slot[:, None] * y_stride_l + value_dims[None, :] * y_stride_d  # [T, V]
                # [T, V]
                value = tl.load(tile, mask=there[:, None] & (value_dims < VALUES)[None, :], other=0.0).to(dtype)
                weight = _weights(weight_ptr, begin + KEYS, value_dims, new, VALUES, NEW)  # [V, N]
                found = tl.dot(value, weight, found, input_precision="ieee")  # [T, N]
            tile = x_ptr + slot[:, None] * x_stride_l + dims[None, :] * x_stride_d  # [T, D]
            mask = there[:, None] & (dims < PART)[None, :]  # [T, D]
            a = tl.load(tile, mask=mask, other=0.0)  # [T, D]
            if FIRST:
                b = tl.load(tile + PART * x_stride_d, mask=mask, other=0.0)  # [T, D]
                if cos_ptr is not None:
                    angle = batch * angle_stride_b + at.to(tl.int64)[:, None] * KEYS + dims[None, :]  # [T, D]
                    cos = tl.load(cos_ptr + angle, mask=mask, other=0.0)  # [T, D]
                    sin = tl.load(sin_ptr + angle, mask=mask, other=0.0)  # [T, D]
                    rotated = a.to(tl.float32)  # [T, D]
                    a = (rotated * cos + b.to(tl.float32) * sin).to(b.dtype)  # [T, D]
                    b = (b.to(tl.float32) * cos - rotated * sin).to(b.dtype)  # [T, D]
                weight = _weights(weight_ptr, begin + PART, dims, new, PART, NEW)  # [D, N]
                found = tl.dot(b.to(dtype), weight, found, input_precision="ieee")  # [T, N]
            weight = _weights(weight_ptr, begin, dims, new, PART, NEW)  # [D, N]
            found = tl.dot(a.to(dtype), weight, found, input_precision="ieee")  # [T, N]

        # 4. Add the bias, apply SiLU, and write the new channels, or add their products to the head's logits.
        found += tl.load(bias_ptr + head * NEW + new, mask=new < NEW, other=0.0).to(tl.float32)[None, :]  # [T, N]
        found = tl.where(stands[:, None], found / (1 + tl.exp(-found)), 0.0).to(dtype)  # [T, N]
        if LAST:
            weight = tl.load(head_ptr + head * NEW + new, mask=new < NEW, other=0.0).to(tl.float32)  # [N]
            logits += tl.sum(found.to(tl.float32) * weight[None, :], 1)  # [T]
        else:
            out = (row * length + token)[:, None] * NEW + new[None, :]  # [T, N]
            tl.store(out_ptr + out, found, mask=(token < length)[:, None] & (new < NEW)[None, :])

    # 5. Write the logits of the head.
    if LAST:
        logits += tl.load(head_bias_ptr + head).to(tl.float32)  # [T]
        tl.store(out_ptr + row * length + token, logits, mask=token < length)
