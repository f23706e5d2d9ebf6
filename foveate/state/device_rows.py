"""Row numbers on the device, for decode steps that are captured in a CUDA graph and advance them there.

See :class:`~foveate.state.row_numbers.RowNumbers` for what each number means.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from foveate.state.counters import Tally
from foveate.state.step_plan import StepPlan

NAMES = ("lengths", "counts", "live", "prompt")
"""Row numbers that a step of any method may read. Each step advances the first three."""


def before(rows: dict[str, list[int]], tokens: Sequence[int]) -> dict[str, list[int]]:
    """Row numbers without the last ``tokens[b]`` tokens of row b."""
    return rows | {name: list(map(operator.sub, rows[name], tokens)) for name in NAMES[:3]}


class DeviceRows:
    """Row numbers as tensors at fixed addresses, shared by all layers whose rows have the same numbers.

    Between two steps the host does not read the device: it counts :attr:`steps`. :meth:`read` brings the numbers back.
    Within a step, :meth:`begin` runs first, so that layers see numbers that include the new token.

    Args:
        batch_size: number of rows.
        evicts: whether the method evicts in decode.
        device: of the tensors.
        own: names of the method's own row numbers.
    """

    def __init__(self, batch_size: int, evicts: bool, device: torch.device, own: Iterable[str] = ()):
        self.evicts, self.device, self.names = evicts, device, (*NAMES, *own)
        with torch.inference_mode(False):
            self.numbers = torch.zeros(len(self.names), batch_size, dtype=torch.int64, device=device)
            self.slots = torch.zeros(batch_size, dtype=torch.int64, device=device)
            """Where a row's new token goes unless it reuses an evicted token's slot: the first slot never used."""
            self.freed = torch.zeros(batch_size, dtype=torch.int64, device=device)
            """Slots that a row has evicted and the next token reuses: 0 or 1."""
        self.steps = 0
        """Steps since :meth:`write`."""
        self.capturing = False
        """Whether a step or maintenance is being run or captured: row numbers must not be read on the host."""
        self.tally = Tally()
        """Counts of the layers in the present step."""
        self._rows: dict[str, list[int]] = {}
        """Row numbers as written, before the steps since."""
        self._freed: list[bool] = [False] * batch_size
        self._read: tuple[int, dict[str, list[int]], list[bool]] | None = None
        """Result of the last :meth:`read` that waited for the device, after the number of steps at that time; None
        before a :meth:`read` has waited."""
        self._constants: dict[Hashable, Tensor] = {}
        self.plan = self._new_plan()
        """The present step, or maintenance, as layers read it."""

    def write(self, rows: dict[str, list[int]], freed: list[bool] | None) -> None:
        """Copy row numbers from the host to the device, without a host sync.

        Args:
            rows: a list ``[B]`` for each name.
            freed: rows that have evicted a slot for the next token to reuse; None: none has.
        """
        self._rows = {name: list(numbers) for name, numbers in rows.items()}
        self._freed = [False] * self.freed.numel() if freed is None else list(freed)
        self._read, self.steps = None, 0
        self.numbers.copy_(self._pinned([self._rows[name] for name in self.names]), non_blocking=True)
        self.freed.copy_(self._pinned(self._freed), non_blocking=True)

    # Inside a step

    def begin(self) -> None:
        """Start a step: count one token more in every row."""
        self.run()
        self.slots.copy_(self["counts"])
        self.numbers[:3].add_(1)
        if self.evicts:
            self["counts"].sub_(self.freed)
            self.freed.zero_()

    def begin_of(self, lengths: Tensor, **zeroed: Sequence[bool] | None) -> None:
        """Start a step of rows that an engine keeps, without a host sync. All numbers of a row are its length.

        Args:
            lengths: int ``[B]`` on the device: tokens of each row, the new one included; 0 for a row of padding.
            zeroed: by the name of a number, rows where it is 0 instead; None: no row.
        """
        self.run()
        self.numbers.copy_(lengths)
        for name, rows in zeroed.items():
            if rows is not None:
                self[name].mul_(self._pinned([not one for one in rows]).to(self.device, non_blocking=True))

    @contextmanager
    def as_of(self, tokens: int) -> Iterator[None]:
        """Within the block :attr:`plan` describes the step that came ``tokens`` tokens earlier in every row."""
        now = self.plan

        def earlier() -> StepPlan:
            numbers = {name: now[name] - tokens if name in NAMES[:3] else now[name] for name in self.names}
            return StepPlan(numbers, self.device, self._constants)

        self.plan = now.cached(("before", tokens), earlier) if tokens else now
        try:
            yield
        finally:
            self.plan = now

    def run(self) -> None:
        """Forget what the present step has computed and counted: its first layer runs, perhaps once more."""
        self.plan = self._new_plan()
        self.tally.forget()

    def _new_plan(self) -> StepPlan:
        return StepPlan(dict(zip(self.names, self.numbers)), self.device, self._constants)

    def __getitem__(self, name: str) -> Tensor:
        """The row numbers of this name, int64 ``[B]``."""
        return self.numbers[self.names.index(name)]

    @property
    def decoded(self) -> int:
        """Tokens decoded since the prompt in the first row, known on the host. Rows have the same number, except in
        lossless decoding, whose methods do not ask."""
        return self._rows["lengths"][0] + self.steps - self._rows["prompt"][0]

    def held(self) -> Tensor:
        """Tokens that all rows hold, fp64 ``[]``."""
        return self.plan.cached("held", functools.partial(self["live"].sum, dtype=torch.float64))

    def _pinned(self, numbers: Any) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, pin_memory=self.device.type == "cuda")

    def evict(self, rows: Tensor) -> None:
        """Note that rows, bool ``[B]``, evict one slot each; every layer calls it, and it counts once in a step."""

        def count_once() -> bool:
            self["live"].sub_(rows.to(torch.int64))
            self.freed.copy_(rows)
            return True

        self.plan.cached("evict", count_once)

    # Between steps

    def pause(self) -> None:
        """Start maintenance between two steps; it sees the row numbers that the last step has left."""
        self.plan = self._new_plan()

    def resume(self) -> None:
        """End maintenance: make the registered changes."""
        for change in self.plan.changes.values():
            change()
        self.plan.changes.clear()

    def apply_on_host(self, rule: Callable[[dict[str, list[int]]], dict[str, list[int]]]) -> None:
        """Make a change on the host that maintenance has made on the device: ``rule`` gives the changed numbers."""
        self._rows |= rule(self.read()[0])

    # After a step

    def take_back(self, tokens: Sequence[int]) -> None:
        """Remove the last ``tokens[b]`` tokens of row b, without a host sync; only for methods that never evict."""
        self._rows = before(self._rows, tokens)
        self.numbers[:3].sub_(self._pinned(tokens).to(self.device, non_blocking=True))

    def read(self) -> tuple[dict[str, list[int]], list[bool]]:
        """The row numbers now, on the host, and the rows that have evicted a slot for the next token to reuse.

        Waits for the device only if the method evicts in decode; otherwise the numbers follow from the count of steps.
        """
        if not self.steps or not self.evicts:
            moved = {name: [number + self.steps for number in self._rows[name]] for name in NAMES[:3]}
            return self._rows | moved, self._freed
        if self._read is None or self._read[0] != self.steps:
            moved = dict(zip(NAMES[:3], self.numbers[:3].tolist()))
            self._read = (self.steps, self._rows | moved, [bool(freed) for freed in self.freed.tolist()])
        return self._read[1:]

    def __deepcopy__(self, memo):
        raise TypeError("row numbers on the device cannot be copied: read them before copying the cache")
