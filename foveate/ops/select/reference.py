"""Deterministic top-k in bounded memory; ties go to the smaller index."""

import torch
from torch import Tensor

from foveate.ops._math import first_keys, on_host
from foveate.ops.checks import INTEGERS, check_counts, check_number

CHUNK = 1 << 16
"""Number of scores examined at once."""

_SORTED = 1 << 13
"""Up to this number of scores in a row, a full sort is faster than radix selection on a GPU: it takes fewer
launches."""

_FEW = 1 << 17
"""Up to this number of scores in all rows together, a full sort is faster than radix selection on a GPU."""


class StreamingTopK:
    """Top-k over scores that arrive in blocks (StreamIndex, section 4: chunked partition-merge).

    The order is total: the larger score first, then the smaller index, so that the set never depends on how the scores
    were cut into blocks. Scores of -inf are never selected. NaN is an error on the CPU.

    Args:
        k: how many indices to keep. If there are fewer valid scores, the places at the end are -1.
    """

    def __init__(self, k: int):
        check_number("k", k, 1)
        self.k = k
        self._scores: Tensor | None = None
        self._indices: Tensor | None = None
        self._end = 0

    def update(self, scores: Tensor, first_index: int) -> None:
        """Add the scores ``[..., n]`` of the indices ``first_index .. first_index + n - 1``.

        Raises:
            ValueError: for a block that begins before the last one ended, and on the CPU for scores that are NaN.
        """
        if first_index < self._end:
            raise ValueError(f"first_index must be at least {self._end}, the end of the last block, not {first_index}")
        if scores.device.type == "cpu" and bool(torch.isnan(scores).any()):
            raise ValueError("scores hold NaN: there is no top-k of them")
        self._end = first_index + scores.shape[-1]
        indices = torch.arange(first_index, self._end, device=scores.device)
        indices = indices.expand(scores.shape)
        if self._scores is not None:
            scores = torch.cat([self._scores, scores], -1)
            indices = torch.cat([self._indices, indices], -1)
        keep = _first_largest(scores, self.k)
        self._scores, self._indices = scores.gather(-1, keep), indices.gather(-1, keep)

    def result(self) -> tuple[Tensor, Tensor]:
        """``(indices, scores)``, each ``[..., min(k, n)]``: indices int64 ascending, then -1 (score -inf)."""
        if self._scores is None:
            raise ValueError("no scores were given")
        unused = self._scores.isneginf()
        indices = self._indices.masked_fill(unused, torch.iinfo(torch.int64).max)
        order = indices.argsort(-1)
        return self._indices.masked_fill(unused, -1).gather(-1, order), self._scores.gather(-1, order)


def topk(scores: Tensor, k: int, *, chunk: int = CHUNK) -> Tensor:
    """Indices of the k largest scores, ascending, ties to the smaller index.

    Args:
        scores: ``[..., n]``; an index with -inf is never chosen.
        k: how many indices to choose.
        chunk: scores examined at once; the result does not depend on it.

    Returns:
        int64 ``[..., min(k, n)]``, ascending, with -1 at the end if fewer than k scores are above -inf.

    Raises:
        ValueError: for a k or a chunk below 1, and on the CPU for scores that are NaN.
    """
    check_number("chunk", chunk, 1)
    best, n = StreamingTopK(k), scores.shape[-1]
    if scores.device.type == "cpu" and k < n <= chunk:
        values, indices = scores.topk(k + 1, -1)
        if bool((values[..., k - 1] > values[..., k]).all()) and not bool(values[..., 0].isnan().any()):
            return indices[..., :k].sort(-1).values  # no tie at the edge of the set, so there is only one
    if scores.is_cuda and n <= min(chunk, _SORTED):
        return _ascending(*scores.sort(dim=-1, descending=True, stable=True), k)
    for first in range(0, n, chunk):
        best.update(scores[..., first : first + chunk], first)
    return best.result()[0]


def topk_rows(
    scores: Tensor, counts: Tensor, k: int, *, lengths: Tensor | None = None, dtype: torch.dtype = torch.int64
) -> Tensor:
    """:func:`topk` with a separate number for each row of a batch.

    Args:
        scores: ``[B, Hkv, n]``. An index with -inf is never chosen. NaN counts as inf, because a captured step cannot
            look for NaN without waiting for the device.
        counts: int64 ``[B]``: how many indices each row chooses, at most k.
        k: the largest of the counts.
        lengths: int ``[B]``: the number of scores of a row; later scores may hold anything. None: every row has n
            scores.
        dtype: dtype of the indices. It must be able to hold n.

    Returns:
        ``[B, Hkv, min(k, n)]``, ascending, with -1 at the end.

    Raises:
        ValueError: for a k below 0; for counts or lengths of another batch or not of integers; for a dtype that cannot
            hold n; and on the CPU for a count above k.
    """
    infinity = float("inf")
    scores = scores.nan_to_num(nan=infinity, posinf=infinity, neginf=-infinity)
    if lengths is not None:
        scores = scores.masked_fill(~first_keys(lengths, scores.shape[2]), -infinity)
    return _topk_rows(scores, counts[:, None, None], k).to(dtype)


def check_topk_rows(scores, counts, k, *, lengths=None, dtype=torch.int64):
    """Raise ValueError for invalid arguments of :func:`topk_rows`."""
    check_number("k", k, 0)
    if scores.dim() != 3 or not scores.is_floating_point():
        raise ValueError(f"scores must be a floating-point [B, Hkv, n], not {scores.dtype} {list(scores.shape)}")
    check_counts(counts, len(scores))
    if lengths is not None and (lengths.dtype not in INTEGERS or lengths.shape != counts.shape):
        raise ValueError(f"lengths must be integers [{len(scores)}], not {lengths.dtype} {list(lengths.shape)}")
    if dtype not in INTEGERS or torch.iinfo(dtype).max < scores.shape[2]:
        raise ValueError(f"dtype must be of integers that hold {scores.shape[2]}, not {dtype}")
    if on_host(counts) and counts.numel() and (most := int(counts.max())) > k:
        raise ValueError(f"counts must be at most k, which is {k}, not {most}")


def _topk_rows(scores: Tensor, counts: Tensor, k: int) -> Tensor:
    n = scores.shape[-1]
    if 0 < 2 * k < n and not (scores.is_cuda and scores.numel() <= _FEW):
        return _first_of_rows(scores, counts, k)
    ordered, indices = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(n, device=scores.device)
    return _ascending(ordered.masked_fill_(rank >= counts, float("-inf")), indices, k)


def _first_of_rows(scores: Tensor, counts: Tensor, k: int) -> Tensor:
    """:func:`topk_rows` without sorting all scores: a row takes the scores above its k-th, then the first equal
    ones."""
    n = scores.shape[-1]
    last = scores.topk(k, -1).values.gather(-1, (counts - 1).clamp(0, k - 1).expand(*scores.shape[:-1], 1))
    above, equal = scores > last, (scores == last) & ~scores.isneginf()
    room = counts - above.sum(-1, keepdim=True, dtype=torch.int32)
    chosen = above | equal & (equal.cumsum(-1, dtype=torch.int32) <= room)
    places = torch.where(chosen, chosen.cumsum(-1, dtype=torch.int32) - 1, k).long()
    found = torch.full((*scores.shape[:-1], k + 1), -1, device=scores.device)  # the last place takes what is not chosen
    return found.scatter_(-1, places, torch.arange(n, device=scores.device).expand(scores.shape))[..., :k]


def _ascending(ordered: Tensor, indices: Tensor, k: int) -> Tensor:
    """The first k of indices ordered by their scores: ascending, with -1 at the end for scores of -inf."""
    last = indices.shape[-1]
    indices = indices[..., :k].masked_fill(ordered[..., :k].isneginf(), last).sort(-1).values
    return indices.masked_fill_(indices == last, -1)


def _first_largest(scores: Tensor, k: int) -> Tensor:
    """Ascending positions of the k largest of ``[..., n]``, ties to the smaller position: ``[..., min(k, n)]``."""
    n = scores.shape[-1]
    if k >= n:
        return torch.arange(n, device=scores.device).expand(scores.shape)
    kth = scores.topk(k, -1).values[..., -1:]
    above = scores > kth
    ties = scores == kth
    room = k - above.sum(-1, keepdim=True)
    chosen = above | (ties & (ties.cumsum(-1) <= room))
    positions = torch.where(chosen, torch.arange(n, device=scores.device), n)
    return positions.topk(k, -1, largest=False, sorted=True).values


def by_mass(mass: Tensor, rest: float) -> tuple[Tensor, Tensor]:
    """The fewest heaviest keys, so that the mass of all other keys is at most ``rest`` (top-p).

    Args:
        mass: fp32 ``[B, Hkv, N]``, >= 0: shares of the attention.
        rest: the largest mass that may be left out, 0 to 1.

    Returns:
        ``(order [B, Hkv, N], counts [B, Hkv])``: the indices, heaviest first with ties to the smaller index, and how
        many of them to take.
    """
    ordered, order = mass.sort(dim=-1, descending=True, stable=True)
    left = ordered.flip(-1).cumsum(-1).flip(-1)
    return order, (left > rest).sum(-1)
