"""A plan: what a model and its contexts take on a GPU, which method acts on them, and how long a step may take."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from foveate.errors import require
from foveate.integrations.transformers import model_folder
from foveate.integrations.transformers.facts import geometry_of
from foveate.integrations.vllm.settings import FP8, FP8_DTYPE, layer_methods, settings_of
from foveate.methods import Auto, Method, check_artefacts, check_made_for, make
from foveate.methods.pages import Pages
from foveate.planning.gpus import Gpu
from foveate.planning.model import PlannedModel, model_of
from foveate.planning.step import TRANSFORMERS, VLLM, Engine, LayerBytes, step_seconds
from foveate.runtime import sparse_from_length
from foveate.runtime.capture import ROOM
from foveate.runtime.offload import MARGIN, LayerShape, needs
from foveate.state import Geometry
from foveate.state.store import capacity_for


@dataclass(frozen=True)
class Asked:
    """What a plan is made for."""

    context: int
    """Tokens of each sequence, its prompt and its answer."""
    sequences: int
    """Sequences that decode at once."""
    gpu: Gpu
    ranks: int = 1
    """GPUs that share each layer (tensor parallelism)."""
    kv_cache_dtype: str = "auto"
    method: str = "auto"

    def __post_init__(self):
        """Raises UserError for numbers that cannot be."""
        for name in ("context", "sequences"):
            require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        require(self.ranks >= 1, "tp", "at least 1", self.ranks)
        kinds = ("auto", *FP8)
        require(self.kv_cache_dtype in kinds, "kv-cache-dtype", f"one of {', '.join(kinds)}", self.kv_cache_dtype)


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU."""

    weights: int
    kept: int
    """Keys and values, of sliding windows included; in Transformers with what a cache of this length grows to."""
    summaries: int
    room: int
    """The GPU's memory without the share that is left free for activations."""

    @property
    def total(self) -> int:
        return self.weights + self.kept + self.summaries

    @property
    def fits(self) -> bool:
        return self.total <= self.room


@dataclass(frozen=True)
class Decoding:
    """What an engine would do in a decode step, and how long it is estimated to take."""

    engine: Engine
    refused: str = ""
    """Why the engine takes no method; empty where it does."""
    method: Method | None = None
    layers: Mapping[int, Method] | None = None
    sparse_from: int = 0
    """Tokens of each sequence from which steps are sparse; 0: any."""
    acts: bool = False
    """Whether steps of this context are sparse."""
    dense_ms: float | None = None
    sparse_ms: float | None = None
    """Milliseconds of a sparse step; None if they are not known."""

    @property
    def gain(self) -> float | None:
        """How many times as fast sparse steps are estimated to be."""
        return None if self.dense_ms is None or self.sparse_ms is None else self.dense_ms / self.sparse_ms

    @property
    def pays(self) -> bool:
        """Whether to take the method for its speed. Where no time is known, the method's own bound decides."""
        return self.acts and (self.gain is None or self.gain > 1.0)


class Offloaded(NamedTuple):
    """A method with ``offload=True``, and what it takes."""

    spec: str
    """As ``attach`` takes it; ``auto``: where it chooses."""
    device: int
    """Bytes on the GPU beside the weights."""
    host: int
    """Bytes in host memory."""


@dataclass(frozen=True)
class Plan:
    """What :func:`plan_of` finds."""

    model: PlannedModel
    asked: Asked
    why: str
    """The method that ``attach`` takes, and the reason."""
    memory: Memory
    transformers: Decoding
    vllm: Decoding
    most_sequences: int
    """Sequences of this context that fit."""
    fits_fp8: bool
    """Whether keys and values in fp8 would fit, with vLLM."""
    offloaded: Offloaded | None
    """What fits with keys and values in host memory; None where nothing does."""

    def facts(self) -> dict[str, Any]:
        """The numbers of the plan as JSON values; bytes are those on one GPU."""
        memory = {
            name: getattr(self.memory, name) for name in ("weights", "kept", "summaries", "total", "room", "fits")
        }
        engines = {
            one.engine.name: {"refused": one.refused}
            if one.refused
            else {
                "method": one.method.spec,
                "sparse_from": one.sparse_from,
                "acts": one.acts,
                "pays": one.pays,
                "dense_ms_estimated": one.dense_ms,
                "sparse_ms_estimated": one.sparse_ms,
            }
            for one in (self.transformers, self.vllm)
        }
        asked = vars(self.asked) | {"gpu": self.asked.gpu._asdict()}
        about = {"parameters": self.model.parameters, "max_positions": self.model.positions}
        return {
            "model": dict(self.model.shape) | about,
            "asked": asked,
            "memory": memory,
            "most_sequences": self.most_sequences,
            "offloaded": None if self.offloaded is None else self.offloaded._asdict(),
            "why": self.why,
            "engines": engines,
        }


def plan_of(folder: Path, asked: Asked, dtype: str = "auto") -> Plan:
    """The plan for a model folder.

    Raises:
        UserError: for a folder without a model that foveate knows, for a context beyond its positions, and for a number
            of GPUs that its heads cannot be spread over.
        ValueError: for a method that cannot be, or not for this model.
    """
    model = model_of(folder, dtype)
    model_folder.check_positions(asked.context, {"max_positions": model.positions}, "context needs")
    heads = model.shape["heads"]
    require(heads % asked.ranks == 0, "tp", f"a divisor of the model's {heads} query heads", asked.ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say, the plan says
        attached, why = _attached(model, asked.method)
        first = _in_transformers(model, asked, attached)
        second = in_vllm(model, asked)
    taken = first if asked.ranks == 1 and asked.kv_cache_dtype == "auto" else second
    slots = capacity_for(asked.context) if taken is first else asked.context
    memory = memory_of(model, asked, taken.layers or {}, slots)
    free = memory.room - memory.weights
    one = memory_of(model, replace(asked, sequences=1), taken.layers or {}, slots)
    in_fp8 = memory_of(model, replace(asked, kv_cache_dtype="fp8"), second.layers or {}, asked.context)
    return Plan(
        model,
        asked,
        why,
        memory,
        first,
        second,
        most_sequences=max(free, 0) // max(one.kept + one.summaries, 1),
        fits_fp8=not second.refused and asked.kv_cache_dtype == "auto" and in_fp8.fits,
        offloaded=_offloaded(model, asked, memory) if asked.ranks == 1 else None,
    )


def memory_of(model: PlannedModel, asked: Asked, layers: Mapping[int, Method], slots: int) -> Memory:
    """Bytes on one GPU.

    Args:
        layers: the method of each layer that has one.
        slots: of each sequence, in layers that hold all keys.
    """
    dtype = _cache_dtype(model, asked)
    kept = summaries = 0
    for index, geometry in model.chosen.items():
        own = _on_rank(geometry, asked.ranks)
        shape = LayerShape(layers[index] if index in layers else make("dense"), own, dtype)
        kept += shape.kept(asked.sequences, slots)
        summaries += shape.summaries(asked.sequences, slots)
    for geometry, window in model.windows.values():
        shape = LayerShape(make("dense"), _on_rank(geometry, asked.ranks), dtype)
        kept += shape.kept(asked.sequences, min(window, asked.context))
    return Memory(-(-model.weights // asked.ranks), kept, summaries, room_of(asked.gpu))


def room_of(gpu: Gpu) -> int:
    """Bytes of a GPU for weights, keys and values, and summaries; the other bytes are left free for activations."""
    return int(gpu.memory * (1.0 - MARGIN))


def _attached(model: PlannedModel, spec: str) -> tuple[Method, str]:
    """The method that ``attach`` takes, and a text that begins with its name and gives the reason."""
    method = make(spec)
    check_made_for(method, model.shape)
    if not isinstance(method, Auto):
        found = method.for_model(lambda: model.facts)
        return found, f"{found.spec}, as asked"
    chosen, why = method.chosen_for(model.facts)
    if not model.facts["weights"]:
        why = f"{chosen.name}, because the folder holds no weights by which a calibration would be known"
    return chosen, why


def _in_transformers(model: PlannedModel, asked: Asked, method: Method) -> Decoding:
    if asked.ranks > 1:
        return Decoding(TRANSFORMERS, "heads are spread over several GPUs in vLLM alone")
    if asked.kv_cache_dtype != "auto":
        return Decoding(TRANSFORMERS, "keys and values are in fp8 in vLLM alone")
    layers = _of_layers(model, method)
    check_artefacts(layers.values(), lambda: model.facts)
    return _decoding(TRANSFORMERS, model, asked, method, layers)


def in_vllm(model: PlannedModel, asked: Asked) -> Decoding:
    """What a decode step does in vLLM. If vLLM takes no method, ``refused`` has the reason."""
    geometry = geometry_of(model.shape, asked.ranks)
    try:
        settings = settings_of({"foveate": asked.method}).settled(model.shape, lambda: model.facts)
        own = dict.fromkeys(model.chosen, geometry)
        layers = layer_methods(settings.method, own, model.facts, asked.ranks)
    except ValueError as error:
        return Decoding(VLLM, str(error).removeprefix("foveate: "))
    return _decoding(VLLM, model, asked, settings.method, layers)


def _decoding(
    engine: Engine, model: PlannedModel, asked: Asked, method: Method, layers: Mapping[int, Method]
) -> Decoding:
    able = [one for one in layers.values() if one.sparse_from_tokens is not None]
    geometry, begins = geometry_of(model.shape, asked.ranks), 0
    if any(one.sparse_from_tokens for one in able):
        begins = sparse_from_length(able, geometry, asked.sequences, asked.ranks)
    acts = method.name != "dense" and asked.context >= begins
    dense = sparse = None
    if asked.gpu.bandwidth is not None:
        dense = estimated_ms(engine, model, asked, None)
        sparse = estimated_ms(engine, model, asked, layers) if method.name != "dense" else None
    return Decoding(engine, "", method, layers, begins, acts, dense, sparse)


def estimated_ms(
    engine: Engine, model: PlannedModel, asked: Asked, layers: Mapping[int, Method] | None
) -> float | None:
    """Milliseconds that a decode step is estimated to take; None where what its layers read is not known before.

    Args:
        layers: the methods of the layers that have one; None: all are dense.
    """
    dtype, tokens = _cache_dtype(model, asked), asked.context
    found = []
    for index, geometry in model.chosen.items():
        own = _on_rank(geometry, asked.ranks)
        each = LayerShape(make("dense"), own, dtype).kept(asked.sequences, 1)
        if layers is None:
            found.append(LayerBytes(each * tokens))
            continue
        method = layers[index]
        attended = method.attended_keys(tokens)
        if attended is None:
            return None
        found.append(
            LayerBytes(
                each * attended,
                each * float(method.scored(tokens, own, dtype)),
                chooses=method.role.chooses,
                summaries=any(one.per > 1 for one in method.channels(own).values() if hasattr(one, "per")),
                everything=method.role.reads_all,
                exchanges=asked.ranks > 1 and method.role.chooses and method.pools_layer,
            )
        )
    for geometry, window in model.windows.values():
        shape = LayerShape(make("dense"), _on_rank(geometry, asked.ranks), dtype)
        found.append(LayerBytes(shape.kept(asked.sequences, min(window, tokens))))
    return 1e3 * step_seconds(
        engine,
        asked.gpu.bandwidth,
        model.read_by(asked.sequences) / asked.ranks,
        found,
        number=model.shape["layers"],
        sequences=asked.sequences,
        longest=tokens,
        ranks=asked.ranks,
        eight_bits=dtype.itemsize == 1,
    )


def _offloaded(model: PlannedModel, asked: Asked, memory: Memory) -> Offloaded | None:
    """The first that fits with ``offload``: the method that was asked for, ``pages``, or ``pages`` with fewer keys."""
    windows = memory_of(replace(model, chosen={}), asked, {}, 0).kept
    for spec in dict.fromkeys((asked.method, "pages", "pages:top_k=0.125")):
        method = Pages() if isinstance(make(spec), Auto) else make(spec)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            layers = _of_layers(model, method.for_model(lambda: model.facts))
        if any(one.fetches is None and not one.role.reads_all for one in layers.values()):
            continue  # reads keys otherwise than by pages
        if not any(one.fetches for one in layers.values()):
            continue
        shapes = [LayerShape(layers[index], geometry, model.dtype) for index, geometry in model.chosen.items()]
        found = needs(shapes, asked.sequences, capacity_for(asked.context + ROOM))
        device = windows + found.fixed + max(found.prompt, found.least)
        if memory.weights + device <= memory.room:
            return Offloaded(spec, device, found.host)
    return None


def _of_layers(model: PlannedModel, method: Method) -> dict[int, Method]:
    """A model's method of each layer that has one."""
    among = sorted(model.chosen)
    return {index: method.for_layer(index, model.shape["layers"], among) for index in among}


def _cache_dtype(model: PlannedModel, asked: Asked) -> torch.dtype:
    return model.dtype if asked.kv_cache_dtype == "auto" else FP8_DTYPE


def _on_rank(geometry: Geometry, ranks: int) -> Geometry:
    """The heads of one of several GPUs; KV heads that are fewer than these are copied."""
    heads, kv = geometry.num_heads // ranks, max(geometry.num_kv_heads // ranks, 1)
    return Geometry(heads, kv, geometry.head_dim, geometry.value_dim)
