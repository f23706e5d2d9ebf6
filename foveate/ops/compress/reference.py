"""What stands for a page of keys: mean and importance-weighted summaries."""

import torch
from torch import Tensor


def summarise_pages(k: Tensor, v: Tensor, page_size: int, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One key and one value for each page of consecutive keys (LuKA, section 3.2, "Summary Compression Functions").

    Args:
        k, v: ``[B, Hkv, P * page_size, D(v)]``, rotated keys as the cache holds them.
        weights: fp32 ``[B, Hkv, P, page_size]`` that sum to 1 over a page, or None for the mean.

    Returns:
        ``(summary_k [B, Hkv, P, D], summary_v [B, Hkv, P, Dv])`` in the dtypes of k and v, accumulated in fp32.
    """
    pages_k, pages_v = (x.unflatten(2, (-1, page_size)) for x in (k, v))
    if weights is None:
        return tuple(x.mean(3, dtype=torch.float32).to(x.dtype) for x in (pages_k, pages_v))
    return tuple((weights.unsqueeze(3) @ x.float()).squeeze(3).to(x.dtype) for x in (pages_k, pages_v))


def page_importance(mass: Tensor, page_size: int, temperature: float) -> Tensor:
    """Softmax over each page of the accumulated attention mass w (LuKA, section 3.2: pi_i, from w_i / tau).

    Args:
        mass: fp32 ``[B, Hkv, P * page_size]``.
        temperature: tau > 0.

    Returns:
        fp32 ``[B, Hkv, P, page_size]``, summing to 1 over a page.
    """
    return (mass.float() / temperature).unflatten(2, (-1, page_size)).softmax(-1)
