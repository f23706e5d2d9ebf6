"""What tells one model from another, read from the model itself."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import nn

from foveate.state import Geometry

_SAMPLES = 4  # weights of a layer
_FIRST = re.compile(r"model\.(?:language_model\.)?layers\.(\d+)\.self_attn\.q_proj\.weight")


def kv_heads(config: transformers.PreTrainedConfig) -> int:
    """KV heads of a decoder's layers."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def model_facts(config: transformers.PreTrainedConfig, modules: Mapping[int, nn.Module]) -> dict[str, Any]:
    """A decoder's shape, and a few weights of each of its attention layers, as JSON values.

    Args:
        modules: the attention modules by layer.
    """
    return model_shape(config) | {"weights": [_sampled(module) for _, module in sorted(modules.items())]}


def model_shape(config: transformers.PreTrainedConfig) -> dict[str, Any]:
    """A decoder's shape as JSON values."""
    return {
        "model_type": config.model_type,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": kv_heads(config),
        "head_dim": head_dim(config),
    }


def geometry_of(shape: Mapping[str, Any], ranks: int = 1) -> Geometry:
    """The geometry of a layer, of the largest layer where layers differ, on one rank of tensor parallelism.

    Args:
        shape: shape of the model, see :func:`model_shape`.
        ranks: number of ranks of tensor parallelism.
    """
    sizes = shape["head_dim"]
    size = max(sizes) if isinstance(sizes, list) else sizes
    return Geometry(shape["heads"] // ranks, max(shape["kv_heads"] // ranks, 1), size, size)


def head_dim(config: transformers.PreTrainedConfig) -> Any:
    """The dimensions of a head; a list with one number for each layer if layers differ (Gemma 4)."""
    varies = getattr(config.__dict__.get("_heterogeneity_spec"), "per_layer_attributes", ())
    if "head_dim" in varies:
        return [config.per_layer_config[index].head_dim for index in range(config.num_hidden_layers)]
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rotary_facts(config: transformers.PreTrainedConfig) -> dict[str, Any] | None:
    """The settings of a decoder's rotary positions as JSON values; None where it has none."""
    settings = getattr(config, "rope_parameters", None)
    return None if settings is None else json.loads(json.dumps(settings))


def folder_weights(folder: Path, layers: Collection[int] | None = None) -> list[list[float]]:
    """What :func:`model_facts` says of the weights, from the safetensors files of a model folder.

    Of layers with another first matrix than ``q_proj``, and of quantised ones, there is none.

    Args:
        layers: those to read, all if left out.
    """
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for first, name in ((_FIRST.fullmatch(name), name) for name in file.keys()):  # noqa: SIM118
                if first is None or (layers is not None and int(first[1]) not in layers):
                    continue
                if (one := file.get_slice(name)).get_dtype() in ("F64", "F32", "F16", "BF16"):
                    rows, columns = _places(*one.get_shape())
                    values = [one[row : row + 1, column : column + 1].item() for row, column in zip(rows, columns)]
                    found[int(first[1])] = _rounded(values)
    return [values for _, values in sorted(found.items())]


def adapted(model: nn.Module) -> bool:
    """Whether an adapter of PEFT is active in a layer of a model."""
    layers = (one for one in model.modules() if hasattr(one, "active_adapters") and hasattr(one, "disable_adapters"))
    return any(one.active_adapters and not one.disable_adapters for one in layers)


def _places(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and columns of the weights that tell a matrix from another."""
    at = torch.linspace(0, rows * columns - 1, _SAMPLES, dtype=torch.float64).long()
    return at // columns, at % columns


def _rounded(values: list[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


def _sampled(module: nn.Module) -> list[float] | None:
    """A few weights of a layer; None where they are not at hand (offloaded) or stand for others (quantised)."""
    weight = next((p for p in module.parameters() if p.dim() == 2), None)
    if weight is None or weight.is_meta or not weight.is_floating_point() or weight.itemsize < 2:
        return None
    rows, columns = _places(*weight.shape)
    values = weight.detach()[rows, columns].float()
    for layer in module.modules():  # adapters of PEFT count as if they were merged
        if getattr(layer, "weight", None) is weight and hasattr(layer, "get_delta_weight"):
            active = [] if layer.disable_adapters or layer.merged else layer.active_adapters
            values += sum(layer.get_delta_weight(name).detach()[rows, columns].float() for name in active)
    return _rounded(values.tolist())
