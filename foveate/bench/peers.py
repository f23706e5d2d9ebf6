"""Public implementations of the lightning indexer, measured beside ours where their packages are installed.

Imports are made when one is measured. None selects with the order that ours has: of equal scores they take any.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

SCORES_BYTES = 2 << 30
"""Scores that are held at once: of a million tokens and four tokens a key those of 2,048 queries."""
_TILE = 256
"""Keys of a tile of DeepGEMM's; rows of scores as long as some tiles are contiguous, as FlashInfer wants them."""


class Peer(NamedTuple):
    """An implementation composed of public packages, for one dtype."""

    packages: dict[str, str]
    """What is imported, and the distribution that brings it."""
    dtype: str
    heads: tuple[int, ...]
    dims: tuple[int, ...]
    select: Callable[[Tensor, Tensor, Tensor, Tensor, int, int], Tensor]
    """Of ``q [S, H, D]``, ``k [T, D]``, ``weights [S, H]``, ``key_scales [T]``, the number of keys a query and the
    tokens a key: int32 ``[S, top_k]``, -1 for none."""
    scores: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], Tensor]
    """Its own, fp32: of the same tensors, the keys that each query may read, int32 ``[S]``, and the most of them."""

    def lacks(self) -> str:
        """Why it cannot be measured here: a package, and how to install it; empty if nothing is missing."""
        for name, distribution in self.packages.items():
            try:
                importlib.import_module(name)
            except Exception as error:  # these packages load libraries and ask for compilers when they are imported
                why = "is not installed" if isinstance(error, ModuleNotFoundError) else "does not load"
                return f"{name} {why} ({' '.join(str(error).split())}): pip install {distribution}, or 'foveate[peers]'"
        return ""

    def cannot(self, heads: int, dim: int, dtype: str) -> str:
        """What of a plan it does not take; empty if it takes all."""
        takes = [(str(value), tuple(map(str, values))) for value, values in ((heads, self.heads), (dim, self.dims))]
        takes.append((dtype, (self.dtype,)))
        for name, (value, values) in zip(("heads", "dim", "dtype"), takes):
            if value not in values:
                return f"takes {name} {' or '.join(values)}, not {value}"
        return ""


def _mqa_logits(q: Tensor, k: Tensor, weights: Tensor, key_scales: Tensor, visible: Tensor, most: int) -> Tensor:
    """DeepGEMM's: what stands at keys that a query may not read is not defined."""
    import deep_gemm

    length = min(-(-max(most, 1) // _TILE) * _TILE, k.shape[0])
    bounds = torch.zeros_like(visible), visible.clamp_min(1)
    return deep_gemm.fp8_mqa_logits(q, (k, key_scales), weights, *bounds, clean_logits=False, max_seqlen_k=length)


def _deepgemm_flashinfer(q: Tensor, k: Tensor, weights: Tensor, key_scales: Tensor, top_k: int, ratio: int) -> Tensor:
    """Scores of some queries, and selection among them, which stops at the keys that each may read."""
    import flashinfer

    total, number = q.shape[0], k.shape[0]
    found = torch.empty(total, top_k, dtype=torch.int32, device=q.device)
    visible = (torch.arange(1, total + 1, dtype=torch.int32, device=q.device) // ratio).clamp_max_(number)
    rows = max(1, SCORES_BYTES // (4 * number))
    none = torch.zeros(min(rows, total), dtype=torch.int32, device=q.device)
    for first in range(0, total, rows):
        some = slice(first, min(first + rows, total))
        scores = _mqa_logits(q[some], k, weights[some], key_scales, visible[some], min(some.stop // ratio, number))
        offsets = none[: some.stop - first]
        found[some] = flashinfer.top_k_ragged_transform(scores.contiguous(), offsets, visible[some], top_k)
        del scores  # before the next are made
    return found


PEERS = {
    "deepgemm+flashinfer": Peer(
        packages={"deep_gemm": "sgl-deep-gemm==0.1.4", "flashinfer": "flashinfer-python==0.6.14"},
        dtype="float8_e4m3fn",
        heads=(32, 64),
        dims=(32, 64, 128),
        select=_deepgemm_flashinfer,
        scores=_mqa_logits,
    ),
}
