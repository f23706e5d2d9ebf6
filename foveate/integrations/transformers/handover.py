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


def take(key: Tensor) -> Layer | None:
    """The layer posted with this key tensor, if any; the slot is empty afterwards."""
    layer, posted = getattr(_slot, "entry", None) or (None, None)
    if posted is not key:
        return None
    _slot.entry = None
    return layer


def clear() -> None:
    """Forget what an interrupted forward may have left."""
    _slot.entry = None
