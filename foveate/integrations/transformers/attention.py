"""The attention and mask functions that Transformers calls for an attached model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from foveate import ops
from foveate.integrations.transformers import releases
from foveate.integrations.transformers.support import refuse_dropout, refuse_weights
from foveate.methods import Method, sparse_prompt
from foveate.ops.dispatch import watched
from foveate.runtime import Policy, handover, read_once
from foveate.runtime.layer import Layer

IMPLEMENTATION = "foveate"


@torch.compiler.disable
def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Attention of one layer: ``query [B, Hq, n, D]``, ``key, value [B, Hkv, n, D(v)]`` to ``[B, n, Hq, Dv]``.

    A cache keeps the dtype of its first tokens. Under ``torch.autocast`` that is the dtype of autocast, as in PyTorch's
    attention; the layer itself runs with autocast off.
    """
    policy, device = getattr(module, "foveate", None), query.device.type
    layer = None if policy is None else handover.take(key, policy.owner)
    dtype, cast = query.dtype, torch.is_autocast_enabled(device)
    if layer is not None and layer.cache is not None:
        dtype = layer.cache.dtype
    elif cast and dtype != torch.float64:  # which autocast leaves alone
        dtype = torch.get_autocast_dtype(device)
    given = query.to(dtype), key.to(dtype), value.to(dtype)
    with torch.autocast(device, enabled=False) if cast else nullcontext():
        out, weights = _attention(module, policy, layer, *given, attention_mask, dropout, scaling, **kwargs)
    return out.to(value.dtype), weights


def _attention(
    module: torch.nn.Module,
    policy: Policy | None,
    layer: Layer | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    **kwargs,
) -> tuple[Tensor, None]:
    sinks, softcap = kwargs.get("s_aux"), kwargs.get("softcap")
    if sinks is None and hasattr(module, "sinks"):
        raise releases.unknown(f"layer {module.layer_idx} has learned sinks and does not hand them over as s_aux")
    if softcap is None and getattr(module, "attn_logit_softcapping", None) is not None:
        raise releases.unknown(f"layer {module.layer_idx} caps its logits and does not hand over the cap as softcap")
    own = sinks is not None or softcap is not None  # which PyTorch's attention does not do
    logits = ops.Logits(query.shape[-1] ** -0.5 if scaling is None else scaling, sinks, softcap)
    if policy is None and attention_mask is not None and attention_mask.dim() == 2:
        attention_mask = _pairs(attention_mask, query.shape[2], key.shape[2])
    if policy is None and own:
        refuse_dropout(dropout)
        with watched(None):  # what is watched are layers with a method
            out = _with_mask(query, key, value, attention_mask, logits, kwargs.get("sliding_window"))
        return out.transpose(1, 2).contiguous(), None
    if policy is None:  # a layer that stays as it is (sliding window)
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    refuse_weights(kwargs.get("output_attentions"))
    if kwargs.get("position_bias") is not None:
        raise ValueError(
            f"layer {module.layer_idx} passes position_bias to its attention, which foveate does not support"
        )
    if policy.on_attention is not None:
        policy.on_attention(module.layer_idx, query, key, logits)
    rotary = None if policy.rotary is None else policy.rotary()
    if layer is not None:
        layer.rotary = rotary
        try:
            out = layer.attend(query, key, value, attention_mask, logits)
        except ValueError as error:
            _look_for_nan(error, module.layer_idx, policy.method, query, key, value)
            raise
    else:
        refuse_dropout(dropout)
        if key.shape[2] != query.shape[2]:
            raise ValueError("the keys come from a cache that is not foveate's; pass foveate.Cache(model) or no cache")
        if attention_mask is not None and attention_mask.dim() != 2:
            if sparse_prompt(policy.method):
                raise ValueError(
                    f"attention_mask has shape {tuple(attention_mask.shape)}: {policy.method.name} is sparse in "
                    "prefill and takes a 2-D mask of real tokens (images whose tokens see later ones, and packing, "
                    "are not supported)"
                )
            handover.mark_attended(module.layer_idx, policy.owner, policy.method.spec)
            if own:
                out = _with_mask(query, key, value, attention_mask, logits)
                return out.transpose(1, 2).contiguous(), None
            return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=logits.scaling)
        one = handover.current(policy.owner)
        forward = policy.forward if one is None else one.forward
        try:
            out = read_once(policy.method, query, key, value, attention_mask, logits, forward, rotary)
        except ValueError as error:
            _look_for_nan(error, module.layer_idx, policy.method, query, key, value)
            raise
    handover.mark_attended(module.layer_idx, policy.owner, policy.method.spec, None if layer is None else layer.finite)
    return out.transpose(1, 2).contiguous(), None


def _pairs(mask: Tensor, length: int, keys: int) -> Tensor:
    """A mask of pairs of queries and keys, bool ``[B, 1, length, keys]``, from the last columns of a mask of real
    tokens ``[B, columns]``.

    If an overlay adds nothing to the causal mask, :func:`mask` returns the mask of real tokens, for sliding-window
    layers as well, because the prompt then lies within their window.
    """
    causal = torch.ones(length, keys, dtype=torch.bool, device=mask.device).tril(keys - length)
    return causal & mask[:, None, None, -keys:].bool()


_BLOCK = 512
"""Queries that are masked at once beside learned sinks or under a cap."""


def _with_mask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    logits: ops.Logits,
    window: int | None = None,
) -> Tensor:
    """Attention with learned sinks or capped logits under a mask of pairs, ``[B, Hq, n, Dv]``.

    Args:
        mask: bool ``[B, 1, n, Lk]``; None: causal.
        window: no query sees a key so far before its own; None: there is no such bound.

    Raises:
        ValueError: for a mask that is not bool.
    """
    length, keys = q.shape[2], k.shape[2]
    first = keys - length
    if mask is None and (window is None or keys <= window):
        if logits.softcap is not None and length == 1:  # whose keys a kernel of decoding splits among programs
            return ops.attend(q, ops.KV(k, v), logits=logits).out
        return ops.attend_causal(q, ops.KV(k, v), logits=logits, offset=first).out
    if mask is None:
        lower = torch.arange(first, keys, device=q.device) - window + 1
        return ops.attend_window(q, ops.KV(k, v), logits=logits, lower=lower, offset=first).out
    if mask.dtype != torch.bool:
        beside = "beside learned sinks" if logits.sinks is not None else "under a cap of logits"
        raise ValueError(f"attention_mask must be bool {beside}, not {mask.dtype}")
    outs = []
    for start in range(0, length, _BLOCK):
        end = min(start + _BLOCK, length)
        seen = slice(0 if window is None else max(0, first + start - window + 1), first + end)
        kv, some = ops.KV(k[:, :, seen], v[:, :, seen]), mask[:, :, start:end, seen]
        outs.append(ops.attend(q[:, :, start:end], kv, logits=logits, mask=some).out)
    return torch.cat(outs, 2)


def _look_for_nan(error: ValueError, layer: int, method: Method, *given: Tensor) -> None:
    """Where a method failed on queries, keys or values that are not finite, name the first layer with such instead."""
    if all(bool(x.isfinite().all()) for x in given):
        return
    one = handover.current()
    check_finite({} if one is None else one.reached, given[0].dtype)
    raise not_finite(f"layer {layer} ({method.spec}): its queries, keys or values are", given[0].dtype) from error


def check_finite(reached: Mapping[int, handover.Reached], dtype: torch.dtype) -> None:
    """Raise ValueError for the first layer whose attention to a prompt is not finite; waits for the device."""
    looked = {layer: one for layer, one in sorted(reached.items()) if one.finite is not None}
    if looked:
        device = next(iter(looked.values())).finite.device
        finite = torch.stack([one.finite.to(device) for one in looked.values()])
        if not bool(finite.all()):
            layer = list(looked)[int((~finite).nonzero()[0])]
            raise not_finite(f"layer {layer} ({looked[layer].spec}): its attention to the prompt is", dtype)


def not_finite(what: str, dtype: torch.dtype) -> ValueError:
    """The error for what is not finite."""
    return ValueError(
        f"{what} not finite (NaN or infinite); look for NaN in the model's weights, or for an overflow of {dtype}"
    )


def mask(
    *args,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs,
) -> Tensor | None:
    """The 2-D mask of real tokens as it is, so that no mask of pairs exists; pairs only where a model needs them."""
    if local_size is not None or not (allow_is_causal_skip or _only_causal(attention_mask, kwargs)):
        return sdpa_mask(
            *args,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip,
            **kwargs,
        )
    return attention_mask


def _only_causal(attention_mask: Tensor | None, kwargs: Mapping[str, Any]) -> bool:
    """Whether an overlay adds nothing to the causal mask, such as the overlay for images in a prompt without images."""
    if kwargs.get("mask_function", causal_mask_function) is causal_mask_function:
        return False  # the model asks for pairs
    first, length = kwargs.get("q_offset", 0), kwargs["q_length"]
    how = dict(kwargs, attention_mask=attention_mask, allow_is_causal_skip=False)
    same = []
    for start in range(0, length, _BLOCK):
        how |= {"q_offset": first + start, "q_length": min(_BLOCK, length - start)}
        same.append((sdpa_mask(**how) == sdpa_mask(**how | {"mask_function": causal_mask_function})).all())
    return bool(torch.stack(same).all())


def register() -> None:
    """Make the implementation known to Transformers under the name "foveate"."""
    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionMaskInterface.register(IMPLEMENTATION, mask)
