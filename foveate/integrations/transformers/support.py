"""Which models foveate can be attached to, and which of their layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import transformers
from torch import Tensor, nn
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
)

from foveate.integrations import early
from foveate.integrations.transformers import releases


def unwrapped(model: Any) -> Any:
    """The model within a pipeline, within what torch.compile returns, and within PEFT's models; else what was given.

    Raises:
        ValueError: for what is no model and has none.
    """
    if not isinstance(model, nn.Module):
        inner = getattr(model, "model", None)  # a pipeline's
        if not isinstance(inner, nn.Module):
            raise ValueError(f"model must be a Transformers PreTrainedModel, not {type(model).__name__}")
        return unwrapped(inner)
    if "_orig_mod" in model._modules:  # compiled
        return unwrapped(model._orig_mod)
    return unwrapped(model.get_base_model()) if hasattr(type(model), "get_base_model") else model


def decoder_of(model: nn.Module) -> nn.Module:
    """The decoder of a model, which may be the model itself.

    Raises:
        ValueError: for what is no Transformers model.
    """
    if not isinstance(model, transformers.PreTrainedModel):
        raise ValueError(f"model must be a Transformers PreTrainedModel, not {type(model).__name__}")
    decoder = model.get_decoder()
    return model if decoder is None else decoder


def refuse_weights(wanted: bool | None) -> None:
    """Raises ValueError where the weights of attention are wanted (``output_attentions``)."""
    if wanted:
        raise ValueError("output_attentions=True is not possible: foveate never holds attention weights")


def refuse_dropout(dropout: float) -> None:
    """Raises ValueError for dropout of attention weights."""
    if dropout > 0:
        raise ValueError(f"attention dropout ({dropout}) is not supported; set config.attention_dropout to 0")


def cache_layers(config: transformers.PreTrainedConfig) -> list[CacheLayerMixin]:
    """The layers of a new cache of the model, before the first token.

    A configuration may make its own by a method ``cache_layers()``, as :mod:`foveate.hybrids.models` does.
    """
    make = getattr(config, "cache_layers", None)
    return transformers.DynamicCache(config=config).layers if make is None else make()


def choosing_layers(config: transformers.PreTrainedConfig) -> tuple[int, ...]:
    """The indices of the decoder layers that keep all keys. Only in these layers can a method choose among keys."""
    layers = enumerate(cache_layers(config))
    kept = ((at, layer) for at, layer in layers if type(layer) not in releases.UNCHANGED_LAYERS)
    return tuple(at for at, layer in kept if not keeps_memory(layer))


def keeps_memory(layer: CacheLayerMixin) -> bool:
    """Whether a layer's mixer keeps a memory of its own instead of keys and values, as layers of hybrids do."""
    return getattr(layer, "keeps_memory", False)


def forgets(model: nn.Module) -> bool:
    """Whether the model's recurrent layers begin each pass of several tokens with an empty state."""
    return decoder_of(model).config.model_type in releases.FORGETFUL


def around(model: nn.Module, decoder: nn.Module) -> list[nn.Module]:
    """The decoder's modules and the modules that contain it. A vision tower beside it is not included."""
    return [*(one for one in model.modules() if any(part is decoder for part in one.modules())), *decoder.modules()]


def attention_modules(
    model: nn.Module, decoder: nn.Module, config: transformers.PreTrainedConfig
) -> tuple[dict[int, nn.Module], dict[int, str]]:
    """The attention modules to handle by layer, and the layers to leave alone; refuses what is not supported."""
    kind = type(model).__name__

    def refuse(why: str):
        raise ValueError(f"{kind} is not supported: {why}")

    if (ranks := getattr(model, "tp_size", None) or 1) > 1:
        refuse(
            f"its heads are spread over {ranks} processes, and each would choose keys without the others' heads; "
            "load it without tp_plan, or serve it in vLLM (docs/guide/serve.md)"
        )
    if getattr(config, "is_encoder_decoder", False):
        refuse(early.ENCODER)
    if getattr(config, "num_kv_shared_layers", 0):
        refuse(early.SHARED)
    if getattr(config, "cross_attention_layers", None):
        refuse(f"its layers {list(config.cross_attention_layers)} attend to images, not to the text before a token")
    for module in decoder.modules():
        indexer = getattr(module, "indexer", None)
        if isinstance(indexer, nn.Module):
            refuse(f"its layers choose keys by an indexer of their own ({type(indexer).__name__}), instead of a method")
        if hasattr(module, "kv_lora_rank"):
            refuse(early.LATENT)
    layers = cache_layers(config)
    # a model with recurrent layers lacks the flag because of these layers; its first forward pass proves its attention
    recurrent = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
    if not (recurrent or getattr(type(decoder), "_supports_attention_backend", False)):
        refuse("its attention does not go through Transformers' AttentionInterface")
    unchanged: dict[int, str] = {}
    for index, layer in enumerate(layers):
        if type(layer) in releases.UNCHANGED_LAYERS:
            unchanged[index] = releases.UNCHANGED_LAYERS[type(layer)]
        elif keeps_memory(layer):
            unchanged[index] = config.mixers[index]
        elif type(layer) not in (DynamicLayer, LinearAttentionAndFullAttentionLayer):
            refuse(f"layer {index} keeps a {type(layer).__name__}, which foveate does not know")
    wanted = [index for index in range(len(layers)) if index not in unchanged]
    if not wanted:
        kinds = " or ".join(sorted(set(unchanged.values())))
        refuse(early.all_unchanged(kinds))
    modules = {
        module.layer_idx: module
        for module in decoder.modules()
        if hasattr(module, "num_key_value_groups") and getattr(module, "layer_idx", None) is not None
    }
    missing = [index for index in wanted if index not in modules]
    if missing:
        refuse(f"no attention module was found for layers {missing}")
    handled = {index: modules[index] for index in wanted}
    for index, module in handled.items():
        cap = getattr(module, "attn_logit_softcapping", None)
        if cap is not None and not 0 < cap < math.inf:
            refuse(f"layer {index} caps its attention logits at {cap}; attn_logit_softcapping must be above 0, or None")
        if not getattr(module, "is_causal", True):
            refuse(f"layer {index} is not causal: it reads images, or whole prompts, in both directions")
    return handled, unchanged


class Watch:
    """A hook that watches one module, given layer, input and output: on copies of the module it does nothing."""

    def __init__(self, note: Callable[[int, Tensor, Any], None], layer: int, module: nn.Module | None):
        self._note, self._layer, self._module = note, layer, module

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None, out: Any = None) -> None:
        if module is self._module:
            stream = args[0] if args else (kwargs or {}).get("hidden_states")
            self._note(self._layer, stream, out)

    def __reduce__(self):
        return Watch, (None, -1, None)


def unwatch(model: nn.Module) -> None:
    """Remove hooks that an interrupted study has left, also in a model that was copied from the studied one."""
    for module in model.modules():
        remove_hooks(module, lambda hook: isinstance(hook, Watch))


def remove_hooks(module: nn.Module, ours: Callable[[Any], bool]) -> None:
    """Remove the hooks before and after a module's forward pass for which ``ours`` returns True."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if ours(hook)]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
            module._forward_hooks_with_kwargs.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)
