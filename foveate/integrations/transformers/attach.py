"""attach, detach, attached, stats: put a method on one model instance, and take it off again without a trace."""

from __future__ import annotations

import copy
import math
import uuid
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import transformers
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import GenerationMode

from foveate.cache import Counters
from foveate.integrations.transformers import attention, dsa, handover
from foveate.integrations.transformers.auto import Auto, is_auto
from foveate.integrations.transformers.cache import Cache
from foveate.integrations.transformers.facts import kv_heads, model_facts
from foveate.integrations.transformers.graphs import GetDecodeCall, Graphs, TakesDecodeCall
from foveate.integrations.transformers.positions import max_positions
from foveate.integrations.transformers.stats import LayerStats, Stats
from foveate.integrations.transformers.study import remove_hooks
from foveate.methods import Method, make


@dataclass
class Policy:
    """What one attention layer does."""

    method: Method
    owner: str
    """uid of the attachment."""
    counters: Counters = field(default_factory=Counters)
    forward: dict[Hashable, Any] = field(default_factory=dict)
    """The attachment's."""
    dense_below: int | str = 0
    """See :func:`attach`."""
    look: Callable[[int, Tensor, Tensor, float], None] | None = None
    """Called with the layer, and the rotated queries and keys that it is given, ``[B, H, n, D]``, and their scaling."""


@dataclass
class Attachment:
    """What :func:`attach` put on a model."""

    method: Method
    config: transformers.PreTrainedConfig
    """The decoder's configuration, a copy that only this model uses."""
    policies: dict[int, Policy]
    unchanged: dict[int, str]
    """Layers that stay as they are, with the reason."""
    uid: str
    """Names this attachment: caches belong to one."""
    forward: dict[Hashable, Any]
    """What the layers of a forward pass without a cache share."""
    _undo: list[tuple[nn.Module, transformers.PreTrainedConfig]] = field(default_factory=list)
    _cache: Any = None
    auto: Auto | None = None
    """Finds the anchors of a method that has to be calibrated on its first prompt."""
    graphs: Graphs = field(default_factory=lambda: Graphs("auto"))
    positions: int | None = None
    """Most tokens that the model has positions for; 0 when it does not say; None until it was asked."""

    @property
    def sparse_prompt(self) -> bool:
        """Whether prompt queries look at less than everything in some layer."""
        return any(policy.method.sparse_prompt for policy in self.policies.values())

    @property
    def whole_prompt(self) -> bool:
        """Whether some layer must be given the prompt in one piece."""
        return any(policy.method.whole_prompt for policy in self.policies.values())

    @property
    def prompt_tile(self) -> int:
        """Tokens of a prompt after whose multiples it can be cut in all layers (:meth:`Method.prompt_tile`)."""
        group = self.config.num_attention_heads // kv_heads(self.config)
        return math.lcm(*{policy.method.prompt_tile(group) for policy in self.policies.values()})

    def remember(self, cache: Cache) -> None:
        """Note the cache whose size :func:`stats` reports."""
        self._cache = weakref.ref(cache)

    def __deepcopy__(self, memo):
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin._cache, twin.uid = None, _uid()
        twin.forward = {}
        twin.graphs = copy.deepcopy(self.graphs, memo)
        twin.policies = {
            index: Policy(policy.method, twin.uid, forward=twin.forward, dense_below=policy.dense_below)
            for index, policy in self.policies.items()
        }
        for index, policy in self.policies.items():
            memo[id(policy)] = twin.policies[index]
        twin.config = copy.deepcopy(self.config, memo)
        twin._undo = copy.deepcopy(self._undo, memo)
        twin.auto = _auto(twin.policies)
        return twin


def attach(
    model: nn.Module,
    method: str | Method | None = None,
    *,
    cuda_graph: bool | str = "auto",
    dense_below: int | str = "auto",
    **settings: Any,
) -> Attachment | dsa.SparseAttachment:
    """Make a causal language model attend by a method, in place; `generate` and forward calls work as before.

    Args:
        model: a Transformers model (Llama, Qwen2, Qwen3, Mistral, Gemma 3 and others of their kind).
        method: a name (``"h2o"``), a spec (``"luka:page_size=16,top_k=3"``) or a :class:`~foveate.methods.Method`; left
            out for models with sparse attention of their own (DeepSeek-V4, DeepSeek-V3.2, GLM-MoE-DSA and kin), which
            is then computed in bounded memory, to the same result. Of DeepSeek-V4 a row with padding on the left gives
            what it gives alone, which it does not do in Transformers.
        cuda_graph: whether `generate` records a decode step as a CUDA graph and replays it for the tokens that follow
            (greedy or sampled, one token for each sequence at a time): True insists; "auto" does so on a GPU where
            model and method allow, and otherwise :func:`stats` tells why not.
        dense_below: decode steps read everything while the sequences together, each taken as long as the longest, have
            fewer tokens than this; "auto": on a GPU than the method needs to be faster (:attr:`Method.pays_from`),
            elsewhere 0: never. Methods that give tokens up never do. :func:`stats` counts these steps. Who compares
            methods wants 0.
        settings: the method's settings, e.g. ``top_k=0.1``.

    Raises:
        ValueError: for an unknown method or setting, a value out of range, a model whose attention is not supported,
            ``cuda_graph=True`` where it is not possible, or ``dense_below`` without a method; the model is left as it
            was.
    """
    graphs = Graphs(cuda_graph)
    whole = isinstance(dense_below, int) and not isinstance(dense_below, bool) and dense_below >= 0
    if not (whole or dense_below == "auto"):
        raise ValueError(f"dense_below must be a number of tokens, at least 0, or 'auto', not {dense_below!r}")
    if method is None:
        if settings:
            raise ValueError(f"settings need a method: {', '.join(settings)}")
        if cuda_graph is True:
            raise ValueError("cuda_graph=True needs a method: sparse attention of the model's own is not captured")
        if dense_below not in ("auto", 0):
            raise ValueError(f"dense_below={dense_below} needs a method: a model's own sparse attention stays as it is")
        decoder = _decoder(model)
        dsa.check(model, decoder)
        detach(model)
        model.foveate = dsa.attach(model, decoder)
        return model.foveate
    chosen = make(method, **settings)
    decoder = _decoder(model)
    config = decoder.config.get_text_config(decoder=True)
    modules, unchanged = _attention_modules(model, decoder, config)
    uid = _uid()
    forward: dict[Hashable, Any] = {}
    policies = {
        index: Policy(
            chosen.for_layer(index, config.num_hidden_layers, sorted(modules)),
            uid,
            forward=forward,
            dense_below=dense_below,
        )
        for index in modules
    }
    _check_artefacts(policies, config, modules)
    memo: dict[int, Any] = {}  # one copy of each configuration, however many modules share it
    attachment = Attachment(chosen, copy.deepcopy(config, memo), policies, unchanged, uid, forward, graphs=graphs)
    if cuda_graph is True:
        graphs.require(graphs.obstacle(model, attachment))
    detach(model)
    attention.register()
    owners = [model, *decoder.modules()] if model is not decoder else list(decoder.modules())
    for module in owners:
        own = module.__dict__.get("config")
        if isinstance(own, transformers.PreTrainedConfig):
            attachment._undo.append((module, own))
            module.config = copy.deepcopy(own, memo)
    for changed in (model.config, decoder.config, attachment.config):
        changed._attn_implementation_internal = attention.IMPLEMENTATION
    for index, module in modules.items():
        module.foveate = policies[index]
    model.foveate = attachment
    attachment.auto = _auto(policies)
    decoder.register_forward_pre_hook(_BeforeForward(model, attachment), with_kwargs=True)
    if hasattr(model, "_prepare_cache_for_generation"):
        model._prepare_cache_for_generation = _PrepareCache(model, attachment)
        model._valid_auto_compile_criteria = TakesDecodeCall(model, attachment)
        model.get_compiled_call = GetDecodeCall(model, attachment)
    return attachment


def detach(model: nn.Module) -> None:
    """Give a model its own attention back; nothing of :func:`attach` remains. Does nothing on other models."""
    attachment = model.__dict__.get("foveate")
    if attachment is None:
        return
    if isinstance(attachment, dsa.SparseAttachment):
        attachment.undo(model)
        del model.foveate
        return
    if attachment.auto is not None:
        attachment.auto.stop()
    decoder = _decoder(model)
    remove_hooks(decoder)
    for key, hook in list(decoder._forward_pre_hooks.items()):
        if isinstance(hook, _BeforeForward):
            del decoder._forward_pre_hooks[key]
            decoder._forward_pre_hooks_with_kwargs.pop(key, None)
    for name in ("_prepare_cache_for_generation", "_valid_auto_compile_criteria", "get_compiled_call"):
        model.__dict__.pop(name, None)
    for module, config in attachment._undo:
        module.config = config
    for module in decoder.modules():
        module.__dict__.pop("foveate", None)
    model.__dict__.pop("foveate", None)


@contextmanager
def attached(
    model: nn.Module, method: str | Method | None = None, **options: Any
) -> Iterator[Attachment | dsa.SparseAttachment]:
    """:func:`attach`, with its options, for the length of a ``with`` block."""
    attachment = attach(model, method, **options)
    try:
        yield attachment
    finally:
        detach(model)


def stats(model: nn.Module, reset: bool = False) -> Stats:
    """What every layer read, refined, evicted and reused since it was attached or the counters were reset.

    Args:
        model: an attached model.
        reset: start counting anew afterwards.

    Raises:
        ValueError: when the model is not attached.
    """
    attachment = model.__dict__.get("foveate")
    if attachment is None:
        raise ValueError("the model is not attached: there is nothing to report")
    if isinstance(attachment, dsa.SparseAttachment):
        return attachment.stats(reset)
    cache = attachment._cache() if attachment._cache is not None else None
    layers = [
        LayerStats(layer=index, method="unchanged", note=f"{reason} layers stay as they are")
        for index, reason in attachment.unchanged.items()
    ]
    for index, policy in attachment.policies.items():
        counted, rows = policy.counters, max(policy.counters.decode_rows, 1)
        read = float(counted.keys_read) / rows
        layers.append(
            LayerStats(
                layer=index,
                method=policy.method.spec,
                prompt_tokens=counted.prompt_tokens,
                decode_steps=counted.decode_steps,
                keys_read_per_step=read,
                keys_available_per_step=counted.keys_available / rows,
                kv_bytes_per_step=read * counted.bytes_per_key,
                tokens_evicted=int(counted.tokens_evicted),
                pages_refined=round(float(counted.pages_refined)),
                indices_reused=counted.indices_reused,
                dense_steps=counted.dense_steps,
                selections_capped=int(counted.selections_capped),
            )
        )
        if reset:
            counted.reset()
    resident = sum(policy.counters.resident_bytes for policy in attachment.policies.values())
    resident += cache.unchanged_bytes if cache is not None else 0
    graphs = copy.copy(attachment.graphs.use)
    graphs.reason = attachment.graphs.obstacle(model, attachment) or graphs.reason
    if reset:
        attachment.graphs.use.reset()
    return Stats(sorted(layers, key=lambda layer: layer.layer), resident, graphs)


def _auto(policies: dict[int, Policy]) -> Auto | None:
    """What finds the anchors of layers that wait for them; None if there are none."""
    return Auto() if any(is_auto(policy.method) for policy in policies.values()) else None


def _check_artefacts(
    policies: dict[int, Policy], config: transformers.PreTrainedConfig, modules: dict[int, nn.Module]
) -> None:
    """Refuse calibrations of other models."""
    artefacts = {
        policy.method.calibration: policy.method.artefact for policy in policies.values() if policy.method.artefact
    }
    facts = model_facts(config, modules) if artefacts else {}
    for source, artefact in artefacts.items():
        artefact.check_model(facts, source)


def _uid() -> str:
    return uuid.uuid4().hex


def _decoder(model: nn.Module) -> nn.Module:
    if not isinstance(model, transformers.PreTrainedModel):
        raise ValueError(f"model must be a Transformers PreTrainedModel, not {type(model).__name__}")
    decoder = model.get_decoder()
    return model if decoder is None else decoder


def _attention_modules(
    model: nn.Module, decoder: nn.Module, config: transformers.PreTrainedConfig
) -> tuple[dict[int, nn.Module], dict[int, str]]:
    """The attention modules to handle by layer, and the layers to leave alone; refuses what is not supported."""
    kind = type(model).__name__

    def refuse(why: str):
        raise ValueError(f"{kind} is not supported: {why}")

    if getattr(config, "is_encoder_decoder", False):
        refuse("it has an encoder; foveate attaches to decoder-only models")
    if not getattr(type(decoder), "_supports_attention_backend", False):
        refuse("its attention does not go through Transformers' AttentionInterface")
    if getattr(config, "num_kv_shared_layers", 0):
        refuse("some of its layers share the keys and values of others")
    layers = transformers.DynamicCache(config=config).layers
    unchanged: dict[int, str] = {}
    for index, layer in enumerate(layers):
        if type(layer) is DynamicSlidingWindowLayer:
            unchanged[index] = "sliding-window"
        elif type(layer) is not DynamicLayer:
            refuse(f"layer {index} keeps a {type(layer).__name__}, which foveate does not know")
    modules = {
        module.layer_idx: module
        for module in decoder.modules()
        if hasattr(module, "num_key_value_groups") and getattr(module, "layer_idx", None) is not None
    }
    missing = sorted(set(range(len(layers))) - set(modules))
    if missing:
        refuse(f"no attention module was found for layers {missing}")
    handled = {index: module for index, module in modules.items() if index < len(layers) and index not in unchanged}
    if not handled:
        refuse("all of its layers use a sliding window, so there is no long context to make cheaper")
    for index, module in handled.items():
        if getattr(module, "attn_logit_softcapping", None) is not None:
            refuse(f"layer {index} caps its attention logits")
        if hasattr(module, "sinks"):
            refuse(f"layer {index} has learned attention sinks")
        if not getattr(module, "is_causal", True):
            refuse(f"layer {index} is not causal")
    return handled, unchanged


class _BeforeForward:
    """Pre-hook of the decoder: every forward with a cache runs on a foveate cache that belongs to this model."""

    def __init__(self, model: nn.Module, attachment: Attachment):
        self.model, self.attachment = model, attachment

    def __call__(self, decoder: nn.Module, args: tuple, kwargs: dict[str, Any]):
        config = decoder.config
        if config._attn_implementation != attention.IMPLEMENTATION:
            raise RuntimeError(
                f"the model's attention implementation was changed to {config._attn_implementation!r} after "
                "foveate.attach, so keys would be handed to a cache whose attention never took them; it must stay "
                f"{attention.IMPLEMENTATION!r} until foveate.detach"
            )
        if kwargs.get("output_attentions", config.output_attentions):
            raise ValueError("output_attentions=True is not possible: foveate never holds attention weights")
        cache, training = kwargs.get("past_key_values"), decoder.training
        if cache is not None and not training:
            check_cache(cache, self.attachment)
            cache.begin_forward()
        elif isinstance(cache, Cache):
            cache.phase.forward.clear()
        if training and getattr(decoder, "gradient_checkpointing", False):
            readers = [n for n, policy in self.attachment.policies.items() if policy.method.reads_other_layers]
            if readers:
                raise ValueError(
                    f"gradient checkpointing is not possible with {self.attachment.method.name}: layer {readers[0]} "
                    "reads what an earlier layer has chosen, which is not kept until the backward pass"
                )
        use_cache = kwargs.get("use_cache")
        new = cache is None and not training and (config.use_cache if use_cache is None else use_cache)
        handover.begin(self.attachment.uid if new or isinstance(cache, Cache) else None)
        self.attachment.forward.clear()
        ids = next((kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None), None)
        if ids is not None:
            check_length((0 if cache is None else cache.get_seq_length()) + ids.shape[1], self.attachment)
            auto = self.attachment.auto
            if auto is not None and training:
                auto.stop()
            elif auto is not None:
                auto.before_forward(decoder, self.attachment, ids, kwargs.get("attention_mask"), cache)
        return (args, kwargs | {"past_key_values": Cache(self.model), "use_cache": True}) if new else None


class _PrepareCache:
    """Stands in for the model's ``_prepare_cache_for_generation``: builds a foveate cache and tells it the prompt."""

    def __init__(self, model: nn.Module, attachment: Attachment):
        self.model, self.attachment = model, attachment

    def __call__(
        self,
        generation_config: transformers.GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        if generation_config.output_attentions:
            raise ValueError("output_attentions=True is not possible: foveate never holds attention weights")
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r} cannot be combined with an attached "
                "method, which brings its own cache; leave it out"
            )
        self.attachment.graphs.check_generation(generation_mode, generation_config.use_cache)
        told = [model_kwargs.get(name) for name in ("attention_mask", "position_ids")]
        lengths = [tensor.shape[-1] for tensor in told if tensor is not None]
        prompt_end = lengths[0] if lengths else generation_config._mask_length
        # the last token generated is never fed
        check_length(max(max_cache_length, prompt_end + (generation_config.max_new_tokens or 1) - 1), self.attachment)
        if generation_config.use_cache is False:
            return
        cache = model_kwargs.get("past_key_values")
        if cache is None:
            cache = model_kwargs["past_key_values"] = Cache(self.model)
        else:
            check_cache(cache, self.attachment)
            cache._is_user_defined = True
            seen, assistant = cache.get_seq_length(), bool(generation_config.is_assistant)
            if seen and not assistant:
                if generation_mode == GenerationMode.ASSISTED_GENERATION:
                    raise ValueError("assisted decoding must start on an empty cache; leave past_key_values out")
                if prompt_end <= seen:
                    raise ValueError(
                        f"the cache holds {seen} tokens, but input_ids and attention_mask cover {prompt_end}: pass the "
                        "whole conversation, or the new tokens with an attention_mask over all of it"
                    )
        cache.begin(prompt_end, bool(generation_config.is_assistant))
        if generation_config.is_assistant:
            cache.activate_past_recording()


def check_length(tokens: int, attachment: Attachment) -> None:
    """Refuse a context that the model has no positions for."""
    positions = max_positions(attachment.config.to_dict()) if attachment.positions is None else attachment.positions
    attachment.positions = positions
    if positions and tokens > positions:
        raise ValueError(
            f"the prompt and what is to be generated come to {tokens} tokens, beyond the model's "
            f"max_position_embeddings of {positions}"
        )


def check_cache(cache: Any, attachment: Attachment) -> None:
    """Refuse a cache that is not foveate's or belongs to another model or method."""
    if not isinstance(cache, Cache):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__}: with an attached method pass foveate.Cache(model), a cache "
            "that generate returned, or none"
        )
    if cache.owner != attachment.uid:
        raise ValueError("past_key_values was made for another model or another attached method; start a new cache")
