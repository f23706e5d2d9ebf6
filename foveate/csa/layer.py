"""A layer of compressed sparse attention between its input and output projections (StreamIndex, section 3)."""

from typing import NamedTuple

from torch import Tensor

from foveate import ops
from foveate.csa.attention import Window, sparse_attention
from foveate.csa.compressor import compress_tokens
from foveate.csa.indexer import lightning_indexer


class Tokens(NamedTuple):
    """Input of the compressor; see :func:`foveate.csa.compress_tokens`."""

    values: Tensor
    """``[B, L, W]``"""
    gates: Tensor
    """``[B, L, W]``"""
    bias: Tensor
    """``[ratio, W]``"""
    overlap: bool = False


def forward(
    q: Tensor,
    entries: Tensor | Tokens,
    index_q: Tensor,
    index_entries: Tensor | Tokens,
    index_weights: Tensor,
    top_k: int,
    *,
    ratio: int,
    scaling: float,
    window: Window | None = None,
    offset: int = 0,
    sinks: Tensor | None = None,
    key_scales: Tensor | None = None,
    path: str = "auto",
) -> ops.Attended:
    """Compress tokens, select entries, and attend over ``TopK(t) ∪ Window(t)`` (StreamIndex, sections 3 and 5).

    Query i is at position ``offset + i``. A model that normalises or rotates its compressed tokens, as DeepSeek-V4
    does, calls :func:`foveate.csa.compress_tokens` itself and passes the result.

    Args:
        q: ``[B, Hq, S, D]``.
        entries: compressed tokens ``[B, T, D]``, used as keys and values of all heads, or the :class:`Tokens` to
            compress, from the first token of the sequence on.
        index_q: ``[B, S, H, Di]``, bf16, fp16, fp32 or fp8.
        index_entries: keys of the indexer ``[B, T, Di]`` for the same tokens, or the :class:`Tokens` to compress.
        index_weights: ``[B, S, H]``.
        top_k: compressed tokens that a query reads.
        ratio: tokens per entry.
        scaling: factor of the attention's logits.
        window: recent tokens read uncompressed, or None.
        sinks: ``[Hq]``: a logit for each head, or None.
        key_scales: ``[B, T]``: scales of the indexer's keys, or None.
        path: as in :func:`foveate.csa.lightning_indexer`.

    Returns:
        Output ``[B, Hq, S, D]`` in the dtype of q, and the log-sum-exp ``[B, Hq, S]``, sink included.

    Raises:
        ValueError: for what the three functions refuse, and for entries and index entries of different numbers
            of tokens.
    """
    kv, index_k = _compressed(entries, ratio), _compressed(index_entries, ratio)
    if kv.dim() != 3 or kv.shape[:2] != index_k.shape[:2]:
        raise ValueError(
            f"entries and index_entries must be [B, T, ...] of the same tokens, not {list(kv.shape)} and "
            f"{list(index_k.shape)}"
        )
    how = {"ratio": ratio, "offset": offset, "key_scales": key_scales, "path": path}
    indices = lightning_indexer(index_q, index_k, index_weights, top_k, **how)
    kv = kv[:, None]
    return sparse_attention(q, kv, kv, indices, scaling=scaling, window=window, offset=offset, sinks=sinks)


def _compressed(entries: Tensor | Tokens, ratio: int) -> Tensor:
    if not isinstance(entries, Tokens):
        return entries
    if entries.bias.shape[0] != ratio:
        raise ValueError(f"bias must be [ratio, W] with a ratio of {ratio}, not {list(entries.bias.shape)}")
    return compress_tokens(*entries[:3], overlap=entries.overlap)[0]
