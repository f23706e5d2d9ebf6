"""Caches on disk: a prompt that was read once, for later processes, as one safetensors file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from foveate.calibration.artefact import check_facts
from foveate.integrations.transformers.attachment import Attachment
from foveate.integrations.transformers.cache import Cache
from foveate.integrations.transformers.facts import model_facts, rotary_facts
from foveate.integrations.transformers.layers import CacheLayer
from foveate.integrations.transformers.support import attention_modules, decoder_of
from foveate.json_text import parse_json
from foveate.methods import present
from foveate.state.packing import pack, unpack

_KIND, _SCHEMA = "foveate_cache", 1
_AGAIN = "read the prompt again"


def save_cache(model: torch.nn.Module, cache: Cache, path: str | Path) -> None:
    """Write a cache to a file, from which :func:`load_cache` makes an equal one.

    Args:
        model: the attached model that filled the cache.
        cache: filled, with a method in every layer, and not within assisted decoding.
        path: of the file; written in one step.

    Raises:
        ValueError: for a cache of another model, an empty one, and one with layers of other kinds.
    """
    attachment = _attachment(model)
    if cache.owner != attachment.uid:
        raise ValueError("the cache was made for another model, or before the method was attached")
    cache.phase.check_whole()
    layers = _layers(cache, model)
    if not cache.get_seq_length():
        raise ValueError("the cache is empty")
    if any(layer.record_past for layer in layers):
        raise ValueError("a cache whose tokens can be undone (assisted decoding) cannot be saved")
    tensors, facts = {}, []
    for index, layer in enumerate(layers):
        found, numbers = pack(layer.store)
        tensors |= {f"{index}.{name}": tensor for name, tensor in found.items()}
        facts.append(numbers | {"method": layer.method.spec, "scaling": layer.scaling})
    described = {
        "schema": _SCHEMA,
        "model": _facts(model, attachment),
        "layers": facts,
        "seen": cache.get_seq_length(),
        "prompt_end": cache.phase.prompt_end,
    }
    path = Path(path)
    scratch = path.with_name(f".{path.name}.new")
    try:
        save_file(tensors, scratch, {_KIND: json.dumps(described)})
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def load_cache(model: torch.nn.Module, path: str | Path) -> Cache:
    """The cache that :func:`save_cache` wrote, on the model's device.

    Args:
        model: the same model, with the same method attached.
        path: of the file.

    Raises:
        ValueError: for a file that is none, damaged, of another schema, of another model, or of another method.
    """
    attachment = _attachment(model)
    path = Path(path)
    try:
        with safe_open(path, "pt", device=str(model.device)) as file:
            described = _described(path, (file.metadata() or {}).get(_KIND))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a cache of foveate, or a damaged one ({error})") from None
    facts = _facts(model, attachment)
    check_facts(described["model"], facts, f"cache {str(path)!r}", _AGAIN)
    if described["model"].get("rope") != facts["rope"]:
        raise ValueError(f"cache {str(path)!r} is for other rotary positions than the model's; {_AGAIN}")
    cache = Cache(model)
    layers = _layers(cache, model)
    specs = [present(layer["method"]) for layer in described["layers"]]
    own = [layer.method.spec for layer in layers]
    if specs != own:
        index = next((i for i, pair in enumerate(zip(specs, own)) if pair[0] != pair[1]), 0)
        raise ValueError(
            f"cache {str(path)!r} is of method {specs[index]} in layer {index}, and the model has {own[index]}; attach "
            "the same method, or read the prompt again"
        )
    modules, _ = attention_modules(model, decoder_of(model), attachment.config)
    for index, (layer, known) in enumerate(zip(layers, described["layers"])):
        prefix = f"{index}."
        weight = next(modules[index].parameters())  # a model may be spread over several devices
        found = {
            name.removeprefix(prefix): x.to(weight.device) for name, x in tensors.items() if name.startswith(prefix)
        }
        if weight.is_floating_point() and weight.itemsize > 1 and found["keys"].dtype != weight.dtype:
            raise ValueError(
                f"cache {str(path)!r} is in {found['keys'].dtype}, and the model in {weight.dtype}; {_AGAIN}"
            )
        how = (layer.method.channels, layer.method.evicts, layer.counters, layer.block_size)
        layer.store = unpack(found, known, *how)
        layer.store.forward = cache.phase.forward
        layer.seen, layer.scaling, layer.is_initialized = described["seen"], known["scaling"], True
    cache.phase.prompt_end, cache.phase.prompt_end_known = described["prompt_end"], True
    return cache


def _attachment(model: torch.nn.Module) -> Attachment:
    attachment = getattr(model, "foveate", None)
    if attachment is None:
        raise ValueError("the model is not attached: call foveate.attach(model, method) first")
    return attachment


def _facts(model: torch.nn.Module, attachment: Attachment) -> dict[str, Any]:
    config = attachment.config
    modules, _ = attention_modules(model, decoder_of(model), config)
    return model_facts(config, modules) | {"rope": rotary_facts(config)}


def _layers(cache: Cache, model: torch.nn.Module) -> list[CacheLayer]:
    """The cache's layers. Raises ValueError where one has no method."""
    for index, layer in enumerate(cache.layers):
        if type(layer) is not CacheLayer:
            raise ValueError(
                f"layer {index} of {type(model).__name__} keeps a {type(layer).__name__} of its own: only a cache with "
                "a method in every layer can be saved"
            )
    return list(cache.layers)


def _described(path: Path, text: str | None) -> dict[str, Any]:
    """The file's description of its content. Raises ValueError for another kind of file, or another schema."""
    try:
        described = parse_json(text) if text else None
    except json.JSONDecodeError:
        described = None
    if not isinstance(described, dict) or not isinstance(described.get("layers"), list):
        raise ValueError(f"{path}: not a cache of foveate")
    if described.get("schema") != _SCHEMA:
        raise ValueError(f"{path}: schema {described.get('schema')!r}, and this version reads {_SCHEMA}; {_AGAIN}")
    return described
