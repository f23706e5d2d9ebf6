"""Cache layers that stay Transformers' own (sliding windows, recurrent states) as plain tensors and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from foveate.integrations.transformers import releases
from foveate.integrations.transformers.layers import CacheLayer, HybridCacheLayer
from foveate.state import Geometry

_FROM_TENSORS = ("dtype", "device")


def can_be_saved(layer: CacheLayerMixin) -> bool:
    """Whether :func:`pack` knows the kind of a layer."""
    return isinstance(layer, CacheLayer) or type(layer) in releases.UNCHANGED_LAYERS


def pack(layer: CacheLayerMixin) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a layer by name, and its other attributes as JSON values; nothing of a layer with a method alone.

    A dict of an attribute is taken apart: ``conv_states.0``.
    """
    flat = _flat(_own(layer))
    tensors = {name: value for name, value in flat.items() if isinstance(value, Tensor)}
    facts = {name: value for name, value in flat.items() if name not in tensors}
    return tensors, facts


def unpack(
    layer: CacheLayerMixin,
    tensors: dict[str, Tensor],
    facts: dict[str, Any],
    seen: int,
    batch: int,
    geometry: Geometry | None,
) -> None:
    """Give an empty layer what :func:`pack` took from one, and remove that from ``tensors`` and ``facts``.

    Args:
        seen: tokens read.
        batch: sequences.
        geometry: of the layer's attention; None without any.

    Raises:
        ValueError: for what an empty layer of this kind does not have, or has as another kind of value; the message
            begins with its name.
    """
    own = _own(layer)
    for name, empty in _flat(own).items():
        value = tensors.pop(name) if name in tensors else facts.pop(name, facts)
        if value is facts:
            raise ValueError(f"{name}: is missing")
        _check(name, value, empty, seen, batch)
        attribute, _, key = name.partition(".")
        if key:
            getattr(layer, attribute)[int(key)] = value
        else:
            setattr(layer, attribute, value)
        if isinstance(value, Tensor) and value.dim() > 1:
            layer.dtype, layer.device = value.dtype, value.device
    if "sliding_window" in own:
        _check_window(layer, seen, geometry)
    for kind in ("conv", "recurrent"):
        for key, there in own.get(f"is_{kind}_states_initialized", {}).items():
            if there != (getattr(layer, f"{kind}_states")[key] is not None):
                raise ValueError(f"{kind}_states.{key}: must be there where is_{kind}_states_initialized is true")
    for key, size in own.get("conv_kernel_size", {}).items():
        state = layer.conv_states[key]
        if state is not None and state.shape[-1] != size:
            raise ValueError(
                f"conv_kernel_size.{key}: must be that of conv_states.{key}, {state.shape[-1]}, not {size}"
            )


def _own(layer: CacheLayerMixin) -> dict[str, Any]:
    """The attributes that belong to Transformers' part of a layer."""
    if isinstance(layer, HybridCacheLayer):
        names = LinearAttentionLayer(number_of_states=layer.number_of_states).__dict__
        return {name: layer.__dict__[name] for name in names if name != "record_past"}
    return {} if isinstance(layer, CacheLayer) else dict(layer.__dict__)


def _flat(attributes: Mapping[str, Any]) -> dict[str, Any]:
    flat = {}
    for name, value in attributes.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": one for key, one in value.items()}
        elif name not in _FROM_TENSORS:
            flat[name] = value
    return flat


def _check(name: str, value: Any, empty: Any, seen: int, batch: int) -> None:
    """Refuse a value that a layer of this kind cannot have. ``empty`` is the value of a layer without tokens."""
    if isinstance(value, Tensor):
        if not (empty is None or isinstance(empty, Tensor)):
            raise ValueError(f"{name}: must be {type(empty).__name__}, not a tensor")
        if value.dim() > 1 and len(value) != batch:
            raise ValueError(f"{name}: has {len(value)} rows, and batch is {batch}")
        if value.dim() > 1 and not (value.is_floating_point() and bool(value.isfinite().all())):
            raise ValueError(f"{name}: must hold floating-point numbers, none of them NaN or infinite")
        if isinstance(empty, Tensor) and not torch.equal(value.to(empty.device), empty):
            raise ValueError(f"{name}: must be {empty.tolist()}, not {value.tolist()}")
    elif name == "cumulative_length":
        if value != seen:
            raise ValueError(f"{name}: must be what seen is, {seen}, not {value!r}")
    elif type(empty) is bool and type(value) is bool and name != "record_past":
        pass  # whether it was initialised
    elif empty is None and (value is None or type(value) is int):
        pass  # a state that it does not have, or the size of a kernel
    elif value != empty or type(value) is not type(empty):
        raise ValueError(f"{name}: must be {empty!r}, not {value!r}")


def _check_window(layer: CacheLayerMixin, seen: int, geometry: Geometry) -> None:
    """Refuse keys and values unless they have the shape of the last tokens of a window."""
    n = min(seen, layer.sliding_window - 1)
    for name, dim in (("keys", geometry.head_dim), ("values", geometry.value_dim)):
        value, shape = getattr(layer, name), (geometry.num_kv_heads, n, dim)
        if value is None or value.shape[1:] != shape or not layer.is_initialized:
            raise ValueError(f"{name}: must hold the last {n} tokens of the window, [B, {', '.join(map(str, shape))}]")
    if layer.keys.dtype != layer.values.dtype:
        raise ValueError(f"keys: are {layer.keys.dtype}, and values {layer.values.dtype}")
