"""The numbers of a cache's rows on the device, for decode steps that advance them there and are replayed as a graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from foveate.state.counters import Tally

NAMES = ("lengths", "counts", "live", "prompt", "pages", "paged")
"""The numbers that a step may read; it advances the first three."""


class DeviceRows:
    """What a step knows of its rows: tensors at fixed addresses, the same for all layers whose rows are alike.

    A step reads them after :meth:`begin` has counted its token. The host knows how many steps there were, and asks the
    device for nothing before it wants the numbers back.

    Args:
        batch_size: number of rows.
        evicts: whether rows give up slots.
        device: where the numbers are.
    """

    def __init__(self, batch_size: int, evicts: bool, device: torch.device):
        self.evicts, self.device = evicts, device
        with torch.inference_mode(False):
            self.numbers = torch.zeros(len(NAMES), batch_size, dtype=torch.int64, device=device)
            self.slots = torch.zeros(batch_size, dtype=torch.int64, device=device)
            """Where a row's new token goes unless it has freed a slot."""
            self.freed = torch.zeros(batch_size, dtype=torch.int64, device=device)
            """How many slots a row has freed for the next token: 0 or 1."""
        self.bound = 0
        """No row is longer, as long as there is room; widths of selections follow from it."""
        self.steps = 0
        """Steps since the numbers were written."""
        self.capturing = False
        """A step is being run, which must not ask the host for numbers that change from step to step."""
        self.tally = Tally()
        """What the layers of a step count."""
        self._rows: dict[str, list[int]] = {}
        self._freed: list[bool] = [False] * batch_size
        self._read: tuple[int, dict[str, list[int]], list[bool]] | None = None
        self._memo: dict[Hashable, Any] = {}
        self._constants: dict[Hashable, Tensor] = {}
        self._after: dict[Hashable, Callable[[], Any]] = {}

    def write(self, rows: dict[str, list[int]], freed: list[bool] | None, bound: int) -> None:
        """Put the host's numbers on the device, without waiting for it.

        Args:
            rows: a number for each row, by name.
            freed: which rows have freed a slot; None: none has.
            bound: the longest that a row can get.
        """
        self._rows = {name: list(numbers) for name, numbers in rows.items()}
        self._freed = [False] * self.freed.numel() if freed is None else list(freed)
        self._read, self.steps, self.bound = None, 0, bound
        self.numbers.copy_(self._pinned([self._rows[name] for name in NAMES]), non_blocking=True)
        self.freed.copy_(self._pinned(self._freed), non_blocking=True)

    # Inside a step

    def begin(self) -> None:
        """A step starts: every row has one token more."""
        self._memo.clear()
        self.tally.forget()
        self.slots.copy_(self["counts"])
        self.numbers[:3].add_(1)
        if self.evicts:
            self["counts"].sub_(self.freed)
            self.freed.zero_()

    def __getitem__(self, name: str) -> Tensor:
        """A number of each row, int64 ``[B]``."""
        return self.numbers[NAMES.index(name)]

    def once(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """What ``compute`` gives, computed once in a step for all layers."""
        if key not in self._memo:
            self._memo[key] = compute()
        return self._memo[key]

    def constant(self, numbers: tuple[int, ...]) -> Tensor:
        """Numbers that no step changes, int64 ``[n]``; sent to the device once."""
        if numbers not in self._constants:
            with torch.inference_mode(False):
                self._constants[numbers] = self._pinned(numbers).to(self.device, non_blocking=True)
        return self._constants[numbers]

    def _pinned(self, numbers: Any) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, pin_memory=self.device.type == "cuda")

    def evict(self, rows: Tensor) -> None:
        """Some rows, bool ``[B]``, give up a slot: counted once for all layers."""

        def count() -> bool:
            self["live"].sub_(rows.to(torch.int64))
            self.freed.copy_(rows)
            return True

        self.once("evict", count)

    # Between steps

    def pause(self) -> None:
        """Maintenance begins, between two steps; it works by the numbers that the last step has left."""
        self._memo.clear()
        self._after.clear()

    def after(self, key: Hashable, change: Callable[[], Any]) -> None:
        """Have numbers changed at the end of the maintenance of all layers; of the same key once."""
        self._after.setdefault(key, change)

    def resume(self) -> None:
        """Maintenance ends: its changes of the numbers are made."""
        for change in self._after.values():
            change()
        self._after.clear()

    def apply_on_host(self, rule: Callable[[dict[str, list[int]]], dict[str, list[int]]]) -> None:
        """Change the host's numbers by a rule, as something between two steps has changed those of the device."""
        self._rows |= rule(self.read()[0])

    # After it

    def read(self) -> tuple[dict[str, list[int]], list[bool]]:
        """The host's numbers as the steps since have left them, and which rows have freed a slot.

        Waits for the device where slots were given up; otherwise every row has had a token more at each step.
        """
        if not self.steps or not self.evicts:
            moved = {name: [number + self.steps for number in self._rows[name]] for name in NAMES[:3]}
            return self._rows | moved, self._freed
        if self._read is None or self._read[0] != self.steps:
            moved = dict(zip(NAMES[:3], self.numbers[:3].tolist()))
            self._read = (self.steps, self._rows | moved, [bool(freed) for freed in self.freed.tolist()])
        return self._read[1:]

    def __deepcopy__(self, memo):
        raise TypeError("the rows of a cache are settled before it is copied")
