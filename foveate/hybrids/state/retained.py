"""The memory of a learnable-token-eviction layer: a circular window, and a buffer per KV head (laLTE, figure 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from foveate.hybrids.state.memory import StagedMemory


class RetainedMemory(StagedMemory):
    """Keys and values of the last ``window + 1`` tokens and, of each KV head, of at most ``buffer`` earlier ones.

    Both share slots: the token at position p is in slot ``p % (window + 1)`` while it is in the window, and retained
    tokens fill the slots from ``window + 1`` on. Nothing is retained before the window is full, so the slots in use are
    the first ``min(length, window + 1) + kept`` of each row and KV head.

    Tensors, with ``S = window + 1 + buffer``; a decode step changes them in place, so that a CUDA graph can replay it:

    - ``keys [B, Hkv, S, D]``, ``values [B, Hkv, S, Dv]``;
    - ``margins`` fp32 ``[B, Hkv, S]``: retention score minus threshold; inf for retained sinks;
    - ``positions`` int64 ``[B, Hkv, buffer]``: of retained tokens; -1: empty;
    - ``kept`` int64 ``[B, Hkv]``: retained tokens;
    - ``first`` int64 ``[B]``: rotary position of a row's first token;
    - ``numbers`` int64 ``[B, 2]`` and ``slots`` int64 ``[B]``: see :meth:`lengths_on`, :meth:`leaving` and
      :meth:`next_slots`.

    Args:
        window: tokens before its own that a query sees.
        buffer: retained tokens per KV head, sinks included.
    """

    def __init__(self, window: int, buffer: int):
        super().__init__()
        self.window, self.buffer = window, buffer
        self.unscored: list[int] = []
        """For each row the position of the first token without a margin."""
        self._on_device: list[int] = []
        """The lengths that ``numbers`` and ``slots`` were computed from."""

    @property
    def ring(self) -> int:
        """Slots of the window."""
        return self.window + 1

    def start(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Allocate the tensors, at the first call.

        Args:
            k, v: ``[B, Hkv, n, D(v)]``, for their shapes, dtypes and device.
            positions: int64 ``[B or 1, n]``: rotary positions of a row's first tokens; only the first is kept.
        """
        if self.tensors:
            return
        with torch.inference_mode(False):  # inference tensors could not be changed later
            self._allocate(k, v)
        self.tensors["first"].copy_(positions[:, 0])

    def _allocate(self, k: Tensor, v: Tensor) -> None:
        batch, heads = k.shape[:2]
        slots = self.ring + self.buffer
        self.tensors = {
            "first": torch.zeros(batch, dtype=torch.int64, device=k.device),
            "keys": k.new_zeros(batch, heads, slots, k.shape[3]),
            "values": v.new_zeros(batch, heads, slots, v.shape[3]),
            "margins": torch.zeros(batch, heads, slots, dtype=torch.float32, device=k.device),
            "positions": torch.full((batch, heads, self.buffer), -1, device=k.device),
            "kept": torch.zeros(batch, heads, dtype=torch.int64, device=k.device),
            "numbers": torch.zeros(batch, 2, dtype=torch.int64, device=k.device),
            "slots": torch.zeros(batch, dtype=torch.int64, device=k.device),
        }
        self.lengths, self.unscored, self._on_device = [0] * batch, [0] * batch, []

    def lengths_on(self, device: torch.device) -> Tensor:
        """Tokens of each row, int64 ``[B]``, always in the same memory, which :meth:`advance_step` changes in place.

        Copies from the host only when lengths have changed otherwise and differ between rows.
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
        """The slot of each row's next token, int64 ``[B]``. It still holds the token that leaves the window."""
        self.lengths_on(device)
        return self.tensors["slots"]

    def leaving(self, device: torch.device) -> Tensor:
        """Positions of the tokens that leave the window next, int64 ``[B]``; negative while the window is not full."""
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
