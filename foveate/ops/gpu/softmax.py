"""The online softmax of attention kernels: one more block, its end, and the exact merge of parts.

See Milakov and Gimelshein 2018, and FlashDecoding (Dao et al. 2023).

A running softmax is ``top [M]``, the largest logit so far, ``weight [M]``, the sum of ``2 ** (logit - top)``, and ``out
[M, Dv]``, the values weighted alike. Logits are to the base 2: their scale includes ``LOG2E``.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4e38)
"""Where a running maximum starts: finite, so that a row which has seen nothing yet weighs its past with 1."""


@triton.jit
def exponentials(logits, top):
    """The first half of :func:`online`: ``(top, p [M, N], fade [M])``, after which values can be loaded."""
    higher = tl.maximum(top, tl.max(logits, 1))
    return higher, tl.exp2(logits - higher[:, None]), tl.exp2(top - higher)


@triton.jit
def accumulate(p, v, fade, weight, out):
    """The second half: ``(weight, out)`` with the values ``v [N, Dv]`` of a block."""
    out = tl.dot(p.to(v.dtype), v, out * fade[:, None], input_precision="ieee")
    return weight * fade + tl.sum(p, 1), out


@triton.jit
def online(logits, v, top, weight, out):
    """Add a block of ``logits [M, N]``, -inf where no key is, and of values ``v [N, Dv]``."""
    top, p, fade = exponentials(logits, top)
    weight, out = accumulate(p, v, fade, weight, out)
    return top, weight, out


@triton.jit
def merge(parts, lse, top, weight, out):
    """Add attention outputs ``parts [P, M, Dv]``, or ``[P, Dv]`` for a single row, each normalised by itself.

    ``lse [P, M]`` or ``[P]``: their log-sum-exps to the base 2, -inf for a part of no keys.
    """
    higher = tl.maximum(top, tl.max(lse, 0))
    fade = tl.exp2(top - higher)
    if len(lse.shape) == 1:
        share = tl.exp2(lse - higher)
        out = out * fade + tl.sum(parts * share[:, None], 0)
    else:
        share = tl.exp2(lse - higher[None, :])
        out = out * fade[:, None] + tl.sum(parts * share[:, :, None], 0)
    return higher, weight * fade + tl.sum(share, 0), out


@triton.jit
def log_sum_exp(top, weight, NATURAL: tl.constexpr = False):
    """Log-sum-exp of a running softmax, to the base 2 or ``NATURAL``; -inf of no keys."""
    if NATURAL:
        return tl.where(weight == 0, float("-inf"), (top + tl.log2(weight)) / LOG2E)
    else:
        return tl.where(weight == 0, float("-inf"), top + tl.log2(weight))


@triton.jit
def normalised(weight, out):
    """Output of a running softmax; 0 of no keys."""
    total = tl.where(weight == 0, 1.0, weight)
    if len(out.shape) == 1:
        return out / total
    else:
        return out / total[:, None]


@triton.jit
def store_part(
    out_ptr, lse_ptr, place, exist, top, weight, out, VALUE_DIM: tl.constexpr, NATURAL: tl.constexpr = False
):
    """Store output and log-sum-exp of a running softmax at ``place [M]`` of ``out [.., Dv]`` and ``lse [..]``,
    contiguous, where rows ``exist``."""
    dims = tl.arange(0, out.shape[1])
    out = normalised(weight, out)
    lse = log_sum_exp(top, weight)
    mask = exist[:, None] & (dims < VALUE_DIM)[None, :]
    tl.store(out_ptr + place[:, None] * VALUE_DIM + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + place, lse / LOG2E if NATURAL else lse, mask=exist)


@triton.jit
def log_sums(logits):
    """Logarithms of sums over the last axis of ``[M, N, S]``, to the base 2; -inf of nothing."""
    top = tl.maximum(tl.max(logits, 2), LOWEST)
    return top + tl.log2(tl.sum(tl.exp2(logits - top[:, :, None]), 2))
