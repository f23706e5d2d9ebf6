"""What :class:`~foveate.state.SlotCache` allocates: the shapes of an attention layer, and a method's state."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


class Evicts(enum.Flag):
    """When a method removes tokens from the cache. Only :attr:`NEVER` is false."""

    NEVER = 0
    AT_PROMPT_END = 1
    """The tokens that are left are packed into the first slots in their order, and decoded tokens follow them."""
    IN_DECODE = 2
    """Later tokens reuse slots, so that slots have no order; likely at the end of a prompt, too."""
    UNEVENLY = 4
    """Beside one of the others: the KV heads of a layer may keep different numbers of tokens."""

    @property
    def in_decode(self) -> bool:
        """Whether decoded tokens may take the slots of evicted ones."""
        return Evicts.IN_DECODE in self

    @property
    def unevenly(self) -> bool:
        """Whether KV heads may keep different numbers of tokens."""
        return Evicts.UNEVENLY in self


@dataclass(frozen=True)
class Geometry:
    """Shapes of one attention layer."""

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    head_dim: int
    value_dim: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    def at_least(self, tokens: int) -> int:
        """The number of tokens whose bytes equal the bytes of ``tokens`` tokens with eight KV heads of 128; at least
        ``tokens``.

        Kernels are timed at that shape. With more bytes a token the number stays ``tokens``."""
        return max(tokens, tokens * 2048 // (self.num_kv_heads * (self.head_dim + self.value_dim)))

    @property
    def key_share(self) -> float:
        """Bytes of a key as a share of the bytes of key and value together: D / (D + Dv)."""
        return self.head_dim / (self.head_dim + self.value_dim)


@dataclass(frozen=True)
class RowNumber:
    """An integer that a method keeps for each row, 0 at first; see :class:`~foveate.state.row_numbers.RowNumbers`.

    Args:
        check: raises ValueError for row numbers, lists by name, that no cache of the method has; None: all are valid.
    """

    check: Callable[[Mapping[str, list[int]]], None] | None = None


@dataclass(frozen=True)
class Channel:
    """One state tensor of a method. The cache grows, crops, reorders and snapshots it together with the keys.

    Args:
        shape: shape of one entry; ``()`` for a number.
        per: 1: an entry for each slot; n > 1: an entry for each page of n slots; both are per KV head,
            ``[B, Hkv, entries, *shape]``. 0: an entry for each sequence, ``[B, *shape]``.
        dtype: None: the dtype of the keys.
        recomputed: whether the method rewrites entries before it reads them again, so that they need no snapshot when
            tokens are removed, and no clearing when a slot is reused (page summaries).
        fill: initial value of an entry per sequence. Other entries start at 0.
        least: smallest valid value of an entry; a saved cache with a smaller one is refused. None: no bound.
        written: where an entry is the summary of a full page and follows from its keys, the function that writes the
            summaries of the pages that new tokens fill in blocks of an engine; requests that share blocks then share
            the summaries. It is called with the cache and, int ``[T]``, where the tokens are: block times its size plus
            the place in it; negative for none.
    """

    shape: tuple[int, ...] = ()
    per: int = 1
    dtype: torch.dtype | None = torch.float32
    recomputed: bool = False
    fill: float = 0.0
    least: float | None = None
    written: Callable[[Any, Tensor], None] | None = field(default=None, compare=False)


def shareable(channels: Mapping[str, Channel | RowNumber]) -> bool:
    """Whether requests that share blocks of an engine can share this state: all of it follows from the keys."""
    return all(isinstance(one, Channel) and one.written is not None for one in channels.values())
