"""The model as it is, in the place of a method: for models whose layers choose and evict by themselves.

laLTE and its kin have no full-attention layer to attach a method to. Their rows have the method `own`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn

import foveate
from foveate.integrations.transformers.cache import held_bytes
from foveate.lab.evaluation.generation import Batch


@dataclass(frozen=True)
class NativeModel:
    """No method: nothing is attached, and the model decodes on a cache of its own."""

    name = "own"
    spec = "own"

    def _settings(self) -> dict[str, Any]:  # for foveate.methods.settings_of
        return {}


def applied(model: nn.Module, method: Any, dense_below: int | str = 0) -> AbstractContextManager[Any]:
    """The model under a method for the length of a ``with`` block; unchanged under :class:`NativeModel`.

    `dense_below`: see :func:`foveate.attach`. Methods that evict have no such bound, except some compositions.
    """
    if isinstance(method, NativeModel):
        return nullcontext()
    return foveate.attached(model, method, dense_below=dense_below)


def summary(model: nn.Module, method: Any, batch: Batch) -> dict[str, Any]:
    """What a batch cost, with the field names of result rows. Under :class:`NativeModel` keys read are not counted."""
    if not isinstance(method, NativeModel):
        return foveate.stats(model).summary()
    return {
        "decode_steps": batch.decode_steps,
        "dense_steps": 0,
        "keys_read_share": None,
        "keys_read_per_step": None,
        "kv_bytes_per_step": None,
        "resident_bytes": held_bytes(batch.cache.layers),
        "notes": [],
    }
