"""What `attach` changes on a model with compressed sparse attention of its own, and how it is undone.

The indexers or compressors get another forward: this is the one place where a forward of a model is replaced. To
support one more model, add its type to :data:`MODELS`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from foveate.integrations.transformers import releases
from foveate.integrations.transformers.configurations import Configurations
from foveate.integrations.transformers.csa import compressed, pooled, tokens
from foveate.integrations.transformers.csa.attention import IMPLEMENTATION, attention, clear, key_positions
from foveate.integrations.transformers.csa.selection import SelectionCounts
from foveate.integrations.transformers.stats import LayerStats, Stats
from foveate.integrations.transformers.support import around, decoder_of, refuse_weights, remove_hooks

MODELS: dict[str, type[tokens.Select | pooled.SelectPools | compressed.Compress]] = {
    "axk2": tokens.Select,
    "deepseek_v32": tokens.Select,
    "deepseek_v4": compressed.Compress,
    "dots3_note_text": tokens.Interleaved,
    "glm5_next_text": pooled.SelectPools,
    "glm_moe_dsa": tokens.Interleaved,
    "hy_v4": tokens.RotatedLast,
    "mistral_large4_text": tokens.FromHidden,
}
"""The class of the replacing forward, by the model type of the decoder."""
_MASK_OF_INDICES = "build_attention_mask_from_topk"


@dataclass
class SparseAttachment:
    """What :func:`foveate.attach` put on a model with sparse attention of its own."""

    chosen: str = ""
    """What was chosen, and why."""
    layers: dict[int, SelectionCounts] = field(default_factory=dict)
    configurations: Configurations = field(default_factory=Configurations)
    before: Any = None
    """What was attached before, for a block of :func:`attached`."""
    left: bool = False
    """Whether the block of :func:`attached` has ended."""

    def stats(self, reset: bool) -> Stats:
        """The layers' counters, as :func:`foveate.stats` returns them; bytes are not counted."""
        rows = [
            LayerStats(
                layer=index,
                method="csa",
                prompt_tokens=seen.prompt_tokens,
                decode_steps=seen.steps,
                keys_read_per_step=seen.read / max(seen.steps, 1),
                keys_available_per_step=seen.available / max(seen.steps, 1),
                selections_lost=0 if seen.lost is None else int(seen.lost),
            )
            for index, seen in sorted(self.layers.items())
        ]
        if reset:
            for seen in self.layers.values():
                seen.reset()
        return Stats(rows, 0, 0, chosen=self.chosen)

    def put_on(self, model: nn.Module) -> None:
        """Replace the forwards of a model's indexers or compressors, attention and masks; its weights stay."""
        decoder = decoder_of(model)
        forward_of, replacements = MODELS[kind(decoder)], []
        for module in decoder.modules():
            own, layer_idx = getattr(module, forward_of.replaces, None), getattr(module, "layer_idx", None)
            if isinstance(own, nn.Module) and layer_idx is not None:
                self.layers.setdefault(layer_idx, SelectionCounts())
                modeling = importlib.import_module(type(own).__module__)
                replacements.append((own, forward_of(own, layer_idx, self.layers, modeling)))
        _register()
        self.configurations.replace(around(model, decoder), IMPLEMENTATION)
        for own, forward in replacements:
            own.forward = forward
        for module in decoder.modules():
            if hasattr(module, _MASK_OF_INDICES):
                setattr(module, _MASK_OF_INDICES, pooled.as_selected)
        decoder.register_forward_pre_hook(_check_inputs, with_kwargs=True)
        if forward_of is compressed.Compress:
            decoder.register_forward_pre_hook(compressed.before_forward, with_kwargs=True)
        model.foveate = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _register()  # a pickle may be read in another process

    def take_off(self, model: nn.Module) -> None:
        """Restore what :meth:`put_on` replaced."""
        clear()
        self.configurations.restore(around(model, decoder_of(model)))
        model.__dict__.pop("foveate", None)
        for module in model.modules():
            if isinstance(module.__dict__.get("forward"), tuple(MODELS.values())):
                del module.forward
            module.__dict__.pop(_MASK_OF_INDICES, None)
            remove_hooks(module, lambda hook: hook in (_check_inputs, compressed.before_forward))


def _register() -> None:
    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionMaskInterface.register(IMPLEMENTATION, key_positions)


def has_own(model: nn.Module, decoder: nn.Module) -> bool:
    """Whether a model is of a type in :data:`MODELS`. Raises ValueError for another one that has an indexer."""
    if kind(decoder) in MODELS:
        return True
    indexer = next((one.indexer for one in decoder.modules() if getattr(one, "indexer", None) is not None), None)
    if indexer is not None:
        raise ValueError(
            f"{type(model).__name__} is not supported: foveate has no sparse attention for {kind(decoder)} models, "
            f"whose layers choose their keys by {type(indexer).__name__}"
        )
    return False


def kind(decoder: nn.Module) -> str:
    """The model type of a decoder."""
    return decoder.config.get_text_config(decoder=True).model_type


def _check_inputs(decoder: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Pre-hook of the decoder: raise ValueError for inputs and outputs that sparse attention does not support."""
    refuse_weights(kwargs.get("output_attentions", decoder.config.output_attentions))
    kwargs = releases.arguments(decoder, args, kwargs)
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() != 2:
        raise ValueError(f"attention_mask must be [B, T] with sparse attention, not {list(mask.shape)}")
    positions, cached = kwargs.get("position_ids"), kwargs.get("use_cache", decoder.config.use_cache)
    if positions is None or mask is not None or cached or kwargs.get("cache") is not None:
        return
    if bool((positions.diff(dim=-1) != 1).any()):  # Transformers reads that as packed sequences
        raise ValueError("position_ids must rise by one with sparse attention: packed sequences are not supported")
