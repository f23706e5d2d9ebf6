"""The online softmax of attention kernels: adding a block of keys, the final normalisation, and the exact merge of
parts.

See Milakov and Gimelshein 2018, and FlashDecoding (Dao et al. 2023).

A running softmax is ``top [M]``, the largest logit so far, ``weight [M]``, the sum of ``2 ** (logit - top)``, and ``out
[M, DV]``, the sum of values with the same weights. Logits are to the base 2: their scale includes ``LOG2E``.

Shapes: M rows (queries or heads), N keys of a block, DV dimensions of values, P parts.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4e38)
"""Where a running maximum starts: finite, so that a row which has seen nothing yet weighs its past with 1."""


@triton.jit
def exponentials(logits, top):
    """The first half of :func:`online`, for ``logits [M, N]`` and ``top [M]``: the new ``top [M]``, ``p [M, N]`` and
    ``fade [M]``.

    ``p`` holds the weights of the block, and ``fade`` rescales what the running softmax holds so far. The caller can
    load the values between the two halves.
    """
    higher = tl.maximum(top, tl.max(logits, 1))  # [M]
    return higher, tl.exp2(logits - higher[:, None]), tl.exp2(top - higher)  # [M], [M, N], [M]


@triton.jit
def accumulate(p, v, fade, weight, out):
    """The second half of :func:`online`: the new ``weight [M]`` and ``out [M, DV]`` with the values ``v [N, DV]`` of
    the block."""
    out = tl.dot(p.to(v.dtype), v, out * fade[:, None], input_precision="ieee")  # [M, DV]
    return weight * fade + tl.sum(p, 1), out  # [M], [M, DV]


@triton.jit
def online(logits, v, top, weight, out):
    """Adds a block of ``logits [M, N]``, -inf where no key is, and of values ``v [N, DV]`` to a running softmax."""
    top, p, fade = exponentials(logits, top)  # [M], [M, N], [M]
    weight, out = accumulate(p, v, fade, weight, out)  # [M], [M, DV]
    return top, weight, out


@triton.jit
def merge(parts, lse, top, weight, out):
    """Adds attention outputs ``parts [P, M, DV]``, or ``[P, DV]`` for a single row, each normalised by itself, to a
    running softmax.

    ``lse [P, M]`` or ``[P]`` holds the parts' log-sum-exps to the base 2, -inf for a part without keys.
    """
    higher = tl.maximum(top, tl.max(lse, 0))  # [M] or scalar
    fade = tl.exp2(top - higher)  # [M] or scalar
    if len(lse.shape) == 1:
        share = tl.exp2(lse - higher)  # [P]
        out = out * fade + tl.sum(parts * share[:, None], 0)  # [DV]
    else:
        share = tl.exp2(lse - higher[None, :])  # [P, M]
        out = out * fade[:, None] + tl.sum(parts * share[:, :, None], 0)  # [M, DV]
    return higher, weight * fade + tl.sum(share, 0), out  # [M], [M], [M, DV]


@triton.jit
def log_sum_exp(top, weight, NATURAL: tl.constexpr = False):
    """Log-sum-exp ``[M]`` of a running softmax, to the base 2 or ``NATURAL``; -inf where it has seen no key."""
    if NATURAL:
        return tl.where(weight == 0, float("-inf"), (top + tl.log2(weight)) / LOG2E)  # [M]
    else:
        return tl.where(weight == 0, float("-inf"), top + tl.log2(weight))  # [M]


@triton.jit
def normalised(weight, out):
    """Output ``[M, DV]`` (or ``[DV]`` for a single row) of a running softmax; 0 where it has seen no key."""
    total = tl.where(weight == 0, 1.0, weight)  # [M] or scalar
    if len(out.shape) == 1:
        return out / total  # [DV]
    else:
        return out / total[:, None]  # [M, DV]


@triton.jit
def store_part(
    out_ptr, lse_ptr, place, exist, top, weight, out, VALUE_DIM: tl.constexpr, NATURAL: tl.constexpr = False
):
    """Stores output and log-sum-exp of a running softmax where rows ``exist [M]``.

    They go to ``place [M]`` of ``out [.., Dv]`` and ``lse [..]``, both contiguous. The log-sum-exp is to the base 2 or
    ``NATURAL``.
    """
    dims = tl.arange(0, out.shape[1])  # [DV]
    out = normalised(weight, out)  # [M, DV]
    lse = log_sum_exp(top, weight)  # [M]
    mask = exist[:, None] & (dims < VALUE_DIM)[None, :]  # [M, DV]
    tl.store(out_ptr + place[:, None] * VALUE_DIM + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + place, lse / LOG2E if NATURAL else lse, mask=exist)


@triton.jit
def log_sums(logits):
    """Logarithms ``[M, N]`` of the sums of ``2 ** logits`` over the last axis of ``logits [M, N, S]``; -inf where all
    are -inf."""
    top = tl.maximum(tl.max(logits, 2), LOWEST)  # [M, N]
    return top + tl.log2(tl.sum(tl.exp2(logits - top[:, :, None]), 2))  # [M, N]
