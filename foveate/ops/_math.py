"""Arithmetic that the references share: grouped heads without copies, fp32 products, bounded scratch."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

SCRATCH_BYTES = 64 << 20
"""Upper bound in bytes of the largest temporary that a blockwise reference makes."""

GPU_SCORES_BYTES = 256 << 20
"""Upper bound in bytes of scores on a GPU from which keys are chosen: enough to keep all multiprocessors busy for
long."""


def fold_group(q: Tensor, num_kv_heads: int) -> Tensor:
    """Put the query heads of a KV head into rows: ``[B, Hq, Lq, D] -> [B, Hkv, G * Lq, D]`` (a view when Lq is 1).

    Head ``h`` belongs to KV head ``h // G``; row ``g * Lq + i`` is query ``i`` of group member ``g``.
    """
    batch, num_heads, length, dim = q.shape
    if num_heads % num_kv_heads:
        raise ValueError(f"q has {num_heads} heads, which is not a multiple of the {num_kv_heads} KV heads of k")
    return q.reshape(batch, num_kv_heads, num_heads // num_kv_heads * length, dim)


def unfold_group(x: Tensor, num_heads: int) -> Tensor:
    """Inverse of :func:`fold_group` for anything ``[B, Hkv, G * Lq, ...]``: gives ``[B, Hq, Lq, ...]``."""
    batch, num_kv_heads, rows = x.shape[:3]
    return x.reshape(batch, num_heads, rows * num_kv_heads // num_heads, *x.shape[3:])


def tile_rows(q: Tensor, num_kv_heads: int, tile: int, offset: int) -> tuple[Tensor, int]:
    """Queries in tiles, the heads of a group side by side.

    Returns:
        ``(rows [B, Hkv, T, G * tile, D], lead)``. Where the first or the last tile is given in part,
        zeros fill it; ``lead`` is the number of zero queries before the first given one.
    """
    lead, group = offset % tile, q.shape[1] // num_kv_heads
    q = torch.nn.functional.pad(q, (0, 0, lead, -(lead + q.shape[2]) % tile))
    rows = q.unflatten(2, (-1, tile)).unflatten(1, (num_kv_heads, group))
    return rows.transpose(2, 3).flatten(3, 4), lead


def matmul_fp32(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in fp32, or fp64 for such inputs; ``a [..., M, K]``, ``b [..., K, N]``."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.is_cuda and not torch.is_grad_enabled():
        flat = torch.bmm(a.flatten(0, -3), b.flatten(0, -3), out_dtype=torch.float32)
        return flat.unflatten(0, a.shape[:-2])
    return a.float() @ b.float()


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """``softcap * tanh(logits / softcap)``, in place unless autograd records it. None: the logits unchanged."""
    if softcap is None:
        return logits
    return (logits / softcap).tanh() * softcap if logits.requires_grad else logits.div_(softcap).tanh_().mul_(softcap)


def on_host(x: Tensor) -> bool:
    """Whether numbers may be read from a tensor: it is on the CPU, and no mode, such as a recorder's, forbids it."""
    return x.device.type == "cpu" and _get_current_dispatch_mode() is None


def first_keys(lengths: Tensor, number: int) -> Tensor:
    """A mask of each row's first ``lengths`` of ``number`` keys: int ``[B]`` or ``[B, Hkv]`` to bool
    ``[B, Hkv or 1, number]``."""
    lengths = lengths[:, None] if lengths.dim() == 1 else lengths
    return torch.arange(number, device=lengths.device) < lengths[..., None]


def block_length(bytes_per_row: int, total: int, room: int | None = None) -> int:
    """Rows per block, at least 1 and at most total, so that a block's temporary stays below ``room`` bytes.

    None: below :data:`SCRATCH_BYTES`.
    """
    return max(1, min(total, (SCRATCH_BYTES if room is None else room) // max(1, bytes_per_row)))
