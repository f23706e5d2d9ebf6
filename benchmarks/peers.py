"""DeepGEMM's scores and FlashInfer's selection: a public lightning indexer, measured beside ours.

They are imported when they are measured. Of equal scores FlashInfer takes any, where ours takes the first.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

NAME = "deepgemm+flashinfer"
PACKAGES = {"deep_gemm": "sgl-deep-gemm==0.1.4", "flashinfer": "flashinfer-python==0.6.14"}
"""What is imported, and the distribution that brings it."""
SCORES_BYTES = 2 << 30
"""Scores that are held at once: of a million tokens and four tokens a key those of 2,048 queries."""
_TAKES = {"heads": (32, 64), "dim": (32, 64, 128), "dtype": ("float8_e4m3fn",)}
_TILE = 256
"""Keys of a tile of DeepGEMM's; rows of scores as long as some tiles are contiguous, as FlashInfer wants them."""


def obstacle(heads: int, dim: int, dtype: str) -> str:
    """Why it cannot be measured here: sizes that it does not take, or a package that is missing; empty if it can."""
    for name, value in {"heads": heads, "dim": dim, "dtype": dtype}.items():
        if value not in _TAKES[name]:
            return f"takes {name} {' or '.join(map(str, _TAKES[name]))}, not {value}"
    for name, distribution in PACKAGES.items():
        try:
            importlib.import_module(name)
        except Exception as error:  # these packages load libraries and ask for compilers when they are imported
            why = "is not installed" if isinstance(error, ModuleNotFoundError) else "does not load"
            return f"{name} {why} ({' '.join(str(error).split())}): pip install {distribution}"
    return ""


def scores(q: Tensor, k: Tensor, weights: Tensor, key_scales: Tensor, visible: Tensor, most: int) -> Tensor:
    """DeepGEMM's, fp32; what stands at keys that a query may not read is not defined.

    Args:
        q: ``[S, H, D]``.
        k: ``[T, D]``.
        weights: ``[S, H]``.
        key_scales: ``[T]``.
        visible: int32 ``[S]``: the keys that each query may read.
        most: the most of them.
    """
    import deep_gemm

    length = min(-(-max(most, 1) // _TILE) * _TILE, k.shape[0])
    bounds = torch.zeros_like(visible), visible.clamp_min(1)
    return deep_gemm.fp8_mqa_logits(q, (k, key_scales), weights, *bounds, clean_logits=False, max_seqlen_k=length)


def select(q: Tensor, k: Tensor, weights: Tensor, key_scales: Tensor, top_k: int, ratio: int) -> Tensor:
    """The keys of each query, int32 ``[S, top_k]``, -1 for none: of :func:`scores` of some queries at a time."""
    import flashinfer

    total, number = q.shape[0], k.shape[0]
    found = torch.empty(total, top_k, dtype=torch.int32, device=q.device)
    visible = (torch.arange(1, total + 1, dtype=torch.int32, device=q.device) // ratio).clamp_max_(number)
    rows = max(1, SCORES_BYTES // (4 * number))
    none = torch.zeros(min(rows, total), dtype=torch.int32, device=q.device)
    for first in range(0, total, rows):
        some = slice(first, min(first + rows, total))
        of_some = scores(q[some], k, weights[some], key_scales, visible[some], min(some.stop // ratio, number))
        offsets = none[: some.stop - first]
        found[some] = flashinfer.top_k_ragged_transform(of_some.contiguous(), offsets, visible[some], top_k)
        del of_some  # before the next are made
    return found
