"""How much each key matters to the heads that share it: the attention of one query a row, pooled."""

import torch
from torch import Tensor

from foveate.ops._math import block_length, first_keys, fold_group
from foveate.ops.block_table import BlockTable
from foveate.ops.score.nodes import key_logits


def pooled_mass(
    q: Tensor,
    k: Tensor,
    *,
    scaling: float,
    key_scales: Tensor | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    sink_logits: Tensor | None = None,
    softcap: float | None = None,
    pooling: str = "post_softmax",
    pool: str = "kv_head",
    block_table: BlockTable | None = None,
) -> Tensor:
    """The mean of the attention that query heads pay to each key (Kascade, section 3.3), or the most (OmniKV).

    OmniKV's published configuration takes the largest logit instead: a head's logits, unlike its attention, are not
    relative to the head's other keys.

    Args:
        q: ``[B, Hq, 1, D]``.
        k: ``[B, Hkv, N, D]``; read through its strides.
        scaling: factor of the logits.
        key_scales: fp32 ``[B, Hkv, D]``: the keys are ``k``, a copy in fp8, times these, moved or not. The scales go
            into the queries, in the queries' dtype, in which fp8 is exact: products and sums are as of any keys.
        mask: bool, broadcastable to ``[B, Hkv, N]``: True where a key is. The others may hold anything finite.
        lengths: int ``[B]`` or ``[B, Hkv]``: only the first so many keys are there; None: all are.
        sink_logits: ``[Hq]``: a logit of each query head that takes its share of attention and has no key; None: none.
        softcap: each scaled logit x counts as ``softcap * tanh(x / softcap)``; None: as it is.
        pooling: the mean of attention (``post_softmax``) or of its square root (``sqrt``), the largest attention of
            any head (``max``), or the largest scaled logit of any head (``max_logit``), which no sink changes.
        pool: over which heads: those of each ``kv_head``, or of the whole ``layer``.
        block_table: where the keys are when ``k`` is blocks that all rows share, ``[N, Hkv, n, D]``; None: in one
            piece.

    Returns:
        fp32 ``[B, Hkv, N]``, or ``[B, 1, N]`` of the layer; -inf where no key is (in any head).

    Raises:
        ValueError: for a pooling or a pool that there is not, or a table that does not fit.
    """
    check(pooling, pool)
    if block_table is not None:
        (k,) = block_table.gather(q, k)
    if lengths is not None:
        there = first_keys(lengths, k.shape[2])
        mask = there if mask is None else mask & there
    logits = _logits(fold_group(q, k.shape[1]), k, key_scales, scaling, softcap)
    if mask is not None:
        logits.masked_fill_(~mask[:, :, None], float("-inf"))
    mass = logits if pooling == "max_logit" else logits.softmax(-1)
    if sink_logits is not None and pooling != "max_logit":
        sinks = sink_logits.float().view(1, k.shape[1], -1, 1)
        mass = mass * (logits.logsumexp(-1, keepdim=True) - sinks).sigmoid()
    mass = mass.sqrt_() if pooling == "sqrt" else mass
    mass = mass if pool == "kv_head" else mass.flatten(1, 2)[:, None]
    scores = mass.amax(2) if pooling in ("max", "max_logit") else mass.mean(2)
    if mask is not None:
        mask = mask if pool == "kv_head" else mask.all(1, keepdim=True)
        scores = scores.masked_fill_(~mask, float("-inf"))
    return scores


def _logits(rows: Tensor, k: Tensor, key_scales: Tensor | None, scaling: float, softcap: float | None) -> Tensor:
    """Of ``rows [B, Hkv, G, D]``: fp32 ``[B, Hkv, G, N]``; a copy in fp8 is converted block by block."""
    if key_scales is None:
        return key_logits(rows, k, scaling, softcap)
    rows = (rows * key_scales[:, :, None]).to(rows.dtype)
    blocks = k.split(block_length(k[:, :, :1].numel() * 4, k.shape[2]), 2)
    return torch.cat([key_logits(rows, block.to(rows.dtype), scaling, softcap) for block in blocks], -1)


def check(pooling: str, pool: str) -> None:
    """Raise unless these are known."""
    if pooling not in ("post_softmax", "sqrt", "max", "max_logit"):
        raise ValueError(f"pooling must be post_softmax, sqrt, max or max_logit, not {pooling!r}")
    if pool not in ("kv_head", "layer"):
        raise ValueError(f"pool must be kv_head or layer, not {pool!r}")
