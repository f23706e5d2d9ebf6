"""The hand-over from an engine's cache to its attention function, within one forward pass and thread.

Transformers calls ``cache.update`` and then the attention function, which does not get the cache. So the cache posts
its :class:`~foveate.runtime.layer.Layer` with the new keys here, and the attention function takes it. The pass also
records which layers' attention it has computed, so that the engine can check that no layer bypassed its method.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from foveate.runtime.layer import Layer
from foveate.runtime.phase import Phase


class _OfThread(threading.local):
    def __init__(self):
        self.passes: list[Pass] = []
        """In progress on this thread, the outermost first."""


_of_thread = _OfThread()


class Reached(NamedTuple):
    """Record of a layer whose attention has been computed."""

    spec: str
    """Of its method."""
    finite: Tensor | None
    """Whether the output at a prompt's last token is finite, bool ``[]`` on the device; None where not checked."""


@dataclass
class Pass:
    """A forward pass in progress on a model with a method.

    References to the cache are weak: the record of an interrupted pass stays until the owner's next pass.
    """

    owner: str
    """Identifies the model, see :class:`~foveate.runtime.policy.Policy`."""
    phase: Callable[[], Phase | None] | None
    """Returns the phase of the pass's cache; None without a cache."""
    cache: Callable[[], Any]
    """Returns the engine's cache of the pass; returns None without one."""
    entry: tuple[Callable[[], Layer | None], Callable[[], Tensor | None]] | None = None
    """Return the layer posted last and not yet taken, and its keys."""
    reached: dict[int, Reached] = field(default_factory=dict)
    """By layer index."""
    forward: dict[Hashable, Any] = field(default_factory=dict)
    """Shared by the layers of a pass without a cache, see :meth:`SlotCache.shared_key`."""


def begin(owner: str, phase: Phase | None, cache: Any = None) -> None:
    """Start a forward pass, which may be nested in one of another model.

    A pass of the same owner that was interrupted by an exception is dropped, with those nested in it.
    """
    end(owner)
    weak = None if phase is None else weakref.ref(phase)
    _of_thread.passes.append(Pass(owner, weak, (lambda: None) if cache is None else weakref.ref(cache)))


def end(owner: str) -> Pass | None:
    """End the forward pass of an owner and return it; None when there is none."""
    passes = _of_thread.passes
    for index, one in enumerate(passes):
        if one.owner == owner:
            del passes[index:]
            return one
    return None


def current(owner: str | None = None) -> Pass | None:
    """The innermost forward pass in progress; None without one, or when it belongs to another owner."""
    passes = _of_thread.passes
    return passes[-1] if passes and owner in (None, passes[-1].owner) else None


def mark_attended(layer: int, owner: str, spec: str, finite: Tensor | None = None) -> None:
    """Record that the attention of a layer has been computed; no-op outside of the owner's pass."""
    one = current(owner)
    if one is not None:
        one.reached[layer] = Reached(spec, finite)


def post(layer: Layer, key: Tensor) -> None:
    """Post a layer for the attention function, which is called with the same key tensor ``[B, Hkv, n, D]``.

    Raises:
        RuntimeError: when the layer's previous keys were not taken.
        ValueError: outside of a forward pass on the layer's cache, for example after `detach`.
    """
    if layer.pending:
        raise RuntimeError(
            "keys were handed to the cache but attention never took them: is the model's attention implementation "
            "still 'foveate'?"
        )
    one = current()
    if one is None or one.phase is None or one.phase() is not layer.phase:
        raise ValueError(
            "keys were handed to a foveate cache outside of a forward pass of the model that it was made for: the "
            "method may have been detached since, and its cache goes with it; start a new cache"
        )
    one.entry = (weakref.ref(layer), weakref.ref(key))
    layer.announce(key.shape[2])


def take(key: Tensor, owner: str) -> Layer | None:
    """Take the layer that was posted with this key tensor; None in a pass without a cache.

    Args:
        key: the key tensor that the attention function was called with, compared by identity.
        owner: identifies the model that the attention function works for.

    Raises:
        ValueError: when the pass has a cache but this is not the key tensor that was posted.
    """
    one = current(owner)
    if one is None:
        return None
    posted = None if one.entry is None else one.entry[1]()
    if posted is not key:
        if one.phase is not None:
            raise ValueError(
                "the model attends to other keys than it gave to its cache (it changes them in between, or attends "
                "twice): such a model is not supported"
            )
        return None
    layer, one.entry = one.entry[0](), None
    return layer
