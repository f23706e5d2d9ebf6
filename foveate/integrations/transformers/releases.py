"""The names and structures that differ between releases of Transformers. Only this module of the integration knows
them.

Names are read from the installed release, not guessed from its number: 5.24 renamed a model's ``past_key_values`` to
``cache``. If a release returns something in a form that this module does not know, an error explains what to do.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import transformers
from packaging.version import Version
from torch import nn
from transformers import cache_utils
from transformers.masking_utils import sdpa_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import ModelOutput

from foveate.errors import FoveateWarning

OLDEST, NEWEST = "5.17.0", "5.24.0"
"""The range of releases that the suite passes with."""
CACHE_NAMES = ("cache", "past_key_values")
"""What releases call the cache that a model is given and returns, the newest name first."""

UNCHANGED_LAYERS: dict[type, str] = {
    cache_utils.DynamicSlidingWindowLayer: "sliding-window",
    cache_utils.LinearAttentionLayer: "recurrent",
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer: "recurrent and sliding-window",
}
"""Kinds of cache layers whose model layers stay as they are, and what these are."""
if hasattr(cache_utils, "DummyLayer"):
    UNCHANGED_LAYERS[cache_utils.DummyLayer] = "attention-free"

FORGETFUL = ("jamba",)
"""Types of models whose recurrent layers begin each pass of several tokens with an empty state, so that no turn can
follow on a cache."""

GENERATE = {
    "_prepare_cache_for_generation": ("generation_config", "model_kwargs", "generation_mode", "batch_size"),
    "_prefill": ("input_ids", "generation_config", "model_kwargs"),
    "_valid_auto_compile_criteria": ("model_kwargs", "generation_config"),
    "get_compiled_call": ("compile_config",),
    "init_continuous_batching": (),
}
"""Methods that `generate`, or `generate_batch`, calls and foveate stands in for, with arguments that it reads."""
POSITIONS = "_prepare_position_ids_for_generation"
"""The method with which `generate` makes positions; foveate stands in for it where the model keeps offsets of these."""
_MASK = ("attention_mask", "local_size", "allow_is_causal_skip")


class ReleaseError(RuntimeError):
    """The installed release of Transformers does not do what foveate relies on."""


def unknown(what: str) -> ReleaseError:
    """The error for something that this module does not recognise.

    Args:
        what: what happened, without a full stop.
    """
    advice = "install one of these releases, or a newer foveate"
    if _minor(OLDEST) <= _minor(transformers.__version__) <= _minor(NEWEST):
        advice = "this release is among them, so the model differs from those that were tested: please report it"
    return ReleaseError(
        f"{what}. Transformers {transformers.__version__} is installed, and foveate is tested with {OLDEST} to "
        f"{NEWEST}: {advice}"
    )


def _minor(version: str) -> tuple[int, ...]:
    return Version(version).release[:2]


def _name_of_cache() -> str:
    fields = {field.name for field in dataclasses.fields(BaseModelOutputWithPast)}
    name = next((name for name in CACHE_NAMES if name in fields), None)
    if name is None:
        raise unknown(f"models return their cache under a name that is none of {', '.join(CACHE_NAMES)}")
    return name


CACHE = _name_of_cache()
"""What the installed release calls the cache, in `generate` and in what a model returns."""


@functools.cache
def _cache_argument(kind: type[nn.Module]) -> str:
    """What decoders of this class call the cache that they are given; raises ReleaseError for a name not known."""
    name = next((name for name in CACHE_NAMES if name in _parameters(kind)), None)
    if name is None:
        raise unknown(f"{kind.__name__}.forward takes a cache under a name that is none of {', '.join(CACHE_NAMES)}")
    return name


@functools.cache
def _parameters(kind: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def takes(module: nn.Module, name: str) -> bool:
    """Whether a module's forward has an argument of this name."""
    return name in _parameters(type(module))


def arguments(module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a call of a module is given, by name, its cache under :data:`CACHE_NAMES`'s first name in every release.

    Raises:
        ReleaseError: when a cache comes under a name that is not known.
    """
    given = with_newest_names(dict(zip(_parameters(type(module)), args)) | dict(kwargs))
    for name, value in given.items():
        if isinstance(value, transformers.Cache) and name != CACHE_NAMES[0]:
            raise unknown(f"{type(module).__name__} was handed its cache as {name!r}, which foveate does not know")
    return given


def with_newest_names(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments with the cache under the first of :data:`CACHE_NAMES`.

    Raises:
        ValueError: for two caches.
    """
    caches = [kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None]
    if len(caches) > 1:
        raise ValueError(f"give a model one cache, not both {' and '.join(CACHE_NAMES)}")
    rest = {name: value for name, value in kwargs.items() if name not in CACHE_NAMES}
    return rest | ({CACHE_NAMES[0]: caches[0]} if caches else {})


def newest_names(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Have a method that stands in for a module's forward be given its arguments as :func:`with_newest_names`."""

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **with_newest_names(kwargs))

    return call


def full_attention_mask(mask: Any) -> Any:
    """The mask of the full-attention layers; a model around the decoder hands it over in a dict, by kind of layer."""
    return mask.get("full_attention") if isinstance(mask, Mapping) else mask


def for_module(module: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of :func:`arguments`: the cache under the module's own name for it."""
    newest = CACHE_NAMES[0]
    return {_cache_argument(type(module)) if name == newest else name: value for name, value in given.items()}


def returned_cache(out: ModelOutput) -> Any:
    """The cache that a model or `generate` has returned; None without one."""
    return out.get(CACHE)


def without_cache(out: ModelOutput) -> ModelOutput:
    """The same output without its cache."""
    return type(out)(**{name: value for name, value in out.items() if name not in CACHE_NAMES})


def with_cache(out: ModelOutput, cache: Any) -> ModelOutput:
    """The same output with this cache."""
    return type(out)(**out, **{CACHE: cache})


def check(model: nn.Module, decoder: nn.Module) -> None:
    """Refuse a release, or a model, that does not call what foveate stands in for; tell of one newer than tested.

    Raises:
        ReleaseError: with what is missing, the installed release, and the releases that are tested.
    """
    _cache_argument(type(decoder))
    missing = set(_MASK) - set(inspect.signature(sdpa_mask).parameters)
    if missing:
        raise unknown(f"mask functions are not given {', '.join(sorted(missing))}")
    if hasattr(model, "generate"):
        for name, needed in GENERATE.items():
            method = getattr(type(model), name, None)
            if method is None:
                raise unknown(f"{type(model).__name__} has no {name}, with which `generate` prepares what it calls")
            missing = set(needed) - set(inspect.signature(method).parameters)
            if missing:
                raise unknown(f"{name} is not given {', '.join(sorted(missing))}")
    if _minor(transformers.__version__) > _minor(NEWEST):
        _tell_of_newer(transformers.__version__)


@functools.cache
def _tell_of_newer(installed: str) -> None:
    warnings.warn(
        f"foveate: Transformers {installed} is newer than {NEWEST}, the newest release that foveate is tested with; "
        "the first forward pass of an attached model checks that its layers, its cache and its prompt are handled",
        FoveateWarning,
        stacklevel=4,
    )
