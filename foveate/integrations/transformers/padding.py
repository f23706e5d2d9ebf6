"""Padding in what a forward pass is given: positions that do not count it, and masks that contradict the cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from foveate.integrations.transformers import releases
from foveate.integrations.transformers.cache import Cache
from foveate.integrations.transformers.layers import CacheLayer, HybridCacheLayer

_POSITIONS = "position_ids"


def check(given: Mapping[str, Any], cache: Cache) -> None:
    """Check the padding of a pass on a cache; a step of `generate` is not checked, and waits for no device.

    Args:
        given: arguments of the decoder.

    Raises:
        ValueError: for a mask that contradicts what the cache has read, for padding that the model cannot leave out,
            and for positions that count padding.
    """
    mask, seen = _mask(given), cache.get_seq_length()
    if mask is not None and (mask.shape[1] - seen > 1 or not cache.phase.prompt_end_known):
        _check(mask != 0, given, cache, seen)


def place(decoder: nn.Module, given: dict[str, Any], cache: Cache | None, new: int, device: torch.device) -> None:
    """Add the positions of a pass's tokens if the caller gave none. They are the positions that `generate` makes.

    A token's position is its number among the real tokens of its row. In a forward call Transformers would count
    padding, too (and Bamba would not count the tokens of earlier passes).
    Args:
        decoder: the module whose arguments ``given`` are.
        new: tokens of each row.
        device: where positions are wanted.
    """
    if given.get(_POSITIONS) is not None or not releases.takes(decoder, _POSITIONS):
        return
    mask = _mask(given)
    if mask is not None:
        given[_POSITIONS] = ((mask != 0).cumsum(1) - 1).clamp(min=0)[:, -new:].to(device)
    elif cache is not None and cache.get_seq_length():
        first = _lengths(cache) or [cache.get_seq_length()]
        at = torch.arange(first[0], first[0] + new, device=device)[None]
        if len(set(first)) > 1:
            at = at + torch.tensor(first, device=device)[:, None] - first[0]
        given[_POSITIONS] = at


def _mask(given: Mapping[str, Any]) -> Tensor | None:
    """The mask ``[B, columns]``, nonzero for tokens; None without a mask of that shape."""
    mask = given.get("attention_mask")
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


def _lengths(cache: Cache) -> list[int] | None:
    """Real tokens of each row that the cache has read; None before there are any."""
    stores = (layer.cache for layer in cache.layers if isinstance(layer, CacheLayer))
    return next((list(store.lengths) for store in stores if store is not None), None)


def _check(real: Tensor, given: Mapping[str, Any], cache: Cache, seen: int) -> None:
    """As :func:`check`, of a bool mask ``real``; waits for the device once."""
    count = real.cumsum(1)
    gaps = (~real & (count > 0) & (count < count[:, -1:])).any(1)
    padded, counted, positions = torch.zeros_like(gaps), torch.zeros_like(gaps), given.get(_POSITIONS)
    if positions is not None and positions.dim() == 2:
        columns = torch.arange(seen, real.shape[1], device=real.device)
        at, new = positions.to(real.device), real[:, seen:]
        padded = (new & (count[:, seen:] - 1 != columns)).any(1)
        counted = (~new | (at == columns)).all(1)
    read = count[:, seen - 1] if seen else torch.zeros_like(count[:, 0])
    found = torch.stack([gaps.long(), (padded & counted).long(), read]).tolist()
    lengths = _lengths(cache)
    if lengths is not None and len(lengths) == len(real) and found[2] != lengths:
        row = next(b for b, one in enumerate(lengths) if one != found[2][b])
        raise ValueError(
            f"attention_mask has {found[2][row]} real tokens in the first {seen} columns of row {row}, and the cache "
            f"has read {lengths[row]} there, which stays so: pass the mask of earlier calls with a 1 for each token "
            "that was generated, or start a new cache"
        )
    kind = _cannot_leave_out(cache)
    if any(found[0]) and kind:
        raise ValueError(
            f"row {found[0].index(1)} of attention_mask has padding between its tokens, which {kind} layers take for "
            "tokens, so that the row would get other results than alone: pad before the first token of a row alone; "
            "ask questions of unequal length one by one, each on a copy of the cache (copy.deepcopy)"
        )
    if any(found[1]):
        raise ValueError(
            f"position_ids count the padding of row {found[1].index(1)}: leave them out, or pass those that generate "
            "makes, (attention_mask.cumsum(1) - 1).clamp(min=0), of the new tokens"
        )


def _cannot_leave_out(cache: Cache) -> str:
    """What layers are called that take padding between tokens for tokens; empty without any."""
    for layer in cache.layers:
        if isinstance(layer, HybridCacheLayer):
            return "recurrent"
        kind = releases.UNCHANGED_LAYERS.get(type(layer), "")
        if kind and kind != "attention-free":
            return kind
    return ""
