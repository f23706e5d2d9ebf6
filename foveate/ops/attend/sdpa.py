"""Attention by PyTorch's own kernels."""

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""PyTorch's own kernels. cuDNN is left out: it plans anew for every length, which takes longer than the attention
itself in decode steps and for prompts of many lengths."""


def scaled_dot_product(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """PyTorch's attention, ``[B, Hq, Lq, Dv]``."""

    def run() -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scaling, enable_gqa=grouped)

    if not q.is_cuda:
        return run()
    with sdpa_kernel(_BACKENDS, set_priority=True):
        return run()
