"""attach, detach, attached, stats: put a method on one model instance, and take it off again without a trace."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import transformers
from torch import nn

from foveate.calibration import say_once
from foveate.integrations.transformers import attention, csa, offloading, releases
from foveate.integrations.transformers.attachment import Attachment, new_uid
from foveate.integrations.transformers.cache import release_host_memory
from foveate.integrations.transformers.decode_calls import EnableCompiledCall, GetDecodeCall, RefuseContinuousBatching
from foveate.integrations.transformers.facts import adapted, model_facts, rotary_facts
from foveate.integrations.transformers.graphs import Graphs
from foveate.integrations.transformers.hooks import (
    AfterForward,
    BeforeForward,
    BeforeWhole,
    Prefill,
    PrepareCache,
    PreparePositions,
)
from foveate.integrations.transformers.lossless import STANDS_IN, Generate, Lossless, ModeArguments
from foveate.integrations.transformers.rotary import rotary_of_layers
from foveate.integrations.transformers.stats import LayerStats, Stats
from foveate.integrations.transformers.support import (
    around,
    attention_modules,
    decoder_of,
    remove_hooks,
    unwatch,
    unwrapped,
)
from foveate.methods import Auto, Method, check_artefacts, check_made_for, make
from foveate.methods.pages import Pages
from foveate.ops.attend import prompt_path
from foveate.runtime import Policy, check_dense_below, handover
from foveate.runtime.drafts import DraftUse
from foveate.state.store import MakeStore


def attach(
    model: nn.Module,
    method: str | Method | None = None,
    *,
    cuda_graph: bool | str = "auto",
    dense_below: int | str = "auto",
    offload: bool = False,
    gpu_budget: str | int | float | None = None,
    store: MakeStore | None = None,
    lossless: bool | int = False,
    **settings: Any,
) -> Attachment | csa.SparseAttachment:
    """Make a causal language model attend by a method, in place; `generate` and forward calls work as before.

    Args:
        model: a Transformers model (Llama, Qwen2, Qwen3, Mistral, Gemma 3 and similar models). For a pipeline, a
            compiled model or a PEFT model, the method is attached to the model within.
        method: a name (``"h2o"``), a spec (``"luka:page_size=16,top_k=3"``) or a :class:`~foveate.methods.Method`. None
            and ``"auto"`` choose a method, and a message gives the choice and the reason, which :func:`stats` repeats:
            ``kascade`` if a calibration is kept (`foveate calibrate`) or comes with foveate for the model's weights,
            else ``pages``; with ``offload`` always ``pages``. For a model with sparse attention of its own
            (DeepSeek-V4, DeepSeek-V3.2, GLM-MoE-DSA and similar models) they keep that attention and compute it in
            bounded memory, with the same result. Left-padded rows of DeepSeek-V4 then have the outputs that they have
            alone; in Transformers they do not.
        cuda_graph: whether `generate` records a decode step as a CUDA graph and replays it for the following tokens
            (greedy or sampled, one token for each sequence at a time). True requires it. "auto" does so on a GPU if the
            model and the method allow it; otherwise :func:`stats` gives the reason.
        dense_below: number of tokens of all sequences together, each counted with the longest sequence's length, below
            which decode steps read all keys. "auto": on a GPU the number from which the method is faster
            (:attr:`Method.sparse_from_tokens`); contexts of fewer than 4,096 tokens are dense, too, because a share of
            them is too few keys. Elsewhere "auto" is 0, which means never. Methods that evict, and ``duo``, never
            decode densely; a warning says where a number has no effect. A composition whose first method evicts when a
            prompt ends, such as ``snapkv+quest``, reads all kept tokens while these are fewer than a given number;
            "auto" is 0 for it. :func:`stats` counts the dense steps. Set 0 to compare methods.
        offload: keep keys and values in host memory, and on the GPU only summaries and the pages chosen last. The
            tokens are the same (``pages``, ``luka``, ``kascade_pages``); :func:`stats` counts what is fetched.
        gpu_budget: GPU memory that a cache may take with ``offload``: ``"8GB"`` or a number of bytes for the whole
            cache, or the share of pages to keep on the GPU, above 0 and at most 1.0. None: all free memory, minus a
            tenth of the GPU.
        store: class derived from :class:`foveate.state.Store`, or a :func:`functools.partial` of one, whose objects
            keep the keys and values of the layers (docs/guide/stores.md). None: keys and values are on the device or,
            with ``offload``, in host memory.
        lossless: `generate` writes the tokens that dense attention writes (docs/guide/lossless.md): the method drafts
            tokens, and dense passes verify them. True: the length of drafts is chosen by measured times. An int from 1
            to 16 is the length of drafts.
        settings: the method's settings, e.g. ``top_k=0.1``.

    Raises:
        ValueError: for an unknown method or setting, a value out of range, a model whose attention is not supported,
            ``cuda_graph=True`` where it is not possible, ``dense_below`` for a model with sparse attention of its own,
            ``offload`` with a method that reads every key or a model on several devices, and a store that lacks methods
            or cannot serve the method. The model is then unchanged.
        ReleaseError: if the installed release of Transformers lacks a function that foveate replaces.
    """
    graphs, model = Graphs(cuda_graph), unwrapped(model)
    check_dense_below(dense_below)
    budget, fetching = offloading.check(offload, gpu_budget, store, dense_below), offloading.fetching(offload, store)
    if method is None and settings:
        raise ValueError(f"settings need a method: {', '.join(settings)}")
    chosen, decoder = make("auto" if method is None else method, **settings), decoder_of(model)
    if isinstance(chosen, Auto) and csa.has_own(model, decoder):
        if offload or lossless or store is not None:
            given = "offload=True" if offload else f"lossless={lossless}" if lossless else "store"
            raise ValueError(f"{given} needs a method: a model's own sparse attention stays as it is")
        if cuda_graph is True:
            raise ValueError("cuda_graph=True needs a method: sparse attention of the model's own is not captured")
        if dense_below not in ("auto", 0):
            raise ValueError(f"dense_below={dense_below} needs a method: a model's own sparse attention stays as it is")
        releases.check(model, decoder)
        _detach(model)
        own = csa.SparseAttachment(f"auto: csa, the sparse attention of {csa.kind(decoder)} models")
        own.put_on(model)
        say_once(own.chosen)
        return own
    config = decoder.config.get_text_config(decoder=True)
    modules, unchanged = attention_modules(model, decoder, config)
    check_made_for(chosen, model_facts(config, modules))
    releases.check(model, decoder)
    unknown = {"weights": [None] * len(modules)}  # with an adapter, the model is another than the one that is known
    facts, why = lambda: unknown if adapted(model) else model_facts(config, modules), ""
    if isinstance(chosen, Auto) and fetching:
        where = "in host memory" if offload else "fetched from their store"
        chosen, why = Pages(), f"pages, because keys and values are {where}"
    elif isinstance(chosen, Auto):
        chosen, why = chosen.chosen_for(facts())
    else:
        chosen = chosen.for_model(facts)
    uid = new_uid()
    forward: dict[Hashable, Any] = {}
    policies = {
        index: Policy(
            chosen.for_layer(index, config.num_hidden_layers, sorted(modules)),
            uid,
            forward=forward,
            dense_below=0 if fetching else dense_below,
        )
        for index in modules
    }
    if offload:
        offloading.check_model(model)
    if fetching:
        offloading.check_methods({index: policy.method for index, policy in policies.items()}, fetching)
    layers = [policy.method for policy in policies.values()]
    check_artefacts(layers, lambda: model_facts(config, modules) | {"rope": rotary_facts(config)})
    attachment = Attachment(chosen, config, policies, unchanged, uid, forward, graphs=graphs, store=store)
    own = {index: policy.method for index, policy in policies.items()}
    attachment.lossless = Lossless.of(lossless, own, fetching)
    if attachment.lossless is not None:
        keeps = any("rope_deltas" in module.__dict__ for module in model.modules())
        attachment.lossless.check_model(config, unchanged, keeps)
    if offload:
        attachment.offload, attachment.gpu_budget = True, budget
        attachment.geometries = {index: offloading.geometry(module, config) for index, module in modules.items()}
    if cuda_graph is True:
        graphs.require(attachment.replay_obstacle(model))
    before = model.__dict__.get("foveate")
    _detach(model)
    try:
        _give_rotary(policies, model, decoder, config)
    except BaseException:
        if before is not None:
            _put_on(before, model)
        raise
    _put_on(attachment, model)
    short = attachment.short_contexts(model)
    if why:
        attachment.chosen = f"auto: {why}"
        say_once(f"{attachment.chosen}; {short}")
    elif dense_below == "auto" and short.startswith("dense"):
        say_once(f"{chosen.name}: {short}")
    if dense_below not in ("auto", 0) and not short and any(one.name != "dense" for one in layers):
        say_once(f"{chosen.spec}: dense_below={dense_below} has no effect, because this method never decodes densely")
    return attachment


def detach(model: nn.Module) -> None:
    """Give a model its own attention back; nothing of :func:`attach` remains. Does nothing on other models.

    Caches in host memory are emptied: their memory is given back, though somebody may still have them.
    """
    model = unwrapped(model)
    attachment = model.__dict__.get("foveate")
    _detach(model)
    if isinstance(attachment, Attachment):
        release_host_memory(attachment.uid)


def _detach(model: nn.Module) -> None:
    """:func:`detach` a model whose caches may be used again, when what was attached comes back."""
    attachment = model.__dict__.get("foveate")
    if isinstance(attachment, csa.SparseAttachment):
        attachment.take_off(model)
    elif attachment is not None:
        _take_off(attachment, model)


@contextmanager
def attached(
    model: nn.Module, method: str | Method | None = None, **options: Any
) -> Iterator[Attachment | csa.SparseAttachment]:
    """:func:`attach`, with its options, for the length of a ``with`` block.

    Afterwards what was attached before is back, with its counters, and caches made for it go on. Of blocks that end in
    another order, what the last one to begin has attached stays until it ends.
    """
    model = unwrapped(model)
    before = model.__dict__.get("foveate")
    attachment = attach(model, method, **options)
    attachment.before = before
    try:
        yield attachment
    finally:
        attachment.left = True
        current = later = model.__dict__.get("foveate")
        while later is not None and later is not attachment:
            later = later.before
        if later is None or current is attachment:
            detach(model)
            while before is not None and before.left:
                before = before.before
            if before is not None:
                _put_on(before, model)


def stats(model: nn.Module, reset: bool = False) -> Stats:
    """What every layer read, refined, evicted and reused since it was attached or the counters were reset.

    Args:
        model: an attached model.
        reset: start counting anew afterwards.

    Raises:
        ValueError: for what is no Transformers model, or when the model is not attached.
    """
    model = unwrapped(model)
    attachment = model.__dict__.get("foveate")
    if attachment is None:
        raise ValueError("the model is not attached: there is nothing to report")
    if isinstance(attachment, csa.SparseAttachment):
        return attachment.stats(reset)
    heads = {policy.counters.prompt_heads for policy in attachment.policies.values()} - {None}
    dense_prompts = ", ".join(sorted({prompt_path(one) for one in heads}))
    cache = attachment.cache
    layers = [
        LayerStats(layer=index, method="unchanged", note=f"{reason} layers stay as they are")
        for index, reason in attachment.unchanged.items()
    ]
    for index, policy in attachment.policies.items():
        counted, rows = policy.counters, max(policy.counters.decode_rows, 1)
        read, own = float(counted.keys_read) / rows, counted.own
        asked, fetched = (float(own.get(name, 0)) for name in ("pages_asked", "pages_fetched"))
        page_size = policy.method.fetches.page_size if fetched else 0
        layers.append(
            LayerStats(
                layer=index,
                method=policy.method.spec,
                sequences=counted.sequences,
                prompt_tokens=counted.prompt_tokens,
                decode_steps=counted.decode_steps,
                keys_read_per_step=read,
                keys_available_per_step=counted.keys_available / rows,
                kv_bytes_per_step=read * counted.bytes_per_key,
                tokens_evicted=int(counted.tokens_evicted),
                pages_refined=round(float(own.get("pages_refined", 0))),
                mass_read_share=float(own["mass_read"]) / rows if "mass_read" in own else None,
                indices_reused=round(float(own.get("indices_reused", 0))),
                pages_hot_share=1 - fetched / asked if asked else None,
                fetched_bytes_per_step=fetched * page_size * counted.bytes_per_key / rows,
                dense_steps=counted.dense_steps,
            )
        )
        if reset:
            counted.reset()
    unchanged = cache.unchanged_bytes if cache is not None else 0
    resident = sum(policy.counters.resident_bytes for policy in attachment.policies.values()) + unchanged
    peak = max(policy.counters.held.peak for policy in attachment.policies.values()) + unchanged
    graphs = copy.copy(attachment.graphs.use)
    graphs.reason = attachment.replay_obstacle(model) or graphs.reason
    if reset:
        attachment.graphs.use.reset()
    layers.sort(key=lambda layer: layer.layer)
    alone = attachment.method.spec if attachment.decodes_alone else ""
    short = attachment.short_contexts(model)
    host = sum(policy.counters.host_bytes for policy in attachment.policies.values())
    drafts = None if attachment.lossless is None else copy.copy(attachment.lossless.use)
    if reset and drafts is not None:
        attachment.lossless.use = DraftUse()
    return Stats(layers, resident, peak, host, graphs, dense_prompts, alone, attachment.chosen, short, drafts)


def _put_on(attachment: Attachment | csa.SparseAttachment, model: nn.Module) -> None:
    """Make a model that nothing is attached to attend by an attachment, for the first time or again."""
    if isinstance(attachment, csa.SparseAttachment):
        attachment.put_on(model)
        return
    decoder = decoder_of(model)
    config = decoder.config.get_text_config(decoder=True)
    modules, _ = attention_modules(model, decoder, config)
    attention.register()
    attachment.configurations.replace(around(model, decoder), attention.IMPLEMENTATION)
    attachment.config = decoder.config.get_text_config(decoder=True)
    for index, module in modules.items():
        module.foveate = attachment.policies[index]
    model.foveate = attachment
    attachment.keepers = [module for module in model.modules() if "rope_deltas" in module.__dict__]
    decoder.register_forward_pre_hook(BeforeForward(model, attachment), with_kwargs=True)
    decoder.register_forward_hook(AfterForward(attachment), with_kwargs=True, always_call=True)
    if model.base_model is not decoder:
        model.base_model.register_forward_pre_hook(BeforeWhole(model, attachment), with_kwargs=True)
    if hasattr(model, "generate"):
        if attachment.keepers and hasattr(model, releases.POSITIONS):
            setattr(model, releases.POSITIONS, PreparePositions(model, attachment))
        model._prepare_cache_for_generation = PrepareCache(model, attachment)
        model._prefill = Prefill(model, attachment)
        model._valid_auto_compile_criteria = EnableCompiledCall(model, attachment)
        model.get_compiled_call = GetDecodeCall(model, attachment)
        model.init_continuous_batching = RefuseContinuousBatching()
        if attachment.lossless is not None:
            attachment.lossless.before = model.__dict__.get("generate")
            model.generate = Generate(model, attachment)
            model._extract_generation_mode_kwargs = ModeArguments(model, attachment)


def _take_off(attachment: Attachment, model: nn.Module) -> None:
    """Give the model its own attention back."""
    decoder = decoder_of(model)
    handover.end(attachment.uid)  # of a pass that was interrupted
    unwatch(decoder)
    for module in (decoder, model.base_model):
        remove_hooks(module, lambda hook: isinstance(hook, BeforeForward | AfterForward | BeforeWhole))
    for name in (*releases.GENERATE, releases.POSITIONS, *(STANDS_IN if attachment.lossless is not None else ())):
        model.__dict__.pop(name, None)
    if attachment.lossless is not None and attachment.lossless.before is not None:
        model.generate = attachment.lossless.before
    attachment.configurations.restore(around(model, decoder))
    for module in (model, *decoder.modules()):
        module.__dict__.pop("foveate", None)


def _give_rotary(
    policies: dict[int, Policy], model: nn.Module, decoder: nn.Module, config: transformers.PreTrainedConfig
) -> None:
    """Give layers whose methods need them their rotary positions. Raises ValueError where these are unknown."""
    needing = [index for index, policy in policies.items() if policy.method.needs_rotary]
    if not needing:
        return
    try:
        if any("rope_deltas" in module.__dict__ for module in model.modules()):
            raise ValueError("it gives images positions in several directions (M-RoPE)")
        found = rotary_of_layers(model, decoder, config, needing)
    except ValueError as error:
        name = policies[needing[0]].method.name
        raise ValueError(f"{name} cannot undo the model's rotary positions: {error}") from None
    for index, rotary in found.items():
        policies[index].rotary = rotary
