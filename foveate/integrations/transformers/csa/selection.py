"""Counters of the keys that one layer has selected."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class SelectionCounts:
    """What one layer selected since the model was attached or the counters were reset.

    A forward over one token of a longer sequence counts as a decode step, every other one as prompt.
    """

    prompt_tokens: int = 0
    steps: int = 0
    read: int = 0
    """Keys read in all decode steps."""
    available: int = 0
    """Keys held in all decode steps."""
    lost: Tensor | None = None
    """int64 ``[1]``: selections that came out empty because a score was NaN."""

    def count(self, queries: int, read: int, available: int) -> None:
        """Count one forward pass over ``queries`` tokens. Each of them reads at most ``read`` of ``available`` keys."""
        if queries == 1 and available > 1:
            self.steps, self.read, self.available = self.steps + 1, self.read + read, self.available + available
        else:
            self.prompt_tokens += queries

    def counter(self, device: torch.device) -> Tensor:
        """The indexer's counter of lost selections on ``device``, made at the first call."""
        if self.lost is None or self.lost.device != device:
            with torch.inference_mode(False):  # later calls write to it outside of inference mode
                self.lost = torch.zeros(1, dtype=torch.int64, device=device)
        return self.lost

    def reset(self) -> None:
        """Set all counters to zero. ``lost`` stays the same tensor, because a CUDA graph may hold it."""
        self.prompt_tokens = self.steps = self.read = self.available = 0
        if self.lost is not None:
            self.lost.zero_()
