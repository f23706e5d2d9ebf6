"""Which calls of :func:`attend_summaries` the kernels support, and the constants that encode its options for them."""

from __future__ import annotations

import torch
from torch import Tensor

from foveate.ops._dispatch import UnsupportedError
from foveate.ops.summaries.tree import Tree
from foveate.ops.summaries.types import Refinement, Sums

_LARGEST = 256
"""The largest head dim of keys and values."""
SCORES = {"summary": 0, "spread": 1, "lowrank": 2}
BIASES = {"none": 0, "log": 1, "entropy": 2}


def check_supported(q: Tensor, k: Tensor, v: Tensor, tree: Tree, how: Refinement, sums: Sums | None) -> None:
    """Raise unless the kernels support this call.

    Raises:
        UnsupportedError: for calls that only the reference supports.
        ValueError: for inconsistent shapes, or other than one query per row.
    """
    (batch, num_heads, length, dim), (_, num_kv_heads, number, value_dim) = q.shape, v.shape
    if how.score not in SCORES:
        raise UnsupportedError(f"refinement by {how.score}")
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
    if sums is not None and any(x is not None and x.dtype != torch.float32 for x in sums[1:]):
        raise UnsupportedError("running sums in other dtypes than float32")
    if sums is not None and any(x is not None and x.stride(2) != 1 and x.shape[2] > 1 for x in sums[1:]):
        raise UnsupportedError("running sums whose entries are not contiguous along the slots")
