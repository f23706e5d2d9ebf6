"""A model as a plan needs it, from its folder: parameters and attention layers, without weights in memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from foveate.errors import UserError, first_line
from foveate.integrations import early
from foveate.integrations.transformers import csa, model_folder, offloading
from foveate.integrations.transformers.facts import folder_weights, model_shape, rotary_facts
from foveate.integrations.transformers.loading import choose_dtype
from foveate.integrations.transformers.positions import max_positions
from foveate.integrations.transformers.support import attention_modules, cache_layers, decoder_of
from foveate.io import reading
from foveate.state import Geometry

_EXPERT = re.compile(r"\.experts\.")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""What configurations call the number of a layer's experts."""


@dataclass(frozen=True)
class PlannedModel:
    """What a plan needs to know of a model."""

    shape: Mapping[str, Any]
    """See :func:`foveate.integrations.transformers.facts.model_shape`."""
    parameters: int
    weights: int
    """Bytes of all weights."""
    read: int
    """Bytes of the weights that every decode step reads: neither experts nor the embedding of tokens."""
    experts: int
    """Bytes of all experts."""
    expert_share: float
    """Share of the experts that one token goes through; 1.0 without experts."""
    dtype: torch.dtype
    chosen: Mapping[int, Geometry]
    """Shapes of the attention layers that hold all keys, by index. Methods choose in these layers."""
    windows: Mapping[int, tuple[Geometry, int]]
    """Shapes of the layers that hold a sliding window, and the tokens of the window, by index."""
    positions: int
    """Most tokens of a context; 0: the configuration does not say."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The shape, and a few weights of each layer, by which a calibration is known; none without safetensors files."""
    quantised: bool = False

    def read_by(self, sequences: int) -> float:
        """Bytes of the weights that a decode step of some sequences reads; experts are taken to be chosen at random."""
        return self.read + self.experts * (1.0 - (1.0 - self.expert_share) ** sequences)


def model_of(folder: Path, dtype: str = "auto") -> PlannedModel:
    """The model of a folder, which needs config.json alone; weights are looked at where there are any.

    Args:
        dtype: of the weights and of the cache: float32, bfloat16, float16, or auto: what the configuration names,
            else bfloat16.

    Raises:
        UserError: for no such folder, an unknown or damaged configuration, and a model that :func:`foveate.attach`
            refuses, with its reason.
    """
    own = model_folder.read_config(folder, needs_weights=False)
    config, decoder_config = model_folder.whole_config(folder)
    if dtype != "auto":
        chosen = choose_dtype(dtype, folder, "cuda")
    else:
        named = decoder_config.dtype or config.dtype or "bfloat16"
        chosen = str(named).removeprefix("torch.")
    kept = getattr(torch, chosen)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=kept, trust_remote_code=False)
    except Exception as error:  # a damaged configuration leads to any of them
        raise UserError(f"{folder}: {early.NOT_CAUSAL} ({first_line(error)})") from None
    decoder = decoder_of(model)
    text = decoder.config.get_text_config(decoder=True)
    try:
        has_own = csa.has_own(model, decoder)
        modules, _ = attention_modules(model, decoder, text) if not has_own else ({}, {})
    except ValueError as error:
        raise UserError(f"{folder}: {error}") from None
    if has_own:
        raise UserError(
            f"{folder}: {csa.kind(decoder)} models have sparse attention of their own, which foveate.attach(model) "
            "keeps and no plan estimates"
        )
    windows = {}
    attending = {one.layer_idx: one for one in decoder.modules() if _attends(one)}
    for index, layer in enumerate(cache_layers(text)):
        window = getattr(layer, "sliding_window", None)
        if index not in modules and window and index in attending:
            windows[index] = (offloading.geometry(attending[index], text), window)
    quantised = "quantization_config" in own or getattr(text, "quantization_config", None) is not None
    parameters = sum(one.numel() for one in model.parameters())
    stored = _stored_bytes(folder) if quantised else None
    each = kept.itemsize if stored is None else stored / parameters
    experts = sum(one.numel() for name, one in decoder.named_parameters() if _EXPERT.search(name))
    read = {id(one): one.numel() for one in decoder.parameters()}
    if (head := model.get_output_embeddings()) is not None:
        read |= {id(one): one.numel() for one in head.parameters()}
    embedding = model.get_input_embeddings().weight
    tied = head is not None and any(one is embedding for one in head.parameters())
    total = sum(read.values()) - experts - (0 if tied else embedding.numel())
    shape = model_shape(text)
    number = next((one for name in _EXPERTS if (one := getattr(text, name, None))), 0)
    share = getattr(text, "num_experts_per_tok", None) or number
    return PlannedModel(
        shape=shape,
        parameters=parameters,
        weights=round(parameters * each),
        read=round(total * each),
        experts=round(experts * each),
        expert_share=min(share / number, 1.0) if number else 1.0,
        dtype=kept,
        chosen={index: offloading.geometry(module, text) for index, module in sorted(modules.items())},
        windows=windows,
        positions=max_positions(text.to_dict()),
        facts=shape | {"weights": folder_weights(folder, sorted(modules)), "rope": rotary_facts(text)},
        quantised=quantised,
    )


def _attends(module: nn.Module) -> bool:
    return hasattr(module, "num_key_value_groups") and getattr(module, "layer_idx", None) is not None


def _stored_bytes(folder: Path) -> int | None:
    """Bytes of the weights by the index of their files or by the files; None where there is neither."""
    index = folder / "model.safetensors.index.json"
    total = reading.read_json(index).get("metadata", {}).get("total_size") if index.is_file() else None
    return total or sum(path.stat().st_size for path in folder.glob("*.safetensors")) or None
