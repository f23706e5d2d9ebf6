"""Dense attention by libraries, of decode steps and of prompts: sparse attention is compared with the fastest."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from foveate.lab.bench.plan import Say

Found = TypeVar("Found")
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Of ``q [B, Hq, L, D]``, ``k, v [B, Hkv, N, D]`` and the factor of the logits: ``[B, Hq, L, D]``. In a decode step L
is 1; of a prompt it is N."""
FLASH_ATTENTION_3 = "flash-attention-3"
"""Of a prompt it also takes ``window``, the number of keys that a query sees, itself included."""


def available(device: str, dtype: str, say: Say = print) -> dict[str, Attend]:
    """The libraries that are here and know the dtype, by name; says which one is missing and how to get it."""
    if device != "cuda":
        return {"sdpa": functools.partial(_sdpa, backend=SDPBackend.MATH)}
    found: dict[str, Attend] = {"sdpa-efficient": functools.partial(_folded, backend=SDPBackend.EFFICIENT_ATTENTION)}
    if dtype == "float32":  # which the others do not know
        return found | {"sdpa-math": functools.partial(_folded, backend=SDPBackend.MATH)}
    found["sdpa-cudnn"] = functools.partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION)
    found["sdpa-flash"] = functools.partial(_sdpa, backend=SDPBackend.FLASH_ATTENTION)
    return found | _with_flash_attention_3(_flash_attention_3, say)


def causal(device: str, dtype: str, say: Say = print) -> dict[str, Attend]:
    """The libraries that attend causally to a whole prompt without a matrix of its queries and keys, by name."""
    if device != "cuda":
        return {"sdpa": functools.partial(_sdpa, backend=SDPBackend.FLASH_ATTENTION, causal=True)}
    if dtype == "float32":
        say("no library attends to grouped heads in float32 without a matrix")
        return {}
    found: dict[str, Attend] = {
        "sdpa-cudnn": functools.partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION, causal=True),
        "sdpa-flash": functools.partial(_sdpa, backend=SDPBackend.FLASH_ATTENTION, causal=True),
    }
    return found | _with_flash_attention_3(_causal_flash_attention_3, say)


def measured(
    libraries: Mapping[str, Attend], measure: Callable[[Attend], Found], context: int, dtype: str, say: Say
) -> dict[str, Found]:
    """What is measured of each library, by name; those that cannot attend to so many tokens are left out, and named."""
    found = {}
    for name, attend in libraries.items():
        try:
            found[name] = measure(attend)
        except RuntimeError as error:
            say(f"{name}: left out at {context:,} tokens, {' '.join(str(error).split())[:200]}")
    if not found:
        say(f"no library attends densely to {context:,} tokens in {dtype} here: foveate's own is the baseline")
    return found


def _with_flash_attention_3(make: Callable[[], Attend], say: Say) -> dict[str, Attend]:
    """FlashAttention-3 by its name; says how to get it where it is missing."""
    try:
        return {FLASH_ATTENTION_3: make()}
    except Exception as error:  # it loads a library, which may not fit the device or torch
        if getattr(error, "name", None) == "flash_attn_interface":
            say("FlashAttention-3 is not here: pip install tokenspeed-fa3==3.0.0.post20260810")
        else:
            say(f"FlashAttention-3 is here and cannot be loaded: {error}")
    return {}


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scaling: float, backend: SDPBackend, causal: bool = False) -> Tensor:
    how = {"is_causal": causal, "scale": scaling, "enable_gqa": q.shape[1] != k.shape[1]}
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, **how)


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


def _causal_flash_attention_3() -> Attend:
    from flash_attn_interface import flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None = None) -> Tensor:
        limits = {} if window is None else {"window_size": (window - 1, 0)}
        found = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale=scaling, causal=True, **limits)
        out = found[0] if isinstance(found, tuple) else found  # some releases return the log-sum-exp beside it
        return out.transpose(1, 2)

    return attend
