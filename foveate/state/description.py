"""The shapes of one attention layer and the state that a method keeps for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Geometry:
    """Shapes of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def key_share(self) -> float:
        """A key's share of the key and its value: one half where both have as many dimensions."""
        return self.head_dim / (self.head_dim + self.value_dim)


@dataclass(frozen=True)
class Channel:
    """State of a method that lies beside the keys and travels with them.

    Args:
        shape: of one entry.
        per: 1 for an entry per slot, n for an entry per page of n slots, 0 for an entry per sequence. Slots and pages
            are per KV head: ``[B, Hkv, entries, *shape]``; sequences are ``[B, *shape]``.
        dtype: None for the dtype of the keys.
        recomputed: True when cropping tokens needs no undoing because the entries are written again before they are
            read (page summaries).
        fill: of an entry per sequence, what it holds before it is written.
    """

    shape: tuple[int, ...] = ()
    per: int = 1
    dtype: torch.dtype | None = torch.float32
    recomputed: bool = False
    fill: float = 0.0
