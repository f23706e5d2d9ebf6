"""Operations that only hybrids need, each a reference and a kernel as in :mod:`foveate.ops`.

``gated`` is the attention of NSA's three branches, ``until`` attention to keys that leave, ``running`` a buffer of the
best tokens so far, ``recur`` the gated delta rule.
"""

from foveate.hybrids.ops import gated, running, until
from foveate.hybrids.ops.gated import choose_blocks
from foveate.hybrids.ops.running import LARGEST_BUFFER, Leaving
from foveate.hybrids.ops.until import LARGEST_DIM
from foveate.ops.dispatch import dispatch

attend_gated = dispatch(gated.attend_gated, "foveate.hybrids.ops.gated_kernel")
attend_until = dispatch(until.attend_until, "foveate.hybrids.ops.until_kernel")
replace_weakest = dispatch(running.replace_weakest, "foveate.hybrids.ops.running_kernel")
running_best = dispatch(running.running_best, "foveate.hybrids.ops.running_kernel")

__all__ = [
    "LARGEST_BUFFER",
    "LARGEST_DIM",
    "Leaving",
    "attend_gated",
    "attend_until",
    "choose_blocks",
    "replace_weakest",
    "running_best",
]
