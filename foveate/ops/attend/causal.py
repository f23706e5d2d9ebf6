"""Dense causal attention by the fastest path that is right: a library, a kernel of ours under a cap, or blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from foveate.ops.attend import dense, library, window
from foveate.ops.attend.attended import Attended
from foveate.ops.attend.library import PromptHeads
from foveate.ops.attend.partials import with_sinks
from foveate.ops.attend.sdpa import scaled_dot_product
from foveate.ops.checks import check_own_keys
from foveate.ops.dispatch import dispatch, runs_kernel
from foveate.ops.kv import KV
from foveate.ops.logits import Logits

_capped = dispatch(window.attend_capped, "foveate.ops.attend.window_kernel")


def attend_causal(
    q: Tensor,
    kv: KV,
    *,
    logits: Logits,
    offset: int = 0,
    need_lse: bool = False,
) -> Attended:
    """Dense causal attention of a block of queries: query i sees the keys ``0 .. offset + i``.

    No ``Lq x Lk`` tensor and no mask of that size exists. The fastest library that takes the queries, keys and values
    computes the attention (:mod:`foveate.ops.attend.library`). Under a cap that no library takes, foveate's own kernel
    does. The reference computes everything else; it also runs whenever autograd records, except in the simplest case,
    which PyTorch's kernel takes. Learned sinks take their share of the result by the log-sum-exp. The output is the
    same to the last bit with and without the log-sum-exp.

    Args:
        q: ``[B, Hq, Lq, D]``.
        kv: ``k, v [B, Hkv, Lk, D(v)]`` in one piece, with ``Lk >= offset + Lq``. Keys from ``offset + Lq`` on are not
            read.
        offset: number of keys before the first query's own.
        logits: see :func:`attend`.

    Raises:
        ValueError: for fewer than ``offset + Lq`` keys, a negative offset, queries that do not fit the keys, a KV in
            blocks or with lengths, sinks of other heads, or a cap that is not a finite number above 0.
    """
    kv.check_queries(q, values=True)
    kv.check_unpaged()
    check_own_keys(kv.num_keys, q.shape[2], offset)
    logits.check_heads(q)
    if logits.sinks is not None:
        without = logits.without_sinks()
        return with_sinks(attend_causal(q, kv, logits=without, offset=offset, need_lse=True), logits.sinks)
    k, v = (x[:, :, : offset + q.shape[2]] for x in (kv.k, kv.v))
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        if offset == 0 and not need_lse and not library.obstacle(library.PYTORCH, q, k, v, softcap=logits.softcap):
            return Attended(scaled_dot_product(q, k, v, logits.scaling, causal=True))
        return dense.attend_causal(q, kv, logits=logits, offset=offset, need_lse=need_lse)
    found = library.attend(q, k, v, logits=logits, offset=offset, need_lse=need_lse)
    if found is not None:
        return found
    if logits.softcap is not None:
        return _capped(q, KV(k, v), logits=logits, offset=offset)
    return dense.attend_causal(q, kv, logits=logits, offset=offset, need_lse=need_lse)


def prompt_path(heads: PromptHeads) -> str:
    """The code that computes dense prompt attention: a library by its name, a kernel under a cap, or blocks in
    torch."""
    if found := library.in_use(heads):
        return found
    kernel = heads.softcap is not None and heads.device.type == "cuda" and runs_kernel("attend_capped")
    return "kernel (Triton)" if kernel else "blocks (torch)"
