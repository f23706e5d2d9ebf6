"""What an engine stores for each attention layer of a model: its method and how to run it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foveate.methods import Method
from foveate.methods._declared import check_hooks
from foveate.methods.base import NEVER_FASTER
from foveate.ops import Logits, Rotary
from foveate.ops.dispatch import runs_kernel
from foveate.state import Counters, Geometry

SHORT_SEQUENCE = 4096
"""Tokens below which a step reads all keys of a sequence by default, whatever the number of sequences
(docs/guide/speed.md)."""


@dataclass
class Policy:
    """The method of one attention layer, and its settings and counters, which outlive any one cache."""

    method: Method
    owner: str
    """Identifies the model that the method is attached to; a cache works with one owner only."""
    counters: Counters = field(default_factory=Counters)
    forward: dict[Hashable, Any] = field(default_factory=dict)
    """Shared by the layers of a forward pass without a cache, see :meth:`SlotCache.shared_key`."""
    dense_below: int | str = 0
    """Decode steps are dense while all sequences together hold fewer tokens than this; "auto": fewer than
    :attr:`Method.sparse_from_tokens`, or each fewer than `SHORT_SEQUENCE`, on a GPU with the kernels."""
    rotary: Callable[[], Rotary] | None = None
    """Returns the layer's rotary positions in the present pass; None unless the method needs them."""
    on_attention: Callable[[int, Tensor, Tensor, Logits], None] | None = None
    """A hook for analysis, called before attention with the layer's index, its rotated queries ``[B, Hq, n, D]`` and
    keys ``[B, Hkv, n, D]``, and how its logits are made."""

    def __post_init__(self):
        check_hooks(self.method, Method)
        self.counters.declare(self.method.counters)

    def __getstate__(self) -> dict[str, Any]:  # for copies and pickles, which count anew and are not watched
        return self.__dict__ | {"counters": Counters(), "forward": {}, "on_attention": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.counters.declare(self.method.counters)


def dense_until(
    method: Method, dense_below: int | str, geometry: Geometry, device: torch.device, sequences: int = 1
) -> int:
    """Tokens of a sequence below which decode steps of a layer are dense; 0: none is.

    Args:
        dense_below: see :class:`Policy`.
        sequences: the number of sequences in a step; each counts as long as the longest.
    """
    sparse_from = method.sparse_from_tokens
    if sparse_from is None:
        return 0
    if dense_below != "auto":
        return -(-int(dense_below) // max(sequences, 1))
    if not sparse_from or device.type != "cuda" or not runs_kernel("attend"):
        return 0
    return sparse_from_length([method], geometry, sequences)


def sparse_from_length(methods: Iterable[Method], geometry: Geometry, sequences: int = 1, ranks: int = 1) -> int:
    """The length of each of ``sequences`` sequences from which decode steps on a GPU are sparse under "auto", see
    :func:`pays_from`; at least ``NEVER_FASTER`` where none is."""
    tokens = pays_from(methods, geometry, ranks)
    return tokens if tokens >= NEVER_FASTER else max(SHORT_SEQUENCE, -(-tokens // max(sequences, 1)))


def pays_from(methods: Iterable[Method], geometry: Geometry, ranks: int = 1) -> int:
    """Tokens of all sequences from which sparse decode steps are faster than dense ones, on a GPU with the kernels.

    Args:
        methods: the layers' methods.
        geometry: a layer's heads on one GPU.
        ranks: GPUs over which the heads are spread. If the GPUs exchange scores in each layer that chooses, sparse
            steps pay from twice the number of tokens (measured with two GPUs, docs/guide/serve.md).
    """
    methods = list(methods)
    known = max(method.sparse_from_tokens or 0 for method in methods)
    exchanged = ranks > 1 and any(method.pools_layer for method in methods)
    return geometry.at_least(known) * (2 if exchanged else 1)


def check_dense_below(value: Any, prefix: str = "") -> None:
    """Raises ValueError, whose message begins with ``prefix``, for an invalid ``dense_below``."""
    if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise ValueError(f"{prefix}dense_below must be a number of tokens, at least 0, or 'auto', not {value!r}")
