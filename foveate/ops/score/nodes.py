"""The importance of a summary, and of the tokens under it, to a query: estimates and bounds of a page's mass."""

import math

import torch
from torch import Tensor

from foveate.ops._math import capped, first_keys, matmul_fp32
from foveate.ops.logits import Logits


def key_logits(rows: Tensor, k: Tensor, logits: Logits) -> Tensor:
    """Logits of ``rows [B, Hkv, G, D]`` at ``k [B, Hkv, N, D]``, without sinks: fp32 ``[B, Hkv, G, N]``."""
    return capped(matmul_fp32(rows, k.transpose(-1, -2)).mul_(logits.scaling), logits.softcap)


def logit_deviation(rows: Tensor, spread: Tensor, scaling: float) -> Tensor:
    """Standard deviation of the logits of the keys under each node, with dimensions taken as independent.

    Args:
        rows: ``[B, Hkv, G, D]``.
        spread: ``[B, Hkv, N, D]``: variance of the keys.

    Returns:
        fp32 ``[B, Hkv, G, N]``.
    """
    largest = min(torch.finfo(x).max for x in (spread.dtype, torch.float32))
    squared = (rows.float() * scaling).square().clamp_max_(largest).to(spread.dtype)
    return matmul_fp32(squared, spread.transpose(-1, -2)).clamp_(min=0.0).sqrt_()


def free_energy(deviation: Tensor, log_size: float) -> Tensor:
    """The amount by which ``log mean exp`` of n random logits exceeds their mean, in the random energy model.

    Up to a deviation s of ``c = sqrt(2 log n)`` it is ``s^2 / 2``: all keys of the page share the mass. From there on
    it is ``c s - log n``: the largest key has all the mass. The plain Gaussian ``s^2 / 2`` has no such bound and gives
    pages of scattered keys far too much (Derrida 1981, Phys. Rev. B 24, 2613).

    Args:
        deviation: s, ``[B, Hkv, G, N]``.
        log_size: log n.
    """
    within = deviation.clamp(max=math.sqrt(2.0 * log_size))
    return deviation.sub(within, alpha=0.5).mul_(within)


def largest_logit(rows: Tensor, low: Tensor, high: Tensor, scaling: float, *, lengths: Tensor | None = None) -> Tensor:
    """Upper bound of the logits of all keys in a box (Quest, Tang et al. 2024, section 3.2).

    Capping keeps order: a capped bound is a bound of the capped logits, and boxes have the same order without the cap.

    Args:
        rows: ``[B, Hkv, G, D]``.
        low, high: ``[B, Hkv, N, D]``: corners of each node's box; read through their strides.
        scaling: factor of the logits.
        lengths: int ``[B]`` or ``[B, Hkv]``: the number of nodes of a row; later nodes may hold anything. None: every
            row has N nodes.

    Returns:
        fp32 ``[B, Hkv, G, N]``. After a row's last node, by ``lengths``, it may be anything.
    """
    upward = matmul_fp32(rows.clamp(min=0), high.transpose(-1, -2))
    bounds = (upward + matmul_fp32(rows.clamp(max=0), low.transpose(-1, -2))).mul_(scaling)
    if lengths is not None:
        bounds = bounds.masked_fill_(~first_keys(lengths, low.shape[2])[:, :, None], float("-inf"))
    return bounds
