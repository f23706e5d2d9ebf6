"""From the cache to the attention function: Transformers passes no cache to it, so the layer is posted for it here."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from foveate.integrations.transformers.cache import Layer

_slot = threading.local()


def post(layer: Layer, key: Tensor) -> None:
    """Leave the layer for the attention function that is called with this very key tensor."""
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
        if getattr(_slot, "owner", None) == owner:
            raise ValueError(
                "the model attends to other keys than it gave to its cache (it changes them in between, or attends "
                "twice): such a model is not supported"
            )
        return None
    _slot.entry = None
    return layer


def begin(owner: str | None) -> None:
    """A forward starts; forget what an interrupted one may have left.

    Args:
        owner: uid of the attachment whose cache is used; None for a forward without a foveate cache.
    """
    _slot.entry, _slot.owner = None, owner
