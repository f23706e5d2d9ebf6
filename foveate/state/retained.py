"""The memory of learnable token eviction: a circular window and a capped buffer of each KV head (laLTE, figure 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from foveate.state.memory import StagedMemory


class RetainedMemory(StagedMemory):
    """Keys and values of the last ``window + 1`` tokens and, of each KV head, of at most ``buffer`` earlier ones.

    One allocation holds both: the token at position p lies in slot ``p % (window + 1)`` while it is in the window, and
    retained tokens fill the slots after it. Nothing is retained before the window is full, so the slots in use are the
    first ``min(length, window + 1) + kept`` of each (row, KV head).

    Tensors: ``keys [B, Hkv, S, D]``, ``values [B, Hkv, S, Dv]``, ``margins`` fp32 ``[B, Hkv, S]`` (retention score less
    the threshold; of retained sinks inf), ``positions`` int64 ``[B, Hkv, buffer]`` (-1: empty), ``kept`` int64
    ``[B, Hkv]``.

    Args:
        window: tokens that a query sees before its own.
        buffer: retained tokens per KV head, sinks included.
    """

    def __init__(self, window: int, buffer: int):
        super().__init__()
        self.window, self.buffer = window, buffer
        self.unscored: list[int] = []
        """The first token of each row whose margin is not known."""

    @property
    def ring(self) -> int:
        """Slots of the window."""
        return self.window + 1

    def start(self, k: Tensor, v: Tensor) -> None:
        """Allocate for such keys and values ``[B, Hkv, n, D(v)]``, once."""
        if self.tensors:
            return
        batch, heads = k.shape[:2]
        slots = self.ring + self.buffer
        self.tensors = {
            "keys": k.new_zeros(batch, heads, slots, k.shape[3]),
            "values": v.new_zeros(batch, heads, slots, v.shape[3]),
            "margins": torch.zeros(batch, heads, slots, device=k.device),
            "positions": torch.full((batch, heads, self.buffer), -1, device=k.device),
            "kept": torch.zeros(batch, heads, dtype=torch.int64, device=k.device),
        }
        self.lengths, self.unscored = [0] * batch, [0] * batch

    def emptied(self) -> RetainedMemory:
        return RetainedMemory(self.window, self.buffer)

    def take_rows(self, index: Tensor) -> None:
        if self.batch_size:
            self.unscored = [self.unscored[b] for b in index.tolist()]
        super().take_rows(index)
