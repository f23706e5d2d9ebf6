"""What a user configures, and what cannot be served: errors at start that name it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import AutoConfig

from foveate.integrations.transformers.facts import folder_weights, geometry_of, model_shape
from foveate.integrations.transformers.support import choosing_layers
from foveate.io import infile
from foveate.io.json_text import parse_json
from foveate.methods import Method, check_artefacts, check_made_for, make
from foveate.methods.auto import Auto
from foveate.methods.handed_on import check_heads
from foveate.methods.spec import SETTING
from foveate.runtime import check_dense_below, drafts
from foveate.runtime.drafts import LONGEST
from foveate.runtime.steps import obstacle
from foveate.state import Counters, Geometry
from foveate.state.engine_blocks import engine_cache

HOW = (
    'name a method with --additional-config \'{"foveate": "kascade:..."}\' or FOVEATE_METHOD, '
    'or a foveate.json of `foveate tune`, or one that holds {"method": "kascade:..."}'
)

FP8 = ("fp8", "fp8_e4m3")
"""Of ``kv_cache_dtype``: keys and values in eight bits, which methods read as they are."""

FP8_DTYPE = torch.float8_e4m3fn

SPECULATION = ("ngram", "draft_model")
"""Methods of speculative decoding beside which foveate is tested. vLLM's own attention reads all keys there, because it
verifies the drafts of a request at once."""

ALL_DENSE = (
    "with speculative decoding vLLM's own attention verifies the drafts, and reads all keys; leave "
    "--speculative-config and --spec-method out to decode sparsely"
)
"""What an engine that speculates says at its start."""

_PLAIN = ("bfloat16", "float16", "float32")
"""Of ``kv_cache_dtype``: numbers as a model has them."""

_weights = functools.cache(folder_weights)
"""Of a folder that an engine has loaded, which asks for them several times."""


@dataclass(frozen=True)
class Settings:
    """What foveate does in an engine."""

    method: Method
    dense_below: int | str = "auto"
    """See :class:`~foveate.runtime.EngineSteps`."""
    audit: float = 0.0
    """Share of decode steps that are also run densely, see :mod:`foveate.integrations.vllm.audit`."""
    lossless: bool = False
    """Whether the method only drafts tokens, which dense attention verifies, see
    :mod:`foveate.integrations.vllm.lossless`."""

    def settled(self, shape: Mapping[str, Any], facts: Callable[[], Mapping[str, Any]]) -> Settings:
        """With the method of one model; ``auto`` becomes one that can be served.

        Args:
            shape: of the model, see :func:`facts_of`.
            facts: gives these and what tells its weights from others, see :meth:`Method.for_model`.
        """
        check_made_for(self.method, shape)
        method = self.method.for_model(facts)
        return replace(self, method=method.for_shared_blocks() if isinstance(self.method, Auto) else method)


class Fitted(NamedTuple):
    """A method as it fits the model of a folder."""

    settings: Settings
    """With the method that the weights settle."""
    methods: dict[int, Method]
    """See :func:`layer_methods`."""
    geometry: Geometry
    """Of a layer, on one of the ranks."""


def fitted(settings: Settings, folder: Path, ranks: int = 1) -> Fitted:
    """The method of a folder's model, and of its layers; vLLM is not asked, and not imported.

    Args:
        ranks: of the tensor parallelism.

    Raises:
        OSError, ValueError: for a folder that Transformers cannot read.
        ValueError: for a method that does not fit the model.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    shape = model_shape(config.get_text_config())
    layers = choosing_layers(config.get_text_config())
    facts = shape | {"weights": _weights(folder, layers)}
    settings = settings.settled(shape, lambda: facts)
    methods = layer_methods(settings.method, dict.fromkeys(layers, geometry_of(shape)), facts, ranks)
    return Fitted(settings, methods, geometry_of(shape, ranks))


def check_folder(settings: Settings, folder: Path, strict: bool = True, asked: Asked | None = None) -> None:
    """Raise ValueError for a method that does not fit the model of a folder; vLLM is not asked, and not imported.

    ``strict``: also for a folder that Transformers cannot read, as vLLM may read others.
    ``asked``: options that the method has to fit, too.
    """
    if not strict:
        try:
            AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError):
            return
    found = fitted(settings, folder, 1 if asked is None else asked.tensor_parallel_size)
    if asked is not None:
        check_summaries(asked, found.methods.values(), found.geometry)


def settings_of(additional_config: Mapping[str, Any] | None) -> Settings:
    """The settings in vLLM's ``additional_config`` or, without them there, in the variable FOVEATE_METHOD.

    Raises:
        ValueError: without either, for a file that cannot be read, and for an unknown method or setting.
    """
    given = (additional_config or {}).get("foveate") or os.environ.get("FOVEATE_METHOD")
    if not given:
        raise ValueError(f"foveate is the attention backend, but has no method: {HOW}")
    given = {"method": given} if isinstance(given, str) else given
    path = given.get("method") if isinstance(given, Mapping) else None
    if isinstance(path, str) and path.endswith(".json") and ":" not in path:
        read = _read(Path(path))
        read = read if isinstance(read, Mapping) else {"method": read}
        if read.get("kind") != SETTING:
            given = {**read, **{name: value for name, value in given.items() if name != "method"}}
    known = [field.name for field in dataclasses.fields(Settings)]
    if not isinstance(given, Mapping) or not isinstance(given.get("method"), str):
        raise ValueError(f"foveate: expected a method, not {given!r}: {HOW}")
    if strange := sorted(set(given) - set(known)):
        raise ValueError(f"foveate: unknown setting {strange[0]!r}; there are {', '.join(known)}")
    below = given.get("dense_below", "auto")
    check_dense_below(below, "foveate: ")
    audit = given.get("audit", 0.0)
    if isinstance(audit, bool) or not isinstance(audit, (int, float)) or not 0 <= audit <= 1:
        raise ValueError(f"foveate: audit must be a share of the decode steps, 0 to 1, not {audit!r}")
    lossless = given.get("lossless", False)
    if not isinstance(lossless, bool):
        raise ValueError(
            f"foveate: lossless must be true or false, not {lossless!r}; vLLM's num_speculative_tokens is "
            "the length of a draft"
        )
    return Settings(make(given["method"]), below, float(audit), lossless)


def wants_lossless(vllm_config: Any) -> bool:
    """Whether an engine is to decode losslessly by foveate; False where foveate is not its attention backend."""
    backend = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    return getattr(backend, "name", None) == "CUSTOM" and settings_of(vllm_config.additional_config).lossless


def _folder_of(name: str, vllm_config: Any) -> Path:
    """The folder of a model, which is a path or a name of the hub whose files are here; else the name as a path."""
    folder = Path(name)
    if not folder.exists():
        where = {"cache_dir": vllm_config.load_config.download_dir, "revision": vllm_config.model_config.revision}
        with contextlib.suppress(HFValidationError):
            cached = try_to_load_from_cache(name, "config.json", **where)
            folder = Path(cached).parent if isinstance(cached, str) else folder
    return folder


def served(vllm_config: Any) -> Settings:
    """The settings, with the method as its model's weights settle it, see :meth:`Method.for_model`."""
    settings, model = settings_of(vllm_config.additional_config), vllm_config.model_config

    def facts() -> dict[str, Any]:
        folder = _folder_of(model.model, vllm_config)
        weights = [] if vllm_config.lora_config else _weights(folder, choosing_layers(model.hf_text_config))
        return facts_of(model) | {"weights": weights}

    return settings.settled(facts_of(model), facts)


def _read(path: Path) -> Any:
    try:
        return parse_json(infile.read(path, infile.MOST_OF_SETTINGS))
    except OSError as error:
        raise ValueError(f"foveate: {path}: {error.strerror or error}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"foveate: {path}: malformed JSON ({error})") from None


def check_early(vllm_config: Any) -> None:
    """Raise ValueError, before weights are loaded, for what can be known by then: see the other functions."""
    check_engine(vllm_config)
    asked = asked_of(vllm_config)
    settings = settings_of(vllm_config.additional_config)
    if settings.audit:
        check_audit(asked)
    if settings.lossless:
        check_lossless(asked, methods_of(vllm_config))
    check_summaries(asked, methods_of(vllm_config).values(), geometry_of(facts_of(vllm_config.model_config)))


def methods_of(vllm_config: Any) -> dict[int, Method]:
    """:func:`layer_methods` as far as they are known before weights are loaded."""
    settings, facts = served(vllm_config), facts_of(vllm_config.model_config)
    ranks = vllm_config.parallel_config.tensor_parallel_size
    layers = choosing_layers(vllm_config.model_config.hf_text_config)
    return layer_methods(settings.method, dict.fromkeys(layers, geometry_of(facts, ranks)), facts, ranks)


@dataclass(frozen=True)
class Asked:
    """What vLLM's options ask for, as far as foveate needs to know it, of a command or of an engine.

    The defaults are vLLM's. They also stand for options that a command does not name.
    """

    speculation: str | None = None
    """The method of speculative decoding; an empty string where vLLM has to find it out."""
    drafts_by_foveate: bool = False
    """Whether a draft model is given foveate's own attention backend."""
    drafts_by_itself: bool = False
    """Whether the draft model is the served model."""
    draft_tokens: int = 0
    """Tokens of a draft."""
    first_runner: bool = False
    """Model runner V1."""
    lora: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    data_parallel_size: int = 1
    kv_cache_dtype: str = "auto"
    dtype: str | None = None
    """Of the model, such as ``bfloat16``; None: not known."""
    calculate_kv_scales: bool = False
    block_size: int | None = None
    kv_transfer: bool = False
    """A KV connector or KV offloading."""
    microbatches: bool = False
    pooling: bool = False
    """No tokens are generated."""
    recurrent: bool = False
    mla: bool = False
    mm_prefix: bool = False
    """Prefixes whose tokens see each other."""
    second_reads_more: bool = False
    """Model runner V2 with a model that reads more than tokens."""


def asked_of(vllm_config: Any) -> Asked:
    """What an engine is asked to do."""
    parallel, cache, model = vllm_config.parallel_config, vllm_config.cache_config, vllm_config.model_config
    speculation = vllm_config.speculative_config
    second = getattr(vllm_config, "use_v2_model_runner", False)
    return Asked(
        speculation=None if speculation is None else getattr(speculation, "method", None) or "",
        drafts_by_foveate=getattr(getattr(speculation, "attention_backend", None), "name", None) == "CUSTOM",
        drafts_by_itself=_drafts_by_itself(vllm_config),
        draft_tokens=getattr(speculation, "num_speculative_tokens", 0) or 0,
        first_runner=not second,
        lora=vllm_config.lora_config is not None,
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        decode_context_parallel_size=parallel.decode_context_parallel_size,
        data_parallel_size=parallel.data_parallel_size,
        kv_cache_dtype=cache.cache_dtype,
        dtype=str(model.dtype).removeprefix("torch."),
        calculate_kv_scales=getattr(cache, "calculate_kv_scales", False),
        block_size=cache.block_size,
        kv_transfer=vllm_config.kv_transfer_config is not None,
        microbatches=getattr(parallel, "use_ubatching", False),
        pooling=getattr(model, "runner_type", "generate") == "pooling",
        recurrent=any(getattr(model, name, False) for name in ("is_hybrid", "has_inner_state")),
        mla=model.use_mla,
        mm_prefix=getattr(model, "is_mm_prefix_lm", False),
        second_reads_more=second and (model.is_multimodal_model or model.enable_prompt_embeds),
    )


def _drafts_by_itself(vllm_config: Any) -> bool:
    """Whether an engine's draft model is its own, by the same name or the same folder."""
    drafts, model = getattr(vllm_config.speculative_config, "model", None), vllm_config.model_config
    if drafts is None or drafts == model.model:
        return drafts is not None
    return _folder_of(drafts, vllm_config) == _folder_of(model.model, vllm_config)


def check_engine(vllm_config: Any) -> None:
    """As :func:`check_options`, of an engine."""
    check_options(asked_of(vllm_config))


def check_options(asked: Asked) -> None:
    """Raise ValueError for what foveate cannot do; the first such option is named, and what to do instead."""
    plain, model = (_PLAIN, "") if asked.dtype is None else ((asked.dtype,), f" for a model in {asked.dtype}")
    refused = {
        f"speculative decoding by {asked.speculation}: give one of {', '.join(SPECULATION)}, or leave "
        "--speculative-config and --spec-method out": asked.speculation not in (None, "", *SPECULATION),
        'a draft model with "attention_backend": "CUSTOM": leave that out of --speculative-config': (
            asked.drafts_by_foveate
        ),
        f"--kv-cache-dtype {asked.kv_cache_dtype}{model}: give auto, {' or '.join(FP8)}": (
            asked.kv_cache_dtype not in ("auto", *plain, *FP8)
        ),
        "--calculate-kv-scales, which changes scales after graphs are captured: leave it out": (
            asked.calculate_kv_scales
        ),
        "MLA models, which have no keys of KV heads: serve the model without foveate": asked.mla,
        f"pipeline parallelism (--pipeline-parallel-size {asked.pipeline_parallel_size}), because a layer may read the "
        "keys that a layer of another stage chose: give --tensor-parallel-size instead": (
            asked.pipeline_parallel_size > 1
        ),
        "prefixes whose tokens see each other (images): serve the model without foveate": asked.mm_prefix,
        f"decode context parallelism (--decode-context-parallel-size {asked.decode_context_parallel_size}), because a "
        "rank would choose among its own keys: leave it out": asked.decode_context_parallel_size > 1,
        "pooling models (--runner pooling), because they decode nothing: serve the model without foveate": (
            asked.pooling
        ),
    }
    _refuse(refused)


def check_audit(asked: Asked) -> None:
    """Raise ValueError where a step cannot be run twice."""
    refused = {
        "model runner V2 for a model that reads more than tokens: set VLLM_USE_V2_MODEL_RUNNER=0": (
            asked.second_reads_more
        ),
        "data parallelism, whose ranks step together: leave audit out": asked.data_parallel_size > 1,
        "a KV connector, which would be handed each layer's keys twice: leave audit out": asked.kv_transfer,
        "recurrent layers, whose states would advance twice: leave audit out": asked.recurrent,
        "speculative decoding, whose steps are dense: leave audit out": asked.speculation is not None,
    }
    _refuse(refused, "audit with ")


def check_lossless(asked: Asked, methods: Mapping[int, Method]) -> None:
    """Raise ValueError where foveate cannot draft for a model, or not in this engine.

    Args:
        methods: of the layers, by index.
    """
    how = "serve by `foveate serve --lossless 8`, or give --speculative-config as that prints it"
    refused = {
        f"drafts of another model, or none: {how}": asked.speculation != "draft_model" or not asked.drafts_by_itself,
        f"drafts of {asked.draft_tokens} tokens: give 1 to {LONGEST}": not 1 <= asked.draft_tokens <= LONGEST,
        "model runner V1: set VLLM_USE_V2_MODEL_RUNNER=1": asked.first_runner,
        "LoRA, because drafts would be of other adapters: leave --enable-lora out": asked.lora,
        "a model that reads more than tokens: leave lossless out": asked.second_reads_more,
        "recurrent layers, whose states drafts would advance: leave lossless out": asked.recurrent,
        "a KV connector, which would be handed drafted keys: leave lossless out": asked.kv_transfer,
        "data parallelism, whose ranks step together: leave lossless out": asked.data_parallel_size > 1,
    }
    _refuse(refused, "lossless decoding with ")
    for layer, method in methods.items():
        copies = "it copies the keys of its rows" if method.replay and method.replay.copies_keys else ""
        if reason := drafts.obstacle(method) or copies:
            raise ValueError(f"foveate does not support lossless decoding by {method.name} (layer {layer}): {reason}")


def check_summaries(asked: Asked, methods: Iterable[Method], geometry: Geometry) -> None:
    """Raise ValueError for blocks whose summaries would not be where their keys are, or that pages do not divide."""
    summarising = [method for method in methods if method.channels(geometry)]
    refused = {
        "a KV connector or KV offloading, because blocks would come without their summaries: take a method without "
        "summaries, such as kascade": asked.kv_transfer,
        "microbatches, of which each would have its own summaries: leave --enable-dbo and --ubatch-size out": (
            asked.microbatches
        ),
    }
    if summarising:
        _refuse(refused, f"{summarising[0].name} with ")
    memory = torch.empty(1, 1, asked.block_size or 0, geometry.head_dim, device="meta")
    for channels in (method.channels(geometry) for method in summarising if asked.block_size):
        engine_cache(geometry, memory, memory.device, channels, Counters())


def _refuse(refused: Mapping[str, bool], where: str = "") -> None:
    """Raise ValueError for the first that is asked for."""
    for what, asked in refused.items():
        if asked:
            raise ValueError(f"foveate does not support {where}{what}")


def layer_methods(
    method: Method, geometries: Mapping[int, Geometry], facts: Mapping[str, Any], ranks: int = 1
) -> dict[int, Method]:
    """The method of each full-attention layer, by index.

    Args:
        geometries: shapes of these layers on one of the ranks.
        facts: of the model, by which a calibration is checked; without weights, so the shape alone tells.
        ranks: of the tensor parallelism.

    Raises:
        ValueError: for a method whose steps an engine cannot run, and for a calibration of another model.
    """
    among = sorted(geometries)
    found = {layer: method.for_layer(layer, facts["layers"], among) for layer in among}
    for layer, own in found.items():
        if reason := obstacle(own, geometries[layer]):
            raise ValueError(f"foveate: {reason} (layer {layer}); kascade and pages:weighted=false are served")
        check_heads(own, facts["kv_heads"])
        if ranks > facts["kv_heads"] and own.role.chooses and not own.pools_layer:
            fix = f"add {own.pools_layer_by}, or " if own.pools_layer_by else ""
            raise ValueError(
                f"foveate: {own.name} chooses for each of the {facts['kv_heads']} KV heads, whose query heads a tensor "
                f"parallelism of {ranks} parts: {fix}take {facts['kv_heads']} ranks at most"
            )
    check_artefacts(found.values(), lambda: facts)
    return found


def facts_of(model_config: Any) -> dict[str, Any]:
    """What tells a model from others, from its configuration."""
    return model_shape(model_config.hf_text_config)
