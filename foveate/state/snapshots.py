"""Returning a cache to an earlier state, as assisted decoding does when draft tokens are rejected.

A mixin of :class:`~foveate.state.SlotCache`. A snapshot holds the row numbers and the method's state. It needs no keys
and values, since no slot in use is overwritten under ``record_past``, until the cache packs its tokens into new memory
(:meth:`~foveate.state.eviction.Eviction.retain`): then it holds the memory from before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foveate.state.channels import POSITIONS
from foveate.state.description import Channel
from foveate.state.device_rows import before


class _Snapshot(NamedTuple):
    rows: dict[str, list[int]]
    """Row numbers."""
    tensors: dict[str, Tensor]
    """Copies of the channels and positions that later tokens may change."""
    ordered: bool
    uneven: bool
    memory: dict[str, Any] | None = None
    """The cache's attributes :data:`_MEMORY` from before its tokens were packed; None: as they are."""


_MEMORY = ("tensors", "capacity", "store")


class Snapshots:
    """The operations of a :class:`~foveate.state.SlotCache` that save and restore its state."""

    snapshots: dict[int, _Snapshot]
    """By ``clock``: columns of the batch at the time, padding included."""

    def save(self, clock: int, prompt_ended: bool = False) -> None:
        """Save the present state for :meth:`restore`, if tokens may be undone; otherwise do nothing.

        Args:
            clock: columns of the batch so far, padding included.
            prompt_ended: whether a prompt has just ended. Snapshots from within it are dropped: what is done at its end
                is not done in them.
        """
        if prompt_ended:
            self.snapshots = {at: saved for at, saved in self.snapshots.items() if not any(saved.rows["observed"])}
        if self.record_past:
            used = self.used
            tensors = {
                name: (self.tensors[name][:, :, :used] if spec.per == 1 else self.tensors[name]).clone()
                for name, spec in self._snapshot_specs().items()
            }
            rows = {name: list(numbers) for name, numbers in self.rows.items()}
            self.snapshots[clock] = _Snapshot(rows, tensors, self.ordered, self.uneven)

    def _keep_memory(self) -> None:
        """Have the snapshots hold the present memory. Called before tokens are packed into new memory."""
        memory = {name: getattr(self, name) for name in _MEMORY} | {"tensors": dict(self.tensors)}
        self.snapshots = {
            clock: saved if saved.memory is not None else saved._replace(memory=memory)
            for clock, saved in self.snapshots.items()
        }

    def restore(self, clock: int) -> None:
        """Return to the state saved at this clock. Keys and values written since stay in unused slots.

        Raises:
            KeyError: when none was saved.
        """
        saved = self.snapshots[clock]
        if saved.memory is not None:
            self.__dict__.update(saved.memory | {"tensors": dict(saved.memory["tensors"])})
            self._count_bytes()
        self.ordered, self.uneven, self.freed = saved.ordered, saved.uneven, None
        self.rows = {name: list(numbers) for name, numbers in saved.rows.items()}
        self.store.tokens_removed(self.used)
        for name, tensor in saved.tensors.items():
            if self._snapshot_specs()[name].per:  # the cache may have more slots or pages now
                self.tensors[name][:, :, : tensor.shape[2]] = tensor
                if name == "positions":
                    self.tensors[name][:, :, tensor.shape[2] :] = -1
            else:
                self.tensors[name].copy_(tensor)
        self.snapshots = {at: kept for at, kept in self.snapshots.items() if at <= clock}

    def truncate(self, tokens: int | Sequence[int]) -> None:
        """Remove the last ``tokens`` tokens of every row, or ``tokens[b]`` tokens of row b; only for methods whose
        state does not depend on them."""
        removed = [tokens] * len(self.lengths) if isinstance(tokens, int) else tokens
        self.rows = before(self.rows, removed)
        self.store.tokens_removed(self.used)
        self.rows["prompt"] = list(map(min, self.rows["prompt"], self.lengths))
        self.rows["observed"] = [max(number - count, 0) for number, count in zip(self.rows["observed"], removed)]
        if self.evicts:  # at the end of prompts alone: a shorter row has slots in use behind its own
            beyond = torch.arange(self.capacity, device=self.device) >= self.plan["counts"][:, None]
            self.tensors["positions"].masked_fill_(beyond[:, None], -1)

    def _snapshot_specs(self) -> dict[str, Channel]:
        """The channels that a later token may change, and the positions of a method that evicts."""
        specs = {name: spec for name, spec in self.specs.items() if not spec.recomputed}
        return specs | ({"positions": POSITIONS} if self.evicts else {})
