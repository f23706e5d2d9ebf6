"""What a forward pass hands on: the layer that goes from the cache to the attention function, and what was reached.

An engine may call the attention function without its cache, as Transformers does. The layer with the new keys is then
posted here, and the attention function takes it. A pass also records the layers whose attention it has computed. Each
thread has passes of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from foveate.runtime.layer import Layer
from foveate.runtime.phase import Phase

_slot = threading.local()


class Reached(NamedTuple):
    """A layer whose attention has been computed."""

    spec: str
    """Its method."""
    finite: Tensor | None
    """Whether the result is finite at a prompt's last token, a bool on the device; None where it was not checked."""


@dataclass
class Pass:
    """A forward pass that is under way on a model with a method."""

    owner: str
    """Identifies the model, see :class:`~foveate.runtime.policy.Policy`."""
    phase: Phase | None
    """The phase of the cache that the pass runs on; None without such a cache."""
    entry: tuple[Layer, Tensor] | None = None
    """The layer posted last, with its keys."""
    reached: dict[int, Reached] = field(default_factory=dict)
    """By layer index."""
    forward: dict[Hashable, Any] = field(default_factory=dict)
    """What the layers of a pass without a cache share."""


def begin(owner: str, phase: Phase | None) -> None:
    """Start a forward pass, perhaps inside one of another model; drop an interrupted pass of the same owner."""
    passes = _passes()
    for index, one in enumerate(passes):
        if one.owner == owner:
            del passes[index:]
            break
    passes.append(Pass(owner, phase))


def end(owner: str) -> Pass | None:
    """End the forward pass of an owner and return it; None when there is none."""
    passes = _passes()
    for index, one in enumerate(passes):
        if one.owner == owner:
            del passes[index:]
            return one
    return None


def current(owner: str | None = None) -> Pass | None:
    """The innermost forward pass under way; None without one, or when it belongs to another owner."""
    passes = _passes()
    return passes[-1] if passes and owner in (None, passes[-1].owner) else None


def _passes() -> list[Pass]:
    return _slot.__dict__.setdefault("passes", [])


def reach(layer: int, owner: str, spec: str, finite: Tensor | None = None) -> None:
    """Record that the attention of a layer has been computed, see :class:`Reached`."""
    one = current(owner)
    if one is not None:
        one.reached[layer] = Reached(spec, finite)


def post(layer: Layer, key: Tensor) -> None:
    """Leave the layer for the attention function that is called with this very key tensor, ``[B, Hkv, n, D]``.

    Raises:
        RuntimeError: when attention never took the layer's previous keys.
        ValueError: outside of a forward pass on the layer's cache, as after `detach`.
    """
    if layer.pending:
        raise RuntimeError(
            "keys were handed to the cache but attention never took them: is the model's attention implementation "
            "still 'foveate'?"
        )
    one = current()
    if one is None or one.phase is not layer.phase:
        raise ValueError(
            "keys were handed to a foveate cache outside of a forward pass of the model that it was made for: the "
            "method may have been detached since, and its cache goes with it; start a new cache"
        )
    one.entry = (layer, key)
    layer.announce(key.shape[2])


def take(key: Tensor, owner: str) -> Layer | None:
    """The layer posted with this key tensor, which is taken out of the slot; None in a pass without a cache.

    Args:
        key: the key tensor that the attention function was given.
        owner: identifies the model that the attention function works for.

    Raises:
        ValueError: when there is a cache but these are not the keys that were posted.
    """
    one = current(owner)
    if one is None:
        return None
    layer, posted = one.entry or (None, None)
    if posted is not key:
        if one.phase is not None:
            raise ValueError(
                "the model attends to other keys than it gave to its cache (it changes them in between, or attends "
                "twice): such a model is not supported"
            )
        return None
    one.entry = None
    return layer
