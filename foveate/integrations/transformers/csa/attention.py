"""Attention and mask functions registered with Transformers: key positions as the mask, attention over a selection."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from foveate import csa

IMPLEMENTATION = "foveate-csa"
_slot = threading.local()


def post(compressor: nn.Module, entries: Tensor, indices: Tensor | None, ratio: int, padded: bool) -> None:
    """Hand a layer's compressed entries ``[B, T, D]`` and their selection to its attention function.

    ``padded`` says whether some rows have padding.
    """
    _slot.posted = (compressor, entries, indices, ratio, padded)


def clear() -> None:
    """Drop what was posted by a layer whose attention did not run."""
    _slot.posted = None


def _take(module: nn.Module) -> tuple[Tensor, Tensor | None, int, bool] | None:
    """Take what the compressor of this layer posted, and empty the slot."""
    compressor, *posted = getattr(_slot, "posted", None) or (None,)
    _slot.posted = None
    return tuple(posted) if compressor is not None and compressor is getattr(module, "compressor", None) else None


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    indices: Tensor | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over selected keys, or over a sliding window and compressed entries.

    Takes ``query [B, H, S, D]`` and returns ``[B, S, H, Dv]``.

    Args:
        attention_mask: the result of :func:`key_positions`, or indices.
        indices: int32 ``[B, S, K]``: the selection of an indexer of tokens.
        s_aux: ``[H]``: sink logits.
        sliding_window: tokens that a query reads, itself included, in layers without an indexer of tokens.
    """
    if dropout > 0:
        raise ValueError(f"dropout must be 0 with sparse attention, not {dropout}: set the model to eval()")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attention_mask is not None and attention_mask.dim() == 3:
        indices = attention_mask
    if indices is not None:
        out = csa.sparse_attention(query, key, value, indices, scaling=scaling, sinks=s_aux).out
        return out.transpose(1, 2).contiguous(), None
    taken = _take(module)
    if sliding_window is None:
        raise ValueError("sparse attention needs the indexer's selection, or a sliding window")
    entries, values, selected, ratio = key[:, :, :0], value[:, :, :0], None, 1
    length = query.shape[2]
    positions = attention_mask[:, 0, 0, -length:]
    if taken is not None:
        entries, selected, ratio, padded = taken
        entries = values = entries[:, None]
        positions = positions if padded or selected is None else None
    found = csa.sparse_attention(
        query,
        entries,
        values,
        selected,
        scaling=scaling,
        window=csa.Window(key, value, sliding_window),
        offset=key.shape[2] - length,
        positions=positions,
        ratio=ratio,
        sinks=s_aux,
    )
    return found.out.transpose(1, 2).contiguous(), None


def key_positions(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    *_: Any,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **__: Any,
) -> Tensor:
    """Each key's position in its row, int64 ``[B, 1, 1, T]``, in place of a mask; negative for padding.

    The last keys belong to the queries' own tokens.
    """
    keys = torch.arange(kv_offset, kv_offset + kv_length, device=device)
    if attention_mask is None:
        return keys.expand(batch_size, 1, 1, -1)
    return (keys - first_real(attention_mask, check=q_length > 1)[:, None])[:, None, None]


def first_real(attention_mask: Tensor, check: bool) -> Tensor:
    """The first real position of each row, int64 ``[B]``, of a mask ``[B, T]``.

    With ``check``, padding after a real token raises ValueError. Only prompts are checked, because the check
    synchronises with the device.
    """
    if attention_mask.dim() != 2:
        raise ValueError(f"attention_mask must be [B, T] with sparse attention, not {list(attention_mask.shape)}")
    real = attention_mask.bool()
    if check and bool((real[:, :-1] & ~real[:, 1:]).any()):
        raise ValueError("attention_mask has padding after real tokens; with sparse attention it must be on the left")
    return (~real).cumprod(-1).sum(-1)
