"""Capped logits in Triton kernels."""

import triton
import triton.language as tl

from foveate.ops._math import check_softcap

_LOG2E = tl.constexpr(1.4426950408889634)


def constant(softcap: float | None) -> float:
    """A cap as kernels are compiled with it: 0 where there is none, and then nothing of it is compiled.

    Raises:
        ValueError: for a cap that is not a finite number above 0.
    """
    check_softcap(softcap)
    return 0.0 if softcap is None else float(softcap)


@triton.jit
def capped(logits, SOFTCAP: tl.constexpr, NATURAL: tl.constexpr = False):
    """``SOFTCAP * tanh(logit / SOFTCAP)`` of logits to the base 2, or ``NATURAL`` ones; 0: the logits as they are.

    tanh x is 1 - 2 / (1 + e^2x), by the fast exponential that the softmax uses, which the interpreter has, too; without
    a branch, and 1 or -1 where the exponential overflows or vanishes. Near 0 it is off by 2^-23, which is 2^-23 of the
    cap in a logit: no more than fp32 rounds logits of the cap's size.
    """
    if SOFTCAP > 0:
        LIMIT: tl.constexpr = SOFTCAP if NATURAL else SOFTCAP * _LOG2E
        return LIMIT - 2.0 * LIMIT / (1.0 + tl.exp2(logits * (2.0 * _LOG2E / LIMIT)))
    else:
        return logits
