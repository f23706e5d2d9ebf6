"""Capped logits in Triton kernels."""

import triton
import triton.language as tl

from foveate.ops.gpu.softmax import LOG2E


def constant(softcap: float | None) -> float:
    """A cap as a constant of a kernel; 0 disables it and compiles no code."""
    return 0.0 if softcap is None else float(softcap)


@triton.jit
def capped(logits, SOFTCAP: tl.constexpr, NATURAL: tl.constexpr = False):
    """``SOFTCAP * tanh(logit / SOFTCAP)`` of ``logits [M, N]``, to the base 2 or ``NATURAL``, in the same base.

    ``SOFTCAP`` 0 returns the logits as they are. To the base 2 the cap is multiplied by log2(e), as the logits are.

    tanh x is computed as 1 - 2 / (1 + e^2x) with the fast exponential of the softmax: it has no branch, and it is 1 or
    -1 where the exponential overflows or vanishes. Its error near 0 is 2^-23, so a logit is off by 2^-23 of the cap,
    which is no more than fp32 rounds logits of that size.
    """
    if SOFTCAP > 0:
        LIMIT: tl.constexpr = SOFTCAP if NATURAL else SOFTCAP * LOG2E
        return LIMIT - 2.0 * LIMIT / (1.0 + tl.exp2(logits * (2.0 * LOG2E / LIMIT)))  # [M, N]
    else:
        return logits
