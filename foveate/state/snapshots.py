"""Going back to an earlier state of a cache, as assisted decoding does with tokens that are not accepted."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from foveate.state.description import Channel


class _Snapshot(NamedTuple):
    rows: dict[str, list[int]]
    tensors: dict[str, Tensor]


class Snapshots:
    """What a :class:`~foveate.state.SlotCache` can undo."""

    snapshots: dict[int, _Snapshot]

    def save(self, clock: int) -> None:
        """Remember the present state under a number of tokens, for :meth:`restore`; only while staged."""
        if self.staged:
            used = self.used
            tensors = {
                name: (self.tensors[name][:, :, :used] if spec.per == 1 else self.tensors[name]).clone()
                for name, spec in self._snapshot_specs().items()
            }
            rows = {name: list(numbers) for name, numbers in self.rows.items()}
            self.snapshots[clock] = _Snapshot(rows, tensors)

    def restore(self, clock: int) -> None:
        """Go back to a saved state. Keys and values written since are ignored and written over."""
        saved = self.snapshots[clock]
        self.rows = {name: list(numbers) for name, numbers in saved.rows.items()}
        for name, tensor in saved.tensors.items():
            if self._snapshot_specs()[name].per:  # by slot or page: there may be more of them now
                self.tensors[name][:, :, : tensor.shape[2]] = tensor
                if name == "positions":
                    self.tensors[name][:, :, tensor.shape[2] :] = -1
            else:
                self.tensors[name].copy_(tensor)
        self.snapshots = {at: kept for at, kept in self.snapshots.items() if at <= clock}

    def truncate(self, tokens: int) -> None:
        """Drop the last tokens of every row; only where nothing but keys and values depends on them."""
        for name in ("lengths", "counts", "live"):
            self.rows[name] = [number - tokens for number in self.rows[name]]
        self.rows["observed"] = [max(number - tokens, 0) for number in self.rows["observed"]]

    def _snapshot_specs(self) -> dict[str, Channel]:
        """What a snapshot holds: all that a later token may change."""
        specs = {name: spec for name, spec in self.specs.items() if not spec.recomputed}
        return specs | ({"positions": Channel(dtype=torch.int32)} if self.evicts else {})
