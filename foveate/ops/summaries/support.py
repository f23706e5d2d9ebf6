"""What the kernels of :func:`attend_summaries` compute, and what they leave to the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from foveate.ops.dispatch import UnsupportedError
from foveate.ops.summaries.tree import Tree
from foveate.ops.summaries.types import Refinement, Sums

_LARGEST = 256
"""The largest head dim of keys and values."""
_OF_KERNELS = {"pool": ("kv_head",), "score": ("summary", "spread", "lowrank"), "bias": ("log",), "mass": ("exact",)}
"""The rules that kernels follow; the others are options of the paper."""


def check_supported(q: Tensor, k: Tensor, v: Tensor, tree: Tree, how: Refinement, sums: Sums | None) -> None:
    """Raise unless the kernels support this call.

    Raises:
        UnsupportedError: for calls that only the reference supports.
        ValueError: for inconsistent shapes, or other than one query per row.
    """
    (batch, num_heads, length, dim), (_, num_kv_heads, number, value_dim) = q.shape, v.shape
    for name, known in _OF_KERNELS.items():
        if getattr(how, name) not in known:
            raise UnsupportedError(f"{name}={getattr(how, name)} of summaries")
    vectors = [x for of in tree.levels for x in of.nodes[:3] if x is not None]
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32) or any(x.dtype != q.dtype for x in (k, v)):
        raise UnsupportedError(f"queries in {q.dtype} with keys in {k.dtype} and values in {v.dtype}")
    if any(x.dtype != q.dtype for x in vectors):
        raise UnsupportedError(f"summaries in other dtypes than {q.dtype}")
    if max(dim, value_dim) > _LARGEST:
        raise UnsupportedError(f"head dims above {_LARGEST}")
    if length != 1 or num_heads % num_kv_heads or k.shape != (batch, num_kv_heads, number, dim):
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip("qkv", (q, k, v)))
        raise ValueError(f"shapes do not fit one query a row: {shapes}")
    if sums is not None and (sums.total is not None or sums.recent is None):
        raise UnsupportedError("running totals of the attention to tokens")
    if sums is not None and (sums.recent.dtype != torch.float32 or sums.recent.stride(2) != 1 < sums.recent.shape[2]):
        raise UnsupportedError("running averages that are not fp32 and contiguous along the slots")
