"""Dense attention of a decode step by libraries, the fastest of which is what sparse attention is compared with."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Of ``q [B, Hq, 1, D]``, ``k, v [B, Hkv, N, D]`` and the factor of the logits: ``[B, Hq, 1, D]``."""


def available(device: str, dtype: str, say: Callable[[str], None] = print) -> dict[str, Attend]:
    """The libraries that are here and know the dtype, by name; says which one is missing and how to get it."""
    if device != "cuda":
        return {"sdpa": functools.partial(_sdpa, backend=SDPBackend.MATH)}
    found: dict[str, Attend] = {"sdpa-efficient": functools.partial(_folded, backend=SDPBackend.EFFICIENT_ATTENTION)}
    if dtype == "float32":  # which the others do not know
        return found | {"sdpa-math": functools.partial(_folded, backend=SDPBackend.MATH)}
    found["sdpa-cudnn"] = functools.partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION)
    found["sdpa-flash"] = functools.partial(_sdpa, backend=SDPBackend.FLASH_ATTENTION)
    try:
        found["flash-attention-3"] = _flash_attention_3()
    except Exception as error:  # it loads a library, which may not fit the device or torch
        if getattr(error, "name", None) == "flash_attn_interface":
            say("FlashAttention-3 is not here: pip install tokenspeed-fa3==3.0.0.post20260810")
        else:
            say(f"FlashAttention-3 is here and cannot be loaded: {error}")
    return found


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scaling: float, backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])


def _folded(q: Tensor, k: Tensor, v: Tensor, scaling: float, backend: SDPBackend) -> Tensor:
    """The heads of a group as queries of their KV head, for what knows no groups or would repeat keys for them."""
    rows = q[:, :, 0].unflatten(1, (k.shape[1], -1))
    return _sdpa(rows, k, v, scaling, backend).flatten(1, 2)[:, :, None]


def _flash_attention_3() -> Attend:
    from flash_attn_interface import flash_attn_with_kvcache

    def attend(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flash_attn_with_kvcache(q, k, v, softmax_scale=scaling).transpose(1, 2)  # splits keys as it sees fit

    return attend
