"""From the cache to the attention function, which Transformers hands no cache: the layer is posted for it here.

Also the proof that a forward pass is foveate's: which layers it reached, and on which cache. Each thread has its own.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from foveate.integrations.transformers.cache import Cache, Layer, Phase

_slot = threading.local()


def begin(owner: str, phase: Phase | None) -> None:
    """A forward pass of an attached model starts; forget what an interrupted one may have left.

    Args:
        owner: uid of the model's attachment.
        phase: that of the cache which the pass runs on; None without a foveate cache.
    """
    _slot.entry, _slot.owner, _slot.phase, _slot.reached = None, owner, phase, {}


def end() -> dict[int, Reached]:
    """The forward pass is over: what :func:`reached` returned."""
    found = reached()
    _slot.entry = _slot.owner = _slot.phase = None
    _slot.reached = {}
    return found


class Reached(NamedTuple):
    """A layer whose attention has been computed."""

    spec: str
    """Its method."""
    finite: Tensor | None
    """Whether the result is finite, a bool on the device; None where nobody looked."""


def reached() -> dict[int, Reached]:
    """The layers that the forward pass has reached so far."""
    return getattr(_slot, "reached", {})


def reach(layer: int, spec: str, finite: Tensor | None = None) -> None:
    """The attention of a layer has been computed, see :class:`Reached`."""
    if getattr(_slot, "owner", None) is not None:
        _slot.reached[layer] = Reached(spec, finite)


def post(layer: Layer, key: Tensor) -> None:
    """Leave the layer for the attention function that is called with this very key tensor.

    Raises:
        ValueError: outside of a forward pass on the layer's cache, as after `detach`.
    """
    if getattr(_slot, "phase", None) is not layer.phase:
        raise ValueError(
            "keys were handed to a foveate cache outside of a forward pass of the model that it was made for: the "
            "method may have been detached since, and its cache goes with it; start a new cache"
        )
    _slot.entry = (layer, key)


def take(key: Tensor, owner: str) -> Layer | None:
    """The layer posted with this key tensor; None in a forward without a foveate cache. The slot is empty afterwards.

    Args:
        key: the key tensor that the attention function was given.
        owner: uid of the attachment of the model that it works for.

    Raises:
        ValueError: when there is a cache but these are not the keys that were announced to it.
    """
    layer, posted = getattr(_slot, "entry", None) or (None, None)
    if posted is not key:
        if getattr(_slot, "owner", None) == owner and _slot.phase is not None:
            raise ValueError(
                "the model attends to other keys than it gave to its cache (it changes them in between, or attends "
                "twice): such a model is not supported"
            )
        return None
    _slot.entry = None
    return layer


class Announced(NamedTuple):
    """What `generate` has prepared for its first forward pass."""

    cache: weakref.ref[Cache]
    owes_steps: bool
    """It has yet to ask for the function that runs a decode step."""
    prompt_alone: bool
    """The pass feeds no more than the prompt."""


def announce(owner: str, cache: Cache, *, owes_steps: bool, prompt_alone: bool) -> None:
    """`generate` has prepared a cache for the model with this attachment uid; see :class:`Announced`."""
    _announced()[owner] = Announced(weakref.ref(cache), owes_steps, prompt_alone)


def asked_for_steps(owner: str) -> None:
    """`generate` has asked for the function that runs a decode step."""
    if owner in _announced():
        _announced()[owner] = _announced()[owner]._replace(owes_steps=False)


def announced(owner: str) -> Announced | None:
    """What was announced for the forward pass that begins; it is forgotten afterwards."""
    return _announced().pop(owner, None)


def _announced() -> dict[str, Announced]:
    return _slot.__dict__.setdefault("announced", {})
