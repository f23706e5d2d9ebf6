"""Which compressed keys each query reads: exact top-k of the lightning indexer's scores, in bounded memory.

Three paths select the same sets, up to the rounding of products. ``materialised`` is the specification: it computes the
tensor of products ``[B, S, H, T]``, as public implementations do. ``chunked`` is StreamIndex's algorithm 2: it scores
tiles of queries and keys and merges the top-k of each tile into a running top-k. ``fused`` scores a chunk of queries
against all keys that they see and keeps each block's maximum, so that selection reads only a few blocks of scores.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from foveate import ops
from foveate.ops.checks import check_number
from foveate.ops.score.indexer import lost_scores

PATHS = ("auto", "materialised", "chunked", "fused")
SCORES_BYTES = 512 << 20
"""Bytes of scores that the fused path holds at once."""
MATERIALISED = 1 << 20
"""Products (queries × heads × keys) up to which a CPU takes the materialised path, which is no slower there."""
_SHORT = 2048
"""Keys up to which queries are scored together, however different the number of keys that they see."""
_FEWEST = 16
"""Least number of queries scored together, whatever memory their scores take. Fewer would run another kernel, which
rounds differently. At most 31 queries are scored so, and their scores take at most half the bytes of bf16 keys of 128
dimensions."""
QUERY_CHUNK, KEY_CHUNK = 2048, 8192
"""Tiles of the chunked path, as in StreamIndex, section 6.2."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


@torch.no_grad()
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
    lost: Tensor | None = None,
) -> Tensor:
    """Select the ``top_k`` keys with the largest ``I(t, s) = Σ_h weights[t, h] · ReLU(q[t, h] · k[s])`` for each query.

    Query i is at position ``offset + i`` and may read the first ``(offset + i + 1) // ratio`` keys. Each key stands for
    ``ratio`` tokens. The order is total: the larger score first, then the smaller index (StreamIndex, section 4.1).

    Args:
        q: ``[B, S, H, D]``, bf16, fp16, fp32 or fp8 (e4m3, :func:`to_fp8`). Gradients do not reach it.
        k: ``[B, T, D]``, of the same dtype.
        weights: ``[B, S, H]``, of any sign and finite, with scales of queries and heads multiplied in; read as fp32.
        top_k: keys per query.
        ratio: tokens per key.
        offset: number of tokens before the first query.
        starts: int64 ``[B]``: the first key of each row after its padding; None: no padding. Padding queries get -1.
        key_scales: ``[B, T]``: factors of the keys' scores, read as fp32; None: 1.
        path: see above. ``auto`` is ``fused`` on a GPU, whatever the size. Elsewhere it is ``materialised`` up to
            :data:`MATERIALISED` products and ``chunked`` beyond.
        lost: int64 ``[1]`` on the same device, to which a decode step that selects nothing because of NaN (see below)
            adds 1; None: nothing is counted.

    Returns:
        int32 ``[B, S, top_k]``: indices, ascending; -1 at the end if a query may read fewer than ``top_k`` keys.

    Raises:
        ValueError: for shapes that do not agree, tensors on several devices, a dtype that is not supported, ``top_k``,
            ``ratio`` or ``offset`` out of range, and, for queries that see a key, weights that are not finite and
            scores that are NaN. A decode step on a GPU (one query, or inside a CUDA graph) does not synchronise to
            check these two: if one occurs in the batch, all rows select nothing (-1).
    """
    check(q, k, weights, top_k, ratio, offset, starts, key_scales, path)
    if lost is not None and (lost.shape != (1,) or lost.dtype != torch.int64 or lost.device != q.device):
        raise ValueError(f"lost must be int64 [1] on {q.device}, not {lost.dtype} {list(lost.shape)} on {lost.device}")
    weights, key_scales = weights.float(), None if key_scales is None else key_scales.float()
    found, nothing = select(q, k, weights, top_k, ratio, offset, starts, key_scales, path)
    if not _waits(found):
        if lost is not None:
            lost += nothing
        return found.masked_fill_(nothing, -1)
    if bool(nothing):
        raise refusal(q, k[:, : (offset + q.shape[1]) // ratio], weights, key_scales)
    return found


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
    """Select keys as :func:`lightning_indexer` does, without checks of arguments and without raising for NaN.

    Args:
        weights, key_scales: fp32.
        scores: fp32 ``[B, S, top_k]`` to write the scores of the selected keys to, -inf for none.

    Returns:
        The indices, and bool ``[1]``: whether a score is NaN or a weight is not finite.
    """
    keys = k[:, : min((offset + q.shape[1]) // ratio, k.shape[1])]
    if path == "auto":
        few = q.shape[:3].numel() * keys.shape[1] <= MATERIALISED
        path = "fused" if q.is_cuda else "materialised" if few else "chunked"
    run = {"materialised": _materialised, "chunked": _chunked, "fused": _fused}[path]
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
    """Quantise vectors to fp8 with one scale each, as DeepSeek-V3.2 does for index queries and keys.

    A scale is the least power of two for which the largest component of the vector fits e4m3::

        q, of_q = to_fp8(q)
        k, of_k = to_fp8(k)
        lightning_indexer(q, k, weights * of_q, top_k, key_scales=of_k)

    Args:
        x: ``[..., D]``, bf16, fp16 or fp32.

    Returns:
        e4m3 ``[..., D]``, and fp32 ``[...]``.

    Raises:
        ValueError: for another dtype, and vectors of no dimensions.
    """
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"x must be bf16, fp16 or fp32, not {x.dtype}")
    if not x.dim() or not x.shape[-1]:
        raise ValueError(f"x must be [..., D] with D of at least 1, not {list(x.shape)}")
    largest = x.abs().amax(-1).float().clamp_min(torch.finfo(torch.float32).tiny * _LARGEST)
    scale = torch.exp2(torch.log2(largest / _LARGEST).ceil())
    scale = torch.where(largest > _LARGEST * scale, 2 * scale, scale)  # log2 may have been rounded down
    return (x.float() / scale[..., None]).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), scale


class _Asked(NamedTuple):
    """Arguments of :func:`select`; ``k`` holds only keys that some query may read."""

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
    scores = materialised_scores(q, k, weights, key_scales)
    unseen = ops.score.unseen_keys(
        ops.score.visible_keys(q.shape[1], k.shape[1], ratio, offset, q.device), starts, k.shape[1]
    )
    lost = lost_scores(scores, weights, unseen) > 0
    scores.masked_fill_(unseen, float("-inf"))
    chosen = ops.topk(scores.nan_to_num_(0.0, float("inf"), float("-inf")), top_k)
    found[..., : chosen.shape[-1]] = chosen
    _look_up(scores, found, values)
    return lost


def materialised_scores(q: Tensor, k: Tensor, weights: Tensor, key_scales: Tensor | None) -> Tensor:
    """Scores of all keys, future ones included, fp32 ``[B, S, T]``, from the tensor of products ``[B, S, H, T]``."""
    products = torch.einsum("bshd,btd->bsht", q.float(), k.float()).relu_()
    scores = (products * weights[..., None]).sum(2)
    return scores if key_scales is None else scores.mul_(key_scales[:, None])


def _chunked(asked: _Asked, found: Tensor, values: Tensor | None) -> Tensor:
    q, k, weights, top_k, ratio, offset, starts, key_scales = asked
    visible = ops.score.visible_keys(q.shape[1], k.shape[1], ratio, offset, q.device)
    lost = torch.zeros(1, dtype=torch.bool, device=q.device)
    for first in range(0, q.shape[1], QUERY_CHUNK):
        queries = slice(first, first + QUERY_CHUNK)
        number = min((offset + min(first + QUERY_CHUNK, q.shape[1])) // ratio, k.shape[1])
        best = ops.select.StreamingTopK(top_k)
        for start in range(0, max(number, 1), KEY_CHUNK):
            some = slice(start, min(start + KEY_CHUNK, number))
            scores, _, nan = ops.score.indexer_scores(
                q[:, queries],
                k[:, some],
                weights[:, queries],
                ratio=ratio,
                offset=offset + first - start * ratio,
                starts=None if starts is None else starts - start,
                key_scales=None if key_scales is None else key_scales[:, some],
            )
            scores.masked_fill_(ops.score.unseen_keys(visible[queries], starts, scores.shape[-1], start), float("-inf"))
            lost |= nan > 0
            best.update(scores.nan_to_num_(0.0, float("inf"), float("-inf")), start)
        chosen, of_chosen = best.result()
        found[:, queries, : chosen.shape[-1]] = chosen
        if values is not None:
            values[:, queries, : chosen.shape[-1]] = of_chosen
    return lost


def _fused(asked: _Asked, found: Tensor, values: Tensor | None) -> Tensor:
    q, k, weights, top_k, ratio, offset, starts, key_scales = asked
    lost = torch.zeros(1, dtype=torch.int32, device=q.device)
    for some in cuts(q.shape[1], q.shape[0], k.shape[1], ratio, offset):
        rows, at = some.stop - some.start, offset + some.start
        keys = k[:, : min((at + rows) // ratio, k.shape[1])]
        scales = None if key_scales is None else key_scales[:, : keys.shape[1]]
        how = {"ratio": ratio, "offset": at, "starts": starts, "key_scales": scales}
        scores, maxima, nan = ops.score.indexer_scores(q[:, some], keys, weights[:, some], **how)
        lost |= nan
        if not q.is_cuda and bool(nan):
            break  # nothing can be selected
        visible = ops.score.visible_keys(rows, keys.shape[1], ratio, at, q.device)
        found[:, some] = ops.select.topk_of_blocks(scores, maxima, visible, top_k, ops.score.INDEXER_BLOCK, starts)
        _look_up(scores, found[:, some], None if values is None else values[:, some])
        del scores, maxima  # free them before the next chunk
    return lost > 0


def cuts(queries: int, batch: int, keys: int, ratio: int, offset: int) -> Iterator[slice]:
    """Slices of queries that the fused path scores together, in order."""
    first = 0
    while first < queries:
        rows = _rows(queries - first, batch, keys, ratio, offset + first)
        yield slice(first, first + rows)
        first += rows


def _rows(queries: int, batch: int, keys: int, ratio: int, offset: int) -> int:
    """Number of queries to score together.

    Their scores fit :data:`SCORES_BYTES`. The last query sees at most twice the keys of the first, because selection
    costs as much for each row as for the longest. Neither these queries nor those left over are fewer than
    :data:`_FEWEST`, unless the call has fewer.
    """
    room = _SHORT
    while room * ratio - offset < 2 * _FEWEST:
        room *= 2
    rows = min(queries, room * ratio - offset)
    while rows > _FEWEST and 4 * batch * rows * min((offset + rows) // ratio, keys) > SCORES_BYTES:
        rows = max(_FEWEST, rows - max(1, rows // 8))
    if 0 < queries - rows < _FEWEST:
        rows = queries if queries < 2 * _FEWEST else queries - _FEWEST
    return rows


def _look_up(scores: Tensor, found: Tensor, values: Tensor | None) -> None:
    """Write the scores of the selected keys to ``values``, if it is given."""
    if values is not None:
        chosen = scores.gather(-1, found.clamp_min(0).long()).nan_to_num_(0.0, float("inf"), float("-inf"))
        values.copy_(chosen.masked_fill_(found < 0, float("-inf")))


def _waits(found: Tensor) -> bool:
    """Whether a call may synchronise to check for NaN: not in a decode step on a GPU, nor while a graph is captured."""
    return not (found.is_cuda and (found.shape[1] == 1 or torch.cuda.is_current_stream_capturing()))


def refusal(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    key_scales: Tensor | None,
    otherwise: str = "scores are NaN: sums over heads are beyond fp32",
) -> ValueError:
    """The error for a selection that was lost: it names the tensors that are not finite, or says ``otherwise``.

    It synchronises with the device, so it is for the error path alone.
    """
    given = {"q": q, "k": k, "weights": weights, "key_scales": key_scales}
    names = [name for name, x in given.items() if x is not None and not _finite(x)]
    why = f"{' and '.join(names)} must be finite, without NaN and infinities" if names else otherwise
    return ValueError(f"{why}; no set of keys is right")


def _finite(x: Tensor) -> bool:
    parts = (part.float() if part.dtype == torch.float8_e4m3fn else part for part in x.split(4096, 1))
    return all(bool(part.isfinite().all()) for part in parts)


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
    """Raise ValueError for invalid arguments of :func:`lightning_indexer`."""
    given = {"q": q, "k": k, "weights": weights, "starts": starts, "key_scales": key_scales}
    given = {name: x for name, x in given.items() if x is not None or name in ("q", "k", "weights")}
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor, not {type(x).__name__}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, not on {x.device}")
    if q.ndim != 4 or k.ndim != 3 or k.shape[0] != q.shape[0] or k.shape[2] != q.shape[3]:
        raise ValueError(f"q must be [B, S, H, D] and k [B, T, D], not {list(q.shape)} and {list(k.shape)}")
    if not q.shape[2] or not q.shape[3]:
        raise ValueError(f"q must be [B, S, H, D] with H and D of at least 1, not {list(q.shape)}")
    if weights.shape != q.shape[:3] or not weights.is_floating_point():
        raise ValueError(
            f"weights must be floating [B, S, H] = {list(q.shape[:3])}, not {weights.dtype} {list(weights.shape)}"
        )
    if q.dtype not in DTYPES or k.dtype != q.dtype:
        raise ValueError(f"q and k must both be bf16, fp16, fp32 or float8_e4m3fn, not {q.dtype} and {k.dtype}")
    for name, value, least in (("top_k", top_k, 1), ("ratio", ratio, 1), ("offset", offset, 0)):
        check_number(name, value, least)
    if starts is not None and (starts.shape != q.shape[:1] or starts.dtype != torch.int64):
        raise ValueError(f"starts must be int64 [{q.shape[0]}], not {starts.dtype} {list(starts.shape)}")
    if key_scales is not None and (key_scales.shape != k.shape[:2] or not key_scales.is_floating_point()):
        raise ValueError(
            f"key_scales must be floating [B, T] = {list(k.shape[:2])}, not {key_scales.dtype} {list(key_scales.shape)}"
        )
    if path not in PATHS:
        raise ValueError(f"path must be one of {', '.join(PATHS)}, not {path!r}")
