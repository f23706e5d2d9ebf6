"""The lightning indexer's score of compressed keys (DeepSeek-V3.2; StreamIndex, section 3)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from foveate.ops._math import block_length, matmul_fp32
from foveate.ops.checks import check_number

BLOCK = 16
"""Number of keys that share one maximum of scores."""


class IndexerScores(NamedTuple):
    """Scores of keys for queries, and the largest score of every block of :data:`BLOCK` keys."""

    scores: Tensor
    """fp32 ``[B, S, T]``; the entry of a key that a query may not see is undefined."""
    maxima: Tensor
    """fp32 ``[B, S, ceil(T / BLOCK)]``: the largest score over the keys of a block that a query may see; undefined if
    it may see none of them."""
    lost: Tensor
    """int32 ``[1]``: not 0 if the score of a key that a query may see is NaN, or if a weight of a query that sees a key
    is not finite."""


def room_for(q: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Uninitialised memory for scores ``[B, S, T]`` and maxima. Rows are aligned to the 16 bytes that selection reads
    at once."""
    widths = number, -(-number // BLOCK)
    made = (torch.empty(*q.shape[:2], -(-width // 4) * 4, dtype=torch.float32, device=q.device) for width in widths)
    scores, maxima = (x[..., :width] for x, width in zip(made, widths))
    return scores, maxima


def indexer_scores(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    ratio: int = 1,
    offset: int = 0,
    starts: Tensor | None = None,
    key_scales: Tensor | None = None,
) -> IndexerScores:
    """``I(t, s) = Σ_h weights[t, h] · ReLU(q[t, h] · k[s])``, in fp32, for the keys before each query.

    Query i is at position ``offset + i`` and sees the first ``(offset + i + 1) // ratio`` keys. Each key stands for
    ``ratio`` tokens. No tensor of heads by keys by queries exists.

    Args:
        q: ``[B, S, H, D]``.
        k: ``[B, T, D]``.
        weights: fp32 ``[B, S, H]``, of any sign; they include the scales of the queries.
        ratio: number of tokens that a key stands for.
        offset: position of the first query.
        starts: int64 ``[B]``: number of keys of padding at the beginning, which no query sees; None: no padding.
        key_scales: fp32 ``[B, T]``: factor of a key's scores, for keys in fp8; None: 1.

    Raises:
        ValueError: for shapes that do not fit, weights that are not fp32 or a ratio below 1.
    """
    number = k.shape[1]
    scores = weighted_relu(q, k, weights, key_scales)
    unseen = unseen_keys(visible_keys(q.shape[1], number, ratio, offset, q.device), starts, number)
    lost = lost_scores(scores, weights, unseen)
    seen = scores.masked_fill(unseen, float("-inf"))
    padded = torch.nn.functional.pad(seen, (0, -number % BLOCK), value=float("-inf"))
    return IndexerScores(scores, padded.unflatten(-1, (-1, BLOCK)).amax(-1), lost)


def check(q: Tensor, k: Tensor, weights: Tensor, *, ratio: int = 1, **_: Any) -> None:
    """Raise ValueError for invalid arguments of :func:`indexer_scores`."""
    check_number("ratio", ratio, 1)
    keys = len(q), k.shape[1], q.shape[-1]
    if q.dim() != 4 or weights.dtype != torch.float32 or weights.shape != q.shape[:3] or k.shape != keys:
        raise ValueError(
            f"shapes or dtypes do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}, "
            f"weights {tuple(weights.shape)} {weights.dtype}"
        )


def lost_scores(scores: Tensor, weights: Tensor, unseen: Tensor) -> Tensor:
    """:attr:`IndexerScores.lost`, from scores ``[B, S, T]``, weights ``[B, S, H]`` and :func:`unseen_keys`."""
    broken = scores.isnan().logical_or_(~weights.isfinite().all(-1, keepdim=True))
    return broken.logical_and_(~unseen).any().to(torch.int32).reshape(1)


def weighted_relu(q: Tensor, k: Tensor, weights: Tensor, key_scales: Tensor | None = None) -> Tensor:
    """The scores of all keys, whether a query may see them or not: fp32 ``[B, S, T]``."""
    batch, queries, heads, _ = q.shape
    if q.dtype == torch.float8_e4m3fn:  # bf16 represents every fp8 value
        q, k = q.bfloat16(), k.bfloat16()
    scores = q.new_empty(batch, queries, k.shape[1], dtype=torch.float32)
    step = block_length(4 * batch * heads * k.shape[1], queries)
    for first in range(0, queries, step):
        some = q[:, first : first + step]
        products = matmul_fp32(some.flatten(1, 2), k.transpose(1, 2)).relu_().unflatten(1, (-1, heads))
        scores[:, first : first + step] = torch.einsum("bsht,bsh->bst", products, weights[:, first : first + step])
    return scores if key_scales is None else scores.mul_(key_scales[:, None])


def unseen_keys(visible: Tensor, starts: Tensor | None, number: int, first: int = 0) -> Tensor:
    """A mask of the keys that a query does not see, among ``number`` keys from key ``first`` on: bool
    ``[1 or B, S, number]``."""
    keys = torch.arange(first, first + number, device=visible.device)
    unseen = (keys >= visible[:, None])[None]
    return unseen if starts is None else unseen | (keys < starts[:, None, None])


def visible_keys(queries: int, number: int, ratio: int, offset: int, device: torch.device) -> Tensor:
    """The number of keys that each query sees, at most ``number``: int64 ``[S]`` (StreamIndex, section 4.2)."""
    positions = torch.arange(offset, offset + queries, device=device)
    return torch.div(positions + 1, ratio, rounding_mode="floor").clamp_max(number)
