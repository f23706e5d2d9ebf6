"""The memory of learnable token eviction: a circular window and a capped buffer of each KV head (laLTE, figure 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from foveate.state.hybrid.memory import StagedMemory


class RetainedMemory(StagedMemory):
    """Keys and values of the last ``window + 1`` tokens and, of each KV head, of at most ``buffer`` earlier ones.

    One allocation holds both: the token at position p lies in slot ``p % (window + 1)`` while it is in the window, and
    retained tokens fill the slots after it. Nothing is retained before the window is full, so the slots in use are the
    first ``min(length, window + 1) + kept`` of each (row, KV head).

    Tensors: ``keys [B, Hkv, S, D]``, ``values [B, Hkv, S, Dv]``, ``margins`` fp32 ``[B, Hkv, S]`` (retention score less
    the threshold; of retained sinks inf), ``positions`` int64 ``[B, Hkv, buffer]`` (-1: empty), ``kept`` int64
    ``[B, Hkv]``, ``first`` int64 ``[B]`` (the position by which a row's first token was rotated); ``numbers`` int64
    ``[B, 2]`` and ``slots`` int64 ``[B]`` for :meth:`lengths_on` and :meth:`next_slots`. A decode step changes all of
    them in place, so that a CUDA graph can replay it.

    Args:
        window: tokens that a query sees before its own.
        buffer: retained tokens per KV head, sinks included.
    """

    def __init__(self, window: int, buffer: int):
        super().__init__()
        self.window, self.buffer = window, buffer
        self.unscored: list[int] = []
        """The first token of each row whose margin is not known."""
        self._on_device: list[int] = []
        """The lengths that the tensors hold."""

    @property
    def ring(self) -> int:
        """Slots of the window."""
        return self.window + 1

    def start(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Allocate for such keys and values ``[B, Hkv, n, D(v)]``, once.

        Args:
            positions: int64 ``[B or 1, n]``: that of the first token, from which a row counts on.
        """
        if self.tensors:
            return
        with torch.inference_mode(False):  # tensors made in inference mode could not be changed later
            self._allocate(k, v)
        self.tensors["first"].copy_(positions[:, 0])

    def _allocate(self, k: Tensor, v: Tensor) -> None:
        batch, heads = k.shape[:2]
        slots = self.ring + self.buffer
        self.tensors = {
            "first": torch.zeros(batch, dtype=torch.int64, device=k.device),
            "keys": k.new_zeros(batch, heads, slots, k.shape[3]),
            "values": v.new_zeros(batch, heads, slots, v.shape[3]),
            "margins": torch.zeros(batch, heads, slots, device=k.device),
            "positions": torch.full((batch, heads, self.buffer), -1, device=k.device),
            "kept": torch.zeros(batch, heads, dtype=torch.int64, device=k.device),
            "numbers": torch.zeros(batch, 2, dtype=torch.int64, device=k.device),
            "slots": torch.zeros(batch, dtype=torch.int64, device=k.device),
        }
        self.lengths, self.unscored, self._on_device = [0] * batch, [0] * batch, []

    def lengths_on(self, device: torch.device) -> Tensor:
        """Tokens of each row, int64 ``[B]``: always the same memory, which :meth:`advance_step` changes in place.

        Nothing is copied from the host after steps, nor where all rows have one length.
        """
        numbers = self.tensors["numbers"]
        if self._on_device != self.lengths:
            if len(set(self.lengths)) == 1:
                numbers[:, 0] = self.lengths[0]
            else:
                numbers[:, 0] = torch.tensor(self.lengths, device=device)
            torch.sub(numbers[:, 0], self.ring, out=numbers[:, 1])
            torch.remainder(numbers[:, 0], self.ring, out=self.tensors["slots"])
            self._on_device = list(self.lengths)
        return numbers[:, 0]

    def next_slots(self, device: torch.device) -> Tensor:
        """The slot of each row's next token, int64 ``[B]``, which holds the token that leaves the window for it."""
        self.lengths_on(device)
        return self.tensors["slots"]

    def leaving(self, device: torch.device) -> Tensor:
        """The positions of the tokens in :meth:`next_slots`, int64 ``[B]``; below 0 where there is none yet."""
        self.lengths_on(device)
        return self.tensors["numbers"][:, 1]

    def advance_step(self) -> None:
        """Count one new token of every row, on the device and on the host."""
        numbers = self.tensors["numbers"]
        numbers += 1
        torch.remainder(numbers[:, 0], self.ring, out=self.tensors["slots"])
        self.lengths, self._on_device = ([number + 1 for number in x] for x in (self.lengths, self._on_device))

    def emptied(self) -> RetainedMemory:
        return RetainedMemory(self.window, self.buffer)

    def take_rows(self, index: Tensor) -> None:
        if self.batch_size:
            self.unscored, self._on_device = [self.unscored[b] for b in index.tolist()], []
        super().take_rows(index)
