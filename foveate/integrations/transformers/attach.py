"""attach, detach, attached, stats: put a method on one model instance, and take it off again without a trace."""

from __future__ import annotations

import copy
import math
import uuid
import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import transformers
from torch import nn

from foveate.integrations.transformers import attention, csa, releases
from foveate.integrations.transformers.auto import Auto
from foveate.integrations.transformers.cache import Cache
from foveate.integrations.transformers.facts import kv_heads, model_facts, rotary_facts
from foveate.integrations.transformers.graphs import GetDecodeCall, Graphs, TakesDecodeCall
from foveate.integrations.transformers.hooks import AfterForward, BeforeForward, Prefill, PrepareCache
from foveate.integrations.transformers.stats import LayerStats, Stats
from foveate.integrations.transformers.study import remove_hooks
from foveate.integrations.transformers.support import attention_modules, decoder_of
from foveate.methods import Method, make
from foveate.ops import prompt_path
from foveate.runtime import Policy


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

    def put_on(self, model: nn.Module) -> None:
        """Make a model that nothing is attached to attend by this attachment, for the first time or again."""
        decoder = decoder_of(model)
        config = decoder.config.get_text_config(decoder=True)
        modules, _ = attention_modules(model, decoder, config)
        attention.register()
        memo: dict[int, Any] = {id(config): self.config}  # one copy of each, however many modules share it
        for module in {id(one): one for one in (model, *decoder.modules())}.values():
            own = module.__dict__.get("config")
            if isinstance(own, transformers.PreTrainedConfig):
                self._undo.append((module, own))
                module.config = copy.deepcopy(own, memo)
        for changed in (model.config, decoder.config, self.config):
            changed._attn_implementation_internal = attention.IMPLEMENTATION
        for index, module in modules.items():
            module.foveate = self.policies[index]
        model.foveate = self
        decoder.register_forward_pre_hook(BeforeForward(model, self), with_kwargs=True)
        decoder.register_forward_hook(AfterForward(self), with_kwargs=True, always_call=True)
        if hasattr(model, "generate"):
            model._prepare_cache_for_generation = PrepareCache(model, self)
            model._prefill = Prefill(model, self)
            model._valid_auto_compile_criteria = TakesDecodeCall(model, self)
            model.get_compiled_call = GetDecodeCall(model, self)

    def take_off(self, model: nn.Module) -> None:
        """Give the model its own attention back."""
        if self.auto is not None:
            self.auto.stop()
        decoder = decoder_of(model)
        remove_hooks(decoder)
        _remove_hooks(decoder, (BeforeForward, AfterForward))
        for name in releases.GENERATE:
            model.__dict__.pop(name, None)
        for module, config in self._undo:
            module.config = config
        self._undo.clear()
        for module in (model, *decoder.modules()):
            module.__dict__.pop("foveate", None)

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
) -> Attachment | csa.SparseAttachment:
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
            fewer tokens than this. "auto": on a GPU :attr:`Method.sparse_from_tokens`, from which the method is faster;
            elsewhere 0, which means never. Methods that evict never do. :func:`stats` counts these steps. Comparisons
            of methods want 0.
        settings: the method's settings, e.g. ``top_k=0.1``.

    Raises:
        ValueError: for an unknown method or setting, a value out of range, a model whose attention is not supported,
            ``cuda_graph=True`` where it is not possible, or ``dense_below`` without a method; the model is left as it
            was.
        ReleaseError: when the installed release of Transformers lacks what foveate stands in for.
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
        decoder = decoder_of(model)
        csa.check(model, decoder)
        releases.check(model, decoder)
        detach(model)
        own = csa.SparseAttachment()
        own.put_on(model)
        return own
    chosen = make(method, **settings)
    decoder = decoder_of(model)
    config = decoder.config.get_text_config(decoder=True)
    modules, unchanged = attention_modules(model, decoder, config)
    releases.check(model, decoder)
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
    attachment = Attachment(chosen, copy.deepcopy(config), policies, unchanged, uid, forward, graphs=graphs)
    attachment.auto = _auto(policies)
    if cuda_graph is True:
        graphs.require(graphs.obstacle(model, attachment))
    detach(model)
    attachment.put_on(model)
    return attachment


def detach(model: nn.Module) -> None:
    """Give a model its own attention back; nothing of :func:`attach` remains. Does nothing on other models."""
    attachment = model.__dict__.get("foveate")
    if attachment is None:
        return
    attachment.take_off(model)


@contextmanager
def attached(
    model: nn.Module, method: str | Method | None = None, **options: Any
) -> Iterator[Attachment | csa.SparseAttachment]:
    """:func:`attach`, with its options, for the length of a ``with`` block.

    Afterwards what was attached before is back, with its counters, and caches made for it go on.
    """
    before = model.__dict__.get("foveate") if isinstance(model, nn.Module) else None
    attachment = attach(model, method, **options)
    try:
        yield attachment
    finally:
        detach(model)
        if before is not None:
            before.put_on(model)


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
    if isinstance(attachment, csa.SparseAttachment):
        return attachment.stats(reset)
    heads = {policy.counters.prompt_heads for policy in attachment.policies.values()} - {None}
    dense_prompts = ", ".join(sorted({prompt_path(one) for one in heads}))
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
    return Stats(sorted(layers, key=lambda layer: layer.layer), resident, graphs, dense_prompts)


def _auto(policies: dict[int, Policy]) -> Auto | None:
    """What finds the anchors of layers that wait for them; None if there are none."""
    return Auto() if any(policy.method.self_calibrating for policy in policies.values()) else None


def _check_artefacts(
    policies: dict[int, Policy], config: transformers.PreTrainedConfig, modules: dict[int, nn.Module]
) -> None:
    """Refuse calibrations, and files of learned scores, of other models."""
    chosen = [policy.method for policy in policies.values()]
    artefacts = {method.artefact_file: method.artefact for method in chosen if method.artefact is not None}
    facts = model_facts(config, modules) | {"rope": rotary_facts(config)} if artefacts else {}
    for source, artefact in artefacts.items():
        artefact.check_model(facts, source)


def _remove_hooks(decoder: nn.Module, kinds: tuple[type, ...]) -> None:
    for hooks in (decoder._forward_pre_hooks, decoder._forward_hooks):
        for key in [key for key, hook in hooks.items() if isinstance(hook, kinds)]:
            del hooks[key]
            decoder._forward_pre_hooks_with_kwargs.pop(key, None)
            decoder._forward_hooks_with_kwargs.pop(key, None)
            decoder._forward_hooks_always_called.pop(key, None)


def _uid() -> str:
    return uuid.uuid4().hex
