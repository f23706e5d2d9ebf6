"""Where the keys and values of a Transformers model are: what `attach` checks, and what its caches share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from torch import nn

from foveate.integrations.transformers.facts import kv_heads
from foveate.methods import Method
from foveate.runtime.offload import LayerShape, Offload, parse_budget
from foveate.state import Geometry
from foveate.state.engine_blocks import EngineBlocks
from foveate.state.host_pages import HostPages
from foveate.state.store import MakeStore, class_of


def check(offload: bool, gpu_budget: Any, store: MakeStore | None, dense_below: int | str) -> int | float | None:
    """The budget that was given, if any, as bytes or a share.

    Raises:
        ValueError: for a budget that is none, or without ``offload``, for a store that is none, and for options that do
            not go with one another.
    """
    if not isinstance(offload, bool):
        raise ValueError(f"offload must be True or False, not {offload!r}")
    if not offload and gpu_budget is not None:
        raise ValueError(f"gpu_budget={gpu_budget!r} needs offload=True")
    if store is not None:
        name = class_of(store).__name__
        if offload:
            raise ValueError(f"offload=True and store={name} both say where keys are; leave one out")
        if issubclass(class_of(store), (HostPages, EngineBlocks)):
            whose = "offload=True" if issubclass(class_of(store), HostPages) else "an engine"
            raise ValueError(f"store={name}: {whose} makes these stores; give a class of your own")
    option = fetching(offload, store)
    if option and dense_below not in ("auto", 0):
        raise ValueError(f"{option} never decodes densely: leave dense_below={dense_below} out")
    return parse_budget(gpu_budget) if offload else None


def fetching(offload: bool, store: MakeStore | None) -> str:
    """The option of `attach` by which decode steps fetch the keys that they read; empty when they view all keys."""
    if offload:
        return "offload=True"
    return f"store={class_of(store).__name__}" if store is not None and class_of(store).fetches else ""


def check_methods(methods: Mapping[int, Method], option: str) -> None:
    """Refuse methods with which decode steps would fetch all keys.

    A layer that reads all keys by its role is allowed where another layer fetches pages.

    Args:
        option: the option of `attach` that makes steps fetch keys, see :func:`fetching`.

    Raises:
        ValueError: for such methods; the message names methods to use instead.
    """
    remedy = "take pages, luka, or kascade_pages"
    strange = [one for one in methods.values() if not one.fetches and not one.role.reads_all]
    if strange:
        raise ValueError(
            f"{option}: a decode step of {strange[0].spec} reads or weighs all keys that it keeps; {remedy}"
        )
    if not any(one.fetches for one in methods.values()):
        raise ValueError(f"{option}: {next(iter(methods.values())).name} reads every key in each step; {remedy}")


def check_model(model: nn.Module) -> None:
    """Refuse a model that is spread over devices.

    Raises:
        ValueError: for such a model.
    """
    mapped = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}  # 0 may be cuda:0
    devices = {str(parameter.device) for parameter in model.parameters() if parameter.device.type != "meta"}
    devices |= mapped & {"cpu", "disk"}
    if len(devices) > 1 or (getattr(model, "_tp_size", None) or 1) > 1:
        raise ValueError(
            f"offload=True: the model is spread over {', '.join(sorted(devices))}; load it whole on one GPU, without "
            "device_map, or leave offload out"
        )


def geometry(module: nn.Module, config: transformers.PreTrainedConfig) -> Geometry:
    """The shapes of an attention layer."""
    heads = config.num_attention_heads
    head_dim = getattr(module, "head_dim", None) or config.hidden_size // heads
    groups = getattr(module, "num_key_value_groups", None) or heads // kv_heads(config)
    return Geometry(heads, heads // groups, head_dim, getattr(module, "v_head_dim", head_dim))


def share(
    model: nn.Module, budget: int | float | None, geometries: Mapping[int, Geometry], methods: Mapping[int, Method]
) -> Offload:
    """The state that layers of a new cache share. ``geometries`` and ``methods`` are of the layers with a method."""
    shapes = {index: LayerShape(method, geometries[index], model.dtype) for index, method in methods.items()}
    return Offload(budget, shapes, model.device)
