"""Which compressed keys each query reads: exact top-k of the lightning indexer's scores, in bounded memory.

Three paths give the same sets, up to how products are rounded. ``materialised`` is the specification, with the tensor
of products ``[B, S, H, T]`` that public implementations make. ``chunked`` is StreamIndex's algorithm 2: tiles of
queries and keys, a top-k of each tile merged into a running one. ``fused`` holds the scores of some queries for all
keys that they see, and the largest of every few of them, so that selection reads little of what scoring wrote.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from foveate import ops

PATHS = ("auto", "materialised", "chunked", "fused")
SCORES_BYTES = 512 << 20
"""Scores that the fused path holds at once."""
_SHORT = 2048
"""Keys up to which rows are not told apart."""
_FEWEST = 16
QUERY_CHUNK, KEY_CHUNK = 2048, 8192
"""Tiles of the chunked path, as in StreamIndex, section 6.2."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def lightning_indexer(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    top_k: int,
    *,
    ratio: int = 1,
    offset: int = 0,
    starts: Tensor | None = None,
    key_scales: Tensor | None = None,
    path: str = "auto",
) -> Tensor:
    """The ``top_k`` keys with the largest ``I(t, s) = Σ_h weights[t, h] · ReLU(q[t, h] · k[s])`` for each query.

    Query i is at position ``offset + i`` and may read the first ``(offset + i + 1) // ratio`` keys, of which each
    stands for ``ratio`` tokens. The order is total: the larger score first, then the smaller index (StreamIndex,
    section 4.1).

    Args:
        q: ``[B, S, H, D]``, bf16, fp16, fp32 or fp8 (e4m3, :func:`to_fp8`).
        k: ``[B, T, D]``, of the same dtype.
        weights: ``[B, S, H]``, of any sign, with all scales of queries and heads in them; read as fp32.
        top_k: keys a query.
        ratio: tokens a key.
        offset: tokens before the first query's.
        starts: int64 ``[B]``: the first key of each row that is not padding, or None. Padding queries get -1.
        key_scales: ``[B, T]``: what a key's scores are multiplied by, read as fp32; None for 1.
        path: see above; ``auto`` is ``fused`` on a GPU, and ``chunked`` elsewhere.

    Returns:
        int32 ``[B, S, top_k]``: indices, ascending; -1 at the end where a query may read fewer.

    Raises:
        ValueError: for shapes that do not agree, a dtype that is not supported, ``top_k``, ``ratio`` or ``offset`` out
            of range, and scores that are NaN. A decode step on a GPU (one query, or inside a CUDA graph) does not wait
            to find that out: its rows select nothing, -1, if a score of the batch is NaN.
    """
    check(q, k, weights, top_k, ratio, offset, starts, key_scales, path)
    weights, key_scales = weights.float(), None if key_scales is None else key_scales.float()
    found, lost = select(q, k, weights, top_k, ratio, offset, starts, key_scales, path)
    return _without_nan(found, lost)


def select(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    top_k: int,
    ratio: int,
    offset: int,
    starts: Tensor | None,
    key_scales: Tensor | None,
    path: str = "auto",
    scores: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As :func:`lightning_indexer`, for arguments that are right, and without looking at what is lost.

    Args:
        weights, key_scales: fp32.
        scores: fp32 ``[B, S, top_k]`` to write the scores of the selected keys to, -inf for none.

    Returns:
        The indices, and whether a score is NaN: bool ``[1]``.
    """
    if path == "auto":
        path = "fused" if q.is_cuda else "chunked"
    run = {"materialised": _materialised, "chunked": _chunked, "fused": _fused}[path]
    keys = k[:, : min((offset + q.shape[1]) // ratio, k.shape[1])]
    key_scales = None if key_scales is None else key_scales[:, : keys.shape[1]]
    starts = None if starts is None else starts.contiguous()
    found = torch.full((*q.shape[:2], top_k), -1, dtype=torch.int32, device=q.device)
    if scores is not None:
        scores.fill_(float("-inf"))
    if not keys.shape[1] or not q.shape[1]:
        return found, torch.zeros(1, dtype=torch.bool, device=q.device)
    asked = _Asked(q, keys, weights, top_k, ratio, offset, starts, key_scales)
    return found, run(asked, found, scores).reshape(1)


def to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors in fp8 and their scales, as DeepSeek-V3.2 has its index queries and keys.

    A scale is the least power of two with which the largest component of a vector is not beyond what e4m3 holds::

        q, of_q = to_fp8(q)
        k, of_k = to_fp8(k)
        lightning_indexer(q, k, weights * of_q, top_k, key_scales=of_k)

    Args:
        x: ``[..., D]``, bf16, fp16 or fp32.

    Returns:
        e4m3 ``[..., D]``, and fp32 ``[...]``.
    """
    largest = x.abs().amax(-1).float().clamp_min(torch.finfo(torch.float32).tiny * _LARGEST)
    scale = torch.exp2(torch.log2(largest / _LARGEST).ceil())
    scale = torch.where(largest > _LARGEST * scale, 2 * scale, scale)  # where that was rounded
    return (x.float() / scale[..., None]).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), scale


class _Asked(NamedTuple):
    """What is selected from: the arguments of :func:`select`, with the keys that some query may read."""

    q: Tensor
    k: Tensor
    weights: Tensor
    top_k: int
    ratio: int
    offset: int
    starts: Tensor | None
    key_scales: Tensor | None


def _materialised(asked: _Asked, found: Tensor, values: Tensor | None) -> Tensor:
    q, k, weights, top_k, ratio, offset, starts, key_scales = asked
    products = torch.einsum("bshd,btd->bsht", q.float(), k.float()).relu_()
    scores = (products * weights[..., None]).sum(2)
    if key_scales is not None:
        scores *= key_scales[:, None]
    unseen = ops.unseen_keys(ops.visible_keys(q.shape[1], k.shape[1], ratio, offset, q.device), starts, k.shape[1])
    scores.masked_fill_(unseen, float("-inf"))
    lost = scores.isnan().any()
    chosen = ops.topk(scores.nan_to_num_(0.0, float("inf"), float("-inf")), top_k)
    found[..., : chosen.shape[-1]] = chosen
    _look_up(scores, found, values)
    return lost


def _chunked(asked: _Asked, found: Tensor, values: Tensor | None) -> Tensor:
    q, k, weights, top_k, ratio, offset, starts, key_scales = asked
    visible = ops.visible_keys(q.shape[1], k.shape[1], ratio, offset, q.device)
    lost = torch.zeros(1, dtype=torch.bool, device=q.device)
    for first in range(0, q.shape[1], QUERY_CHUNK):
        queries = slice(first, first + QUERY_CHUNK)
        number = min((offset + min(first + QUERY_CHUNK, q.shape[1])) // ratio, k.shape[1])
        best = ops.StreamingTopK(top_k)
        for start in range(0, max(number, 1), KEY_CHUNK):
            some = slice(start, min(start + KEY_CHUNK, number))
            scores, _, nan = ops.indexer_scores(
                q[:, queries],
                k[:, some],
                weights[:, queries],
                ratio=ratio,
                offset=offset + first - start * ratio,
                starts=None if starts is None else starts - start,
                key_scales=None if key_scales is None else key_scales[:, some],
            )
            scores.masked_fill_(ops.unseen_keys(visible[queries], starts, scores.shape[-1], start), float("-inf"))
            lost |= nan > 0
            best.update(scores.nan_to_num_(0.0, float("inf"), float("-inf")), start)
        chosen, of_chosen = best.result()
        found[:, queries, : chosen.shape[-1]] = chosen
        if values is not None:
            values[:, queries, : chosen.shape[-1]] = of_chosen
    return lost


def _fused(asked: _Asked, found: Tensor, values: Tensor | None) -> Tensor:
    q, k, weights, top_k, ratio, offset, starts, key_scales = asked
    batch, queries = q.shape[:2]
    lost = torch.zeros(1, dtype=torch.int32, device=q.device)
    first = 0
    while first < queries:
        rows, at = _rows(queries - first, batch, k.shape[1], ratio, offset + first), offset + first
        some = slice(first, first + rows)
        keys = k[:, : min((at + rows) // ratio, k.shape[1])]
        scales = None if key_scales is None else key_scales[:, : keys.shape[1]]
        how = {"ratio": ratio, "offset": at, "starts": starts, "key_scales": scales}
        scores, maxima, nan = ops.indexer_scores(q[:, some], keys, weights[:, some], **how)
        visible = ops.visible_keys(rows, keys.shape[1], ratio, at, q.device)
        found[:, some] = ops.topk_of_blocks(scores, maxima, visible, top_k, ops.INDEXER_BLOCK, starts)
        _look_up(scores, found[:, some], None if values is None else values[:, some])
        lost |= nan
        first += rows
        del scores, maxima  # before the next are made
    return lost > 0


def _rows(queries: int, batch: int, keys: int, ratio: int, offset: int) -> int:
    """How many of the queries to hold scores of: as many as there is room for, the later they stand the fewer; and no
    more than have at most twice the keys of the first, because what selection does is by the longest row."""
    room = _SHORT
    while room * ratio - offset < 2 * _FEWEST:  # a few would be scored by another kernel, with other roundings
        room *= 2
    rows = min(queries, room * ratio - offset)
    while rows > 1 and 4 * batch * rows * min((offset + rows) // ratio, keys) > SCORES_BYTES:
        rows -= max(1, rows // 8)
    if 0 < queries - rows < _FEWEST < rows:
        rows -= _FEWEST  # as above, for the last ones
    return rows


def _look_up(scores: Tensor, found: Tensor, values: Tensor | None) -> None:
    """The scores ``[B, S, T]`` of what is selected, where they are wanted."""
    if values is not None:
        chosen = scores.gather(-1, found.clamp_min(0).long()).nan_to_num_(0.0, float("inf"), float("-inf"))
        values.copy_(chosen.masked_fill_(found < 0, float("-inf")))


def _without_nan(found: Tensor, lost: Tensor) -> Tensor:
    """The selection, unless a score is NaN: then no set of keys is right."""
    if found.is_cuda and (found.shape[1] == 1 or torch.cuda.is_current_stream_capturing()):
        return found.masked_fill_(lost, -1)
    if bool(lost.any()):
        raise ValueError("scores are NaN: q, k or weights hold NaN or infinities, and no set of keys is right")
    return found


def check(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    top_k: int,
    ratio: int,
    offset: int,
    starts: Tensor | None,
    key_scales: Tensor | None,
    path: str,
) -> None:
    """Raises ValueError for arguments of :func:`lightning_indexer` that cannot be."""
    if q.ndim != 4 or k.ndim != 3 or k.shape[0] != q.shape[0] or k.shape[2] != q.shape[3]:
        raise ValueError(f"q must be [B, S, H, D] and k [B, T, D], not {list(q.shape)} and {list(k.shape)}")
    if weights.shape != q.shape[:3]:
        raise ValueError(f"weights must be [B, S, H] = {list(q.shape[:3])}, not {list(weights.shape)}")
    if q.dtype not in _DTYPES or k.dtype != q.dtype:
        raise ValueError(f"q and k must both be bf16, fp16, fp32 or float8_e4m3fn, not {q.dtype} and {k.dtype}")
    for name, value, least in (("top_k", top_k, 1), ("ratio", ratio, 1), ("offset", offset, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")
    if starts is not None and (starts.shape != q.shape[:1] or starts.dtype != torch.int64):
        raise ValueError(f"starts must be int64 [{q.shape[0]}], not {starts.dtype} {list(starts.shape)}")
    if key_scales is not None and key_scales.shape != k.shape[:2]:
        raise ValueError(f"key_scales must be [B, T] = {list(k.shape[:2])}, not {list(key_scales.shape)}")
    if path not in PATHS:
        raise ValueError(f"path must be one of {', '.join(PATHS)}, not {path!r}")
