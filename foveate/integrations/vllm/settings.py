"""What a user configures, and what cannot be served: errors at start that name it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from foveate.methods.pages import Pages
from foveate.methods.spec import SETTING
from foveate.runtime import check_dense_below
from foveate.runtime.steps import obstacle
from foveate.state import Counters, Geometry
from foveate.state.borrowed import EngineCache

HOW = (
    'name a method with --additional-config \'{"foveate": "kascade:..."}\' or FOVEATE_METHOD, '
    'or a foveate.json of `foveate tune`, or one that holds {"method": "kascade:..."}'
)

FP8 = ("fp8", "fp8_e4m3")
"""Of ``kv_cache_dtype``: keys and values in eight bits, which methods read as they are."""

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

    def settled(self, shape: Mapping[str, Any], facts: Callable[[], Mapping[str, Any]]) -> Settings:
        """With the method of one model; ``auto`` becomes one that can be served.

        Args:
            shape: of the model, see :func:`facts_of`.
            facts: gives these and what tells its weights from others, see :meth:`Method.for_model`.
        """
        check_made_for(self.method, shape)
        method = self.method.for_model(facts)
        if isinstance(self.method, Auto) and isinstance(method, Pages):
            method = replace(method, weighted=False)  # requests share blocks, and so their summaries
        return replace(self, method=method)


def check_folder(settings: Settings, folder: Path, strict: bool = True) -> None:
    """Raise ValueError for a method that does not fit the model of a folder; vLLM is not asked, and not imported.

    ``strict``: also for a folder that Transformers cannot read, as vLLM may read others.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError):
        if strict:
            raise
        return
    shape = model_shape(config.get_text_config())
    layers = choosing_layers(config.get_text_config())
    facts = shape | {"weights": _weights(folder, layers)}
    method = settings.settled(shape, lambda: facts).method
    layer_methods(method, dict.fromkeys(layers, geometry_of(shape)), shape["layers"], facts)


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
    return Settings(make(given["method"]), below, float(audit))


def served(vllm_config: Any) -> Settings:
    """The settings, with the method as its model's weights settle it, see :meth:`Method.for_model`."""
    settings, model = settings_of(vllm_config.additional_config), vllm_config.model_config

    def facts() -> dict[str, Any]:
        folder = Path(model.model)
        if not folder.exists():  # a name of the hub, or of another place
            where = {"cache_dir": vllm_config.load_config.download_dir, "revision": model.revision}
            with contextlib.suppress(HFValidationError):
                cached = try_to_load_from_cache(model.model, "config.json", **where)
                folder = Path(cached).parent if isinstance(cached, str) else folder
        by_head = getattr(settings.method, "pool", "layer") != "layer"  # of which a rank has some of the heads
        unfit = vllm_config.lora_config or (by_head and vllm_config.parallel_config.tensor_parallel_size > 1)
        return facts_of(model) | {"weights": [] if unfit else _weights(folder, choosing_layers(model.hf_text_config))}

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
    if settings_of(vllm_config.additional_config).audit:
        check_audit(vllm_config)
    shape, block = geometry_of(facts_of(vllm_config.model_config)), vllm_config.cache_config.block_size
    summarising = [method for method in methods_of(vllm_config).values() if method.channels(shape)]
    if summarising:
        check_summaries(vllm_config, summarising[0].name)
    memory = torch.empty(1, 1, block or 0, shape.head_dim, device="meta")
    for channels in (method.channels(shape) for method in dict.fromkeys(summarising) if block):
        EngineCache(shape, memory, memory.device, channels, Counters())


def methods_of(vllm_config: Any) -> dict[int, Method]:
    """:func:`layer_methods` as far as they are known before weights are loaded."""
    settings, facts = served(vllm_config), facts_of(vllm_config.model_config)
    geometry = geometry_of(facts, vllm_config.parallel_config.tensor_parallel_size)
    layers = choosing_layers(vllm_config.model_config.hf_text_config)
    return layer_methods(settings.method, dict.fromkeys(layers, geometry), facts["layers"], facts)


def check_summaries(vllm_config: Any, name: str) -> None:
    """Raise ValueError for blocks whose summaries would not be where their keys are."""
    refused = {
        "a KV connector or KV offloading: blocks would come without their summaries": vllm_config.kv_transfer_config
        is not None,
        "microbatches, of which each would have its own summaries": getattr(
            vllm_config.parallel_config, "use_ubatching", False
        ),
    }
    _refuse(refused, f"{name} with ")


def check_audit(vllm_config: Any) -> None:
    """Raise ValueError where a step cannot be run twice."""
    model, second = vllm_config.model_config, getattr(vllm_config, "use_v2_model_runner", False)
    refused = {
        "model runner V2 for a model that reads more than tokens: set VLLM_USE_V2_MODEL_RUNNER=0": second
        and (model.is_multimodal_model or model.enable_prompt_embeds),
        "data parallelism, whose ranks step together": vllm_config.parallel_config.data_parallel_size > 1,
        "a KV connector, which would be handed each layer's keys twice": vllm_config.kv_transfer_config is not None,
        "recurrent layers, whose states would advance twice": any(
            getattr(model, name, False) for name in ("is_hybrid", "has_inner_state")
        ),
    }
    _refuse(refused, "audit with ")


def check_engine(vllm_config: Any) -> None:
    """Raise ValueError for what an engine is asked to do and foveate cannot: the first such option is named."""
    parallel, cache, model = vllm_config.parallel_config, vllm_config.cache_config, vllm_config.model_config
    refused = {
        "speculative decoding: several tokens of a row would choose their keys at once": vllm_config.speculative_config
        is not None,
        f"kv_cache_dtype={cache.cache_dtype} for a model in {model.dtype}; there are auto, fp8 and fp8_e4m3": (
            cache.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch."), *FP8)
        ),
        "calculate_kv_scales, which changes scales after graphs are captured": getattr(
            cache, "calculate_kv_scales", False
        ),
        "MLA models: they have no keys of KV heads": model.use_mla,
        "pipeline parallelism: a layer may read the choice of one in another stage": parallel.pipeline_parallel_size
        > 1,
        "prefixes whose tokens see each other (images)": getattr(model, "is_mm_prefix_lm", False),
        "decode context parallelism: a rank would choose among its own keys": parallel.decode_context_parallel_size > 1,
    }
    _refuse(refused)


def _refuse(refused: Mapping[str, bool], where: str = "") -> None:
    """Raise ValueError for the first that is asked for."""
    for what, asked in refused.items():
        if asked:
            raise ValueError(f"foveate does not support {where}{what}")


def layer_methods(
    method: Method, geometries: Mapping[int, Geometry], num_layers: int, facts: Mapping[str, Any]
) -> dict[int, Method]:
    """The method of each full-attention layer, by index.

    Args:
        geometries: shapes of these layers on this rank.
        num_layers: layers of the model.
        facts: of the model, by which a calibration is checked; without weights, so the shape alone tells.

    Raises:
        ValueError: for a method whose steps an engine cannot run, and for a calibration of another model.
    """
    among = sorted(geometries)
    found = {layer: method.for_layer(layer, num_layers, among) for layer in among}
    for layer, own in found.items():
        if reason := obstacle(own, geometries[layer]):
            raise ValueError(f"foveate: {reason} (layer {layer})")
        heads = getattr(getattr(own, "layer_role", None), "heads", None)
        if heads is not None and len(heads) != geometries[layer].num_kv_heads:
            raise ValueError(
                f"foveate: heads of layer {layer} are of all {len(heads)} KV heads, and this rank of the tensor "
                f"parallelism has {geometries[layer].num_kv_heads}: add pool=layer"
            )
    check_artefacts(found.values(), lambda: facts)
    return found


def facts_of(model_config: Any) -> dict[str, Any]:
    """What tells a model from others, from its configuration."""
    return model_shape(model_config.hf_text_config)
