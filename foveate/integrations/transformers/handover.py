"""From the cache to the attention function, which Transformers hands no cache: the layer is posted for it here.

Also the proof that a forward pass is foveate's: which layers it reached, and on which cache. Each thread has its own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from foveate.integrations.transformers.cache import Cache, Layer, Phase

_slot = threading.local()


class Reached(NamedTuple):
    """A layer whose attention has been computed."""

    spec: str
    """Its method."""
    finite: Tensor | None
    """Whether the result is finite, a bool on the device; None where nobody looked."""


@dataclass
class Pass:
    """A forward pass of an attached model that is under way."""

    owner: str
    """uid of the model's attachment."""
    phase: Phase | None
    """That of the cache which the pass runs on; None without a foveate cache."""
    entry: tuple[Layer, Tensor] | None = None
    """The layer posted last, with its keys."""
    reached: dict[int, Reached] = field(default_factory=dict)
    forward: dict[Hashable, Any] = field(default_factory=dict)
    """What the layers of a pass without a cache share."""


def begin(owner: str, phase: Phase | None) -> None:
    """A forward pass starts, perhaps within one of another model; forget what an interrupted one may have left."""
    passes = _passes()
    for index, one in enumerate(passes):
        if one.owner == owner:
            del passes[index:]
            break
    passes.append(Pass(owner, phase))


def end(owner: str) -> Pass | None:
    """The forward pass of a model is over; None when it had not begun."""
    passes = _passes()
    for index, one in enumerate(passes):
        if one.owner == owner:
            del passes[index:]
            return one
    return None


def current(owner: str | None = None) -> Pass | None:
    """The innermost forward pass that is under way; None without one, or when it is of another owner."""
    passes = _passes()
    return passes[-1] if passes and owner in (None, passes[-1].owner) else None


def _passes() -> list[Pass]:
    return _slot.__dict__.setdefault("passes", [])


def reach(layer: int, owner: str, spec: str, finite: Tensor | None = None) -> None:
    """The attention of a layer has been computed, see :class:`Reached`."""
    one = current(owner)
    if one is not None:
        one.reached[layer] = Reached(spec, finite)


def post(layer: Layer, key: Tensor) -> None:
    """Leave the layer for the attention function that is called with this very key tensor.

    Raises:
        ValueError: outside of a forward pass on the layer's cache, as after `detach`.
    """
    one = current()
    if one is None or one.phase is not layer.phase:
        raise ValueError(
            "keys were handed to a foveate cache outside of a forward pass of the model that it was made for: the "
            "method may have been detached since, and its cache goes with it; start a new cache"
        )
    one.entry = (layer, key)


def take(key: Tensor, owner: str) -> Layer | None:
    """The layer posted with this key tensor; None in a forward without a foveate cache. The slot is empty afterwards.

    Args:
        key: the key tensor that the attention function was given.
        owner: uid of the attachment of the model that it works for.

    Raises:
        ValueError: when there is a cache but these are not the keys that were announced to it.
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


class Announced(NamedTuple):
    """What `generate` has prepared for its first forward pass."""

    cache: weakref.ref[Cache]
    owes_steps: bool
    """`generate` has yet to ask for the function that runs a decode step."""
    prompt_only: bool
    """The pass feeds no more than the prompt."""


def announce(owner: str, cache: Cache, *, owes_steps: bool, prompt_only: bool) -> None:
    """`generate` has prepared a cache for the model with this attachment uid; see :class:`Announced`."""
    _announced()[owner] = Announced(weakref.ref(cache), owes_steps, prompt_only)


def asked_for_steps(owner: str) -> None:
    """`generate` has asked for the function that runs a decode step."""
    if owner in _announced():
        _announced()[owner] = _announced()[owner]._replace(owes_steps=False)


@contextmanager
def prefilling(owner: str) -> Iterator[None]:
    """Within the block `generate` reads the prompt on the cache that was announced; afterwards that is forgotten."""
    _slot.__dict__.setdefault("prefilling", set()).add(owner)
    try:
        yield
    finally:
        _slot.prefilling.discard(owner)
        _announced().pop(owner, None)


def announced(owner: str) -> Announced | None:
    """What was announced for the first forward pass of a prompt that `generate` reads; None in any other pass."""
    return _announced().pop(owner, None) if owner in _slot.__dict__.get("prefilling", ()) else None


def _announced() -> dict[str, Announced]:
    return _slot.__dict__.setdefault("announced", {})
