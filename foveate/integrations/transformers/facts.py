"""What tells one model from another, read from the model itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn

_SAMPLES = 4  # weights of a layer


def kv_heads(config: transformers.PreTrainedConfig) -> int:
    """KV heads of a decoder's layers."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def model_facts(config: transformers.PreTrainedConfig, modules: Mapping[int, nn.Module]) -> dict[str, Any]:
    """A decoder's shape, and a few weights of each of its attention layers, as JSON values.

    Args:
        modules: the attention modules by layer.
    """
    return {
        "model_type": config.model_type,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": kv_heads(config),
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "weights": [_sampled(module) for _, module in sorted(modules.items())],
    }


def rotary_facts(config: transformers.PreTrainedConfig) -> dict[str, Any] | None:
    """The settings of a decoder's rotary positions as JSON values; None where it has none."""
    settings = getattr(config, "rope_parameters", None)
    return None if settings is None else json.loads(json.dumps(settings))


def _sampled(module: nn.Module) -> list[float] | None:
    """A few weights of a layer; None where they are not at hand (offloaded) or stand for others (quantised)."""
    weight = next((p for p in module.parameters() if p.dim() == 2), None)
    if weight is None or weight.is_meta or not weight.is_floating_point() or weight.itemsize < 2:
        return None
    at = torch.linspace(0, weight.numel() - 1, _SAMPLES, dtype=torch.float64).long()
    rows, columns = at // weight.shape[1], at % weight.shape[1]
    values = weight.detach()[rows, columns].float()
    for layer in module.modules():  # adapters of PEFT count as if they were merged
        if getattr(layer, "weight", None) is weight and hasattr(layer, "get_delta_weight"):
            active = [] if layer.disable_adapters or layer.merged else layer.active_adapters
            values += sum(layer.get_delta_weight(name).detach()[rows, columns].float() for name in active)
    return [float(f"{value:.5g}") for value in values.tolist()]
