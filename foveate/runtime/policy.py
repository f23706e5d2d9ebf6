"""The method of one attention layer, as an engine puts it on a model."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from foveate.methods import Method
from foveate.state import Counters


@dataclass
class Policy:
    """What one attention layer does, with or without a cache."""

    method: Method
    owner: str
    """Identifies the model that the method was put on; caches belong to one owner."""
    counters: Counters = field(default_factory=Counters)
    forward: dict[Hashable, Any] = field(default_factory=dict)
    """What the layers of a forward pass without a cache share."""
    dense_below: int | str = 0
    """Decode steps are dense below this many tokens of all sequences together; "auto": where sparse steps are slower
    on a GPU (:attr:`Method.sparse_from_tokens`)."""
    block_size: int = 0
    """Slots of a block in which a cache keeps keys and values; 0: in one piece."""
    look: Callable[[int, Tensor, Tensor, float, float | None], None] | None = None
    """Called with the layer's index, its rotated queries and keys ``[B, H, n, D]``, the scaling and the logits' cap."""
