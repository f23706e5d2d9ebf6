"""Caches on disk: a prompt that was read once, for later processes, as one safetensors file."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from foveate.errors import UserError
from foveate.integrations.transformers import unchanged_layers
from foveate.integrations.transformers.attachment import Attachment
from foveate.integrations.transformers.cache import Cache
from foveate.integrations.transformers.digests import digests, weights_digest
from foveate.integrations.transformers.facts import model_shape, rotary_facts
from foveate.integrations.transformers.layers import CacheLayer
from foveate.integrations.transformers.positions import rotated_otherwise
from foveate.integrations.transformers.support import decoder_of, unwrapped
from foveate.io import infile, outfile
from foveate.io.json_text import parse_json
from foveate.state import Geometry, RowNumber
from foveate.state.packing import pack, unpack

_KIND, _SCHEMA = "foveate_cache", 3
_FIELDS = {
    "schema": int,
    "model": dict,
    "weights": str,
    "layers": list,
    "seen": int,
    "batch": int,
    "prompt_end": int,
    "prompt_end_known": bool,
    "prompt_end_guessed": bool,
    "checksums": dict,
    "digest": str,
}
"""What a description has, the digest of the other fields included."""
_AGAIN = "read the prompt again"


def save_cache(model: torch.nn.Module, cache: Cache, path: str | Path) -> None:
    """Write a cache to a file, from which :func:`load_cache` makes an equal one.

    The file holds the ids of the tokens, checksums, and a digest of all weights of the model, active adapters of PEFT
    included. Every call computes the digest, in about a second for each gigabyte on a CPU and less on a GPU.

    Args:
        model: the attached model that filled the cache; PEFT's and compiled ones as :func:`foveate.attach` takes them.
        cache: filled, whole, and not within assisted decoding.
        path: of the file, written in one step; a leading ``~`` is the home folder. A missing folder is made.

    Raises:
        ValueError: for a path that cannot be written to, a cache of another model, an interrupted or empty one, and one
            with layers that keep a memory of their own.
    """
    path = outfile.named(path)
    outfile.check(path, "path")
    model, attachment = _attached(model)
    _check_cache(cache, attachment)
    for index, layer in enumerate(cache.layers):
        if not unchanged_layers.can_be_saved(layer):
            raise UserError(
                f"layer {index} of {type(model).__name__} keeps a memory of its own, which cannot be saved "
                f"({type(layer).__name__})"
            )
        if getattr(layer, "record_past", False):
            raise UserError("a cache whose tokens can be undone (activate_past_recording) cannot be saved")
    seen = cache.get_seq_length()
    if not seen:
        raise UserError("the cache is empty")
    if reason := rotated_otherwise(attachment.config, cache.rotated, seen):
        raise UserError(f"{reason}: such a cache cannot be saved; read the whole context at once")
    tensors, layers = {}, []
    for index, layer in enumerate(cache.layers):
        found, described = unchanged_layers.pack(layer)
        if isinstance(layer, CacheLayer):
            kept, numbers = pack(layer.cache)
            found |= kept
            described |= numbers | {"method": layer.method.spec, "scaling": layer.scaling}
        tensors |= {f"{index}.{name}": tensor for name, tensor in found.items()}
        layers.append(described)
    ids = cache.ids.read(seen)
    if ids is not None:
        tensors["ids"] = ids
    # parts of the model may keep one tensor, and safetensors refuses memory that is shared
    tensors |= {f"offsets.{n}": one.clone() for n, one in enumerate(cache.offsets or ()) if one is not None}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    described = {
        "schema": _SCHEMA,
        "model": _shape(attachment),
        "weights": weights_digest(model),
        "layers": layers,
        "seen": seen,
        "batch": cache.batch_size,
        "prompt_end": cache.phase.prompt_end,
        "prompt_end_known": cache.phase.prompt_end_known,
        "prompt_end_guessed": cache.phase.prompt_end_guessed,
        "checksums": digests(tensors),
    }
    with outfile.replacing(path) as scratch, outfile.writing(path):
        try:  # of several metadata safetensors would write the order by chance
            save_file(tensors, scratch, {_KIND: json.dumps(described | {"digest": _digest(described)})})
        except SafetensorError as error:
            raise UserError(f"{path}: cannot be written to ({error})") from None


def load_cache(model: torch.nn.Module, path: str | Path) -> Cache:
    """The cache that :func:`save_cache` wrote, on the model's devices.

    Every call computes the digest of the model's weights, as :func:`save_cache` does.

    Args:
        model: the same model, with the same weights and adapters, and with the same method attached.
        path: of the file; a leading ``~`` is the home folder.

    Raises:
        ValueError: for a file that cannot be read, is none of foveate's or of another schema, is damaged or was edited,
            or is of another model or method; it names the file and what in it is wrong.
    """
    path = outfile.named(path)
    model, attachment = _attached(model)
    infile.check(path)
    try:
        with (
            infile.plainly_named(path) as name,
            safe_open(name, "pt", device="cpu" if attachment.fetches else str(model.device)) as file,
        ):
            described = _described(path, file.metadata() or {})
            _check_model(path, described, model, attachment)
            cache = Cache(model)
            _check_methods(path, described, cache)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a cache of foveate, or a damaged one ({error})") from None
    _check_sums(path, described, tensors)
    cache.reserve_memory(described["batch"], described["seen"])
    _fill(path, described, tensors, cache, model, attachment)
    cache.rotated = described["seen"]
    attachment.remember(cache)
    return cache


def _attached(model: torch.nn.Module) -> tuple[torch.nn.Module, Attachment]:
    model = unwrapped(model)
    attachment = getattr(model, "foveate", None)
    if attachment is not None and not isinstance(attachment, Attachment):
        raise UserError("the model attends by a sparse attention of its own, whose caches cannot be saved")
    if attachment is None:
        raise UserError("the model is not attached: call foveate.attach(model, method) first")
    return model, attachment


def _check_cache(cache: Any, attachment: Attachment) -> None:
    if not isinstance(cache, Cache):
        raise UserError(f"cache must be a foveate.Cache, not a {type(cache).__name__}")
    if cache.owner != attachment.uid:
        raise UserError("the cache was made for another model, or before the method was attached")
    cache.phase.check_whole()


def _shape(attachment: Attachment) -> dict[str, Any]:
    return model_shape(attachment.config) | {"rope": rotary_facts(attachment.config)}


def _digest(described: Mapping[str, Any]) -> str:
    """Of a description, 32 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(described).encode(), digest_size=16).hexdigest()


def _wrong(path: Path, what: str) -> UserError:
    return UserError(f"{path}: damaged or edited: {what}; {_AGAIN}")


def _described(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """The file's description of its content. Raises ValueError for another kind of file, or another schema."""
    text = metadata.get(_KIND)
    if text is None:
        raise UserError(f"{path}: not a cache of foveate")
    try:
        described = parse_json(text)
    except json.JSONDecodeError as error:
        raise _wrong(path, f"its description is no JSON ({error})") from None
    if not isinstance(described, dict):
        raise _wrong(path, "its description is no object")
    if described.get("schema") != _SCHEMA:
        raise UserError(f"{path}: schema {described.get('schema')!r}, and this version reads {_SCHEMA}; {_AGAIN}")
    for name in described:
        if name not in _FIELDS:
            raise _wrong(path, f"{name} is not known")
    for name, kind in _FIELDS.items():
        if type(described.get(name)) is not kind:
            raise _wrong(path, f"{name} is {described.get(name)!r}, and must be of type {kind.__name__}")
    for name in ("seen", "batch", "prompt_end"):
        if described[name] < (0 if name == "prompt_end" else 1):
            raise _wrong(path, f"{name} is {described[name]}")
    for index, layer in enumerate(described["layers"]):
        if not isinstance(layer, dict):
            raise _wrong(path, f"layers[{index}] is no object")
    if described.pop("digest") != _digest(described):
        raise _wrong(path, "its description is not that of its digest")
    return described


def _check_model(path: Path, described: Mapping[str, Any], model: torch.nn.Module, attachment: Attachment) -> None:
    """Refuse a cache of another model, or of other weights."""
    shape, theirs = _shape(attachment), described["model"]
    for name in (*shape, *theirs):
        if name == "rope" and theirs.get(name) != shape.get(name):
            raise UserError(f"cache {str(path)!r} is for other rotary positions than the model's; {_AGAIN}")
        if theirs.get(name) != shape.get(name):
            raise UserError(
                f"cache {str(path)!r} is for a model with {name} {theirs.get(name)!r}, and this one has "
                f"{shape.get(name)!r}; {_AGAIN}"
            )
    if described["weights"] != weights_digest(model):
        raise UserError(
            f"cache {str(path)!r} is for another model of the same shape, or for other adapters: its weights differ "
            f"in value or type; {_AGAIN}"
        )


def _check_methods(path: Path, described: Mapping[str, Any], cache: Cache) -> None:
    """Refuse a cache of other layers, or of other methods."""
    if len(described["layers"]) != len(cache.layers):
        raise _wrong(path, f"layers has {len(described['layers'])} entries, and the model {len(cache.layers)} layers")
    for index, (layer, known) in enumerate(zip(cache.layers, described["layers"])):
        if not isinstance(layer, CacheLayer):
            continue
        theirs = known.get("method")
        if not isinstance(theirs, str):
            raise _wrong(path, f"method of layer {index} is {theirs!r}")
        if theirs != layer.method.spec:
            raise UserError(
                f"cache {str(path)!r} is of method {theirs} in layer {index}, and the model has {layer.method.spec}; "
                f"attach the same method, or {_AGAIN}"
            )


def _check_sums(path: Path, described: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that differ from the tensors that were written, by their checksums."""
    sums, found = described["checksums"], digests(tensors)
    for name in (*sums, *found):
        if name not in found:
            raise _wrong(path, f"tensor {name} is missing")
        if name not in sums:
            raise _wrong(path, f"tensor {name} is not among its checksums")
        if sums[name] != found[name]:
            raise _wrong(path, f"tensor {name} is not that of its checksum")


def _fill(
    path: Path,
    described: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    cache: Cache,
    model: torch.nn.Module,
    attachment: Attachment,
) -> None:
    """Give an empty cache the content of a file."""
    seen, batch, tensors = described["seen"], described["batch"], dict(tensors)
    indexed = [one for one in decoder_of(model).modules() if next(one.parameters(), None) is not None]
    modules = {getattr(one, "layer_idx", None): one for one in indexed}
    attending = {one.layer_idx: one for one in indexed if hasattr(one, "num_key_value_groups")}
    for index, (layer, known) in enumerate(zip(cache.layers, described["layers"])):
        prefix = f"{index}."
        module = modules.get(index, model)  # a model may be spread over several devices
        device = next(module.parameters()).device
        names = [name for name in tensors if name.startswith(prefix)]
        found = {name.removeprefix(prefix): tensors.pop(name) for name in names}
        in_host = attachment.fetches and isinstance(layer, CacheLayer) and layer.method.fetches
        found = {name: x if in_host and name in ("keys", "values") else x.to(device) for name, x in found.items()}
        geometry = _geometry(attending[index], attachment, found) if index in attending else None
        try:
            unchanged_layers.unpack(layer, found, known, seen, batch, geometry)
            if isinstance(layer, CacheLayer):
                _fill_layer(layer, found, known, cache, seen, batch, geometry, device)
            elif found or known:
                raise ValueError(f"{next(iter((*found, *known)))}: is not known")
        except ValueError as error:
            raise _wrong(path, f"layer {index}: {error}") from None
    attended = [layer for layer in cache.layers if isinstance(layer, CacheLayer)]
    lengths = {tuple(layer.cache.lengths) for layer in attended}
    if len(lengths) > 1:
        raise _wrong(path, f"rows.lengths of its layers differ: {sorted(lengths)}")
    if max(map(max, lengths)) > seen:
        raise _wrong(path, f"seen is {seen}, and rows.lengths has {max(map(max, lengths))}")
    try:
        for layer in attended:
            _check_prompt(described, layer)
    except ValueError as error:
        raise _wrong(path, str(error)) from None
    ids = tensors.pop("ids", None)
    if ids is not None:
        if ids.dtype != torch.int64 or tuple(ids.shape) != (batch, seen):
            raise _wrong(path, f"ids is {ids.dtype} {list(ids.shape)}; batch and seen make it int64 {[batch, seen]}")
        cache.ids.restore(ids.to(model.device))
    offsets = [tensors.pop(f"offsets.{n}", None) for n in range(len(attachment.keepers))]
    if tensors:
        raise _wrong(path, f"tensor {next(iter(tensors))} is not known")
    for one in offsets:
        if one is not None and (one.dtype != torch.int64 or one.dim() != 2 or len(one) not in (1, batch)):
            raise _wrong(path, f"offsets are {one.dtype} {list(one.shape)}, and must be int64 {[batch, 1]}")
    cache.offsets = [one if one is None else one.to(model.device) for one in offsets]
    for name in ("prompt_end", "prompt_end_known", "prompt_end_guessed"):
        setattr(cache.phase, name, described[name])
    for layer in attended:  # nothing is refused from here on
        layer.cache.counters = layer.counters.take_over(layer.cache.counters)
        layer.cache.count_in(cache.phase.held)


def _fill_layer(
    layer: CacheLayer,
    tensors: dict[str, Tensor],
    known: Mapping[str, Any],
    cache: Cache,
    seen: int,
    batch: int,
    geometry: Geometry,
    device: torch.device,
) -> None:
    """Give a layer with a method its tokens. Raises ValueError as :func:`foveate.state.packing.unpack`."""
    scaling = known.get("scaling")
    if type(scaling) is not float or not (math.isfinite(scaling) and scaling > 0):
        raise ValueError(f"scaling: must be a number above 0, not {scaling!r}")
    numbers = {name: value for name, value in known.items() if name not in ("method", "scaling")}
    layer.cache = unpack(tensors, numbers, geometry, device, layer.new_cache)
    for one in layer.method.channels(geometry).values():
        if isinstance(one, RowNumber) and one.check is not None:
            one.check(layer.cache.rows)
    if layer.cache.batch_size != batch:
        raise ValueError(f"keys: has {layer.cache.batch_size} rows, and batch is {batch}")
    layer.cache.forward = cache.phase.forward
    layer.seen, layer.scaling, layer.is_initialized = seen, scaling, True


def _geometry(module: torch.nn.Module, attachment: Attachment, tensors: Mapping[str, Tensor]) -> Geometry:
    """The shapes of a layer by its module, or, where that does not say the head dims, by its keys and values."""
    heads = attachment.config.num_attention_heads
    dims = [tensors[name].shape[-1] if name in tensors else 0 for name in ("keys", "values")]
    head_dim = getattr(module, "head_dim", dims[0])
    value_dim = getattr(module, "v_head_dim", head_dim if hasattr(module, "head_dim") else dims[1])
    return Geometry(heads, heads // module.num_key_value_groups, head_dim, value_dim)


def _check_prompt(described: Mapping[str, Any], layer: CacheLayer) -> None:
    """Refuse rows of a layer that have read other prompts than the description says."""
    seen, end, rows = described["seen"], described["prompt_end"], layer.cache.rows
    if seen >= end:
        decoded = rows["lengths"][0] - rows["prompt"][0]
        if any(rows["observed"]) or decoded != seen - end:
            raise ValueError(
                f"seen and prompt_end make {seen - end} decoded tokens, and rows.lengths and rows.prompt {decoded}; "
                f"rows.observed is {rows['observed']}"
            )
    elif described["prompt_end_guessed"]:
        raise ValueError(f"prompt_end is {end} and guessed, which is never beyond seen, {seen}")
    elif not described["prompt_end_known"]:  # all that was read is the beginning of the first prompt
        whole = "observed" if layer.method.needs_prompt_end else "prompt"
        if rows[whole] != rows["lengths"]:
            raise ValueError(f"prompt_end is {end}, beyond seen, {seen}, and rows.{whole} is not rows.lengths")
