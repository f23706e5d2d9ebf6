"""The gated delta rule by the fastest path that is right: the library's kernels, chunks, or one step."""

import torch
from torch import Tensor

from foveate.hybrids.ops.recur import chunked, library, reference
from foveate.hybrids.ops.recur.reference import Recurred


@torch.compiler.disable
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, *, state: Tensor | None = None
) -> Recurred:
    """Read a sequence into a state of fixed size and query it after every token, see
    :func:`foveate.hybrids.ops.recur.reference.gated_delta_rule`, which has the same arguments.

    Raises:
        ValueError: for shapes that do not fit together.
    """
    reference.check(q, k, v, log_decay, beta, state)
    if not library.obstacle(q, v):
        return library.gated_delta_rule(q, k, v, log_decay, beta, state=state)
    rule = reference if q.shape[2] == 1 else chunked
    return rule.gated_delta_rule(q, k, v, log_decay, beta, state=state)


def rule_in_use(device: torch.device, heads: int, head_dim: int, value_dim: int, dtype: torch.dtype) -> str:
    """Which path runs there, and why not the library's."""
    sample = torch.empty(1, heads, 1, head_dim, dtype=dtype, device=device)
    reason = library.obstacle(sample, sample.new_empty(1, heads, 1, value_dim))
    return f"torch ({reason})" if reason else "flash-linear-attention"
