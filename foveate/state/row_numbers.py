"""Row numbers: the integers that a cache keeps for each row of its batch, such as its length.

They are Python lists on the host, except while decode steps are captured and replayed: then they are tensors on the
device (:class:`~foveate.state.device_rows.DeviceRows`). Methods read them from the step's
:class:`~foveate.state.step_plan.StepPlan`, which is the same in both cases.

A *captured step* is a decode step inside ``foveate.runtime.capture.step``, whether it is being captured or runs eagerly
to warm up; its code must not depend on host values that change from step to step.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foveate.state.device_rows import DeviceRows, before
from foveate.state.step_plan import StepPlan


class DeviceState(NamedTuple):
    """Where a cache's row numbers are while decode steps advance them on the device."""

    rows: DeviceRows
    freed_slots: Tensor | None
    """int64 ``[B, Hkv]``: the slot that each KV head evicted last and the next token reuses, -1 for none. None: the
    method never evicts in decode."""


class RowNumbers:
    """The row numbers of a batch, on the host or on the device.

    - ``lengths``: tokens seen, evicted ones included, padding left out;
    - ``counts``: slots in use, from slot 0 on, slots emptied by eviction included;
    - ``live``: tokens held, so at most ``counts``; if KV heads hold different numbers, the largest of them;
    - ``prompt``: the length when the last prompt ended;
    - ``observed``: tokens of the present prompt that the method's ``observe`` has seen; 0 after the prompt;
    - the row numbers that the method declares with :class:`~foveate.state.RowNumber`, such as LuKA's ``pages``.

    Args:
        numbers: a list ``[B]`` for each name.
        device: the device of the tensors that are returned.
    """

    batch_size: int
    """Rows of the batch."""
    forward: dict[Hashable, Any]
    """What the layers of one forward pass share: the step's plan, and values under a :meth:`SlotCache.shared_key`."""
    _planned: tuple[list[list[int]], StepPlan] | None = None
    """The row numbers that :attr:`plan` was last asked for, and what it was."""

    def __init__(self, numbers: dict[str, list[int]], device: torch.device):
        self.device = device
        self.rows = numbers

    @property
    def rows(self) -> dict[str, list[int]]:
        """The row numbers on the host, by name; synchronises with the device if they are there.

        A list is replaced when its numbers change, and never written to.

        Raises:
            RuntimeError: during capture, where a host value would be frozen into the graph.
        """
        if self.device_state is not None:
            if self.device_state.rows.capturing:
                raise RuntimeError(
                    "a decode step asked for row numbers on the host during CUDA graph capture; they change with each "
                    "step: read the plan"
                )
            self._sync_to_host()
        return self._rows

    @rows.setter
    def rows(self, rows: dict[str, list[int]]) -> None:
        self._rows: dict[str, list[int]] = rows
        self.batch_size = len(rows["lengths"])
        self.device_state: DeviceState | None = None

    @property
    def _step(self) -> DeviceRows | None:
        """The row numbers on the device, during a step or maintenance that is captured; else None.

        Outside of these, numbers that are still on the device are first brought to the host.
        """
        if self.device_state is not None and not self.device_state.rows.capturing:
            self._sync_to_host()
        return None if self.device_state is None else self.device_state.rows

    def _sync_to_host(self) -> None:
        """Bring the row numbers from the device to the host, if they are there."""
        if self.device_state is not None:
            moved = self.device_state.rows.read()[0]  # shared with other layers: copy the lists
            self.rows = self._rows | {name: list(numbers) for name, numbers in moved.items()}

    @property
    def lengths(self) -> list[int]:
        """Tokens seen by each row, without padding, evicted ones included."""
        return self.rows["lengths"]

    @property
    def plan(self) -> StepPlan:
        """The present step, shared by the layers whose rows have the same numbers."""
        step = self.device_state and self._step
        if step is not None:
            return step.plan
        rows = list(self._rows.values())
        if self._planned is None or self._planned[0] != rows:  # the same lists are equal at once
            numbers = {name: tuple(numbers) for name, numbers in self._rows.items()}
            key = (StepPlan, self.device, *numbers.items())
            if key not in self.forward:
                self.forward[key] = StepPlan(numbers, self.device)
            self._planned = rows, self.forward[key]
        return self._planned[1]

    @contextmanager
    def as_of(self, tokens: int) -> Iterator[None]:
        """Within the block :attr:`plan` describes the step that came ``tokens`` tokens earlier in every row."""
        step = self.device_state and self._step
        if step is not None:
            with step.as_of(tokens):
                yield
            return
        rows = self._rows
        self._rows = before(rows, [tokens] * self.batch_size)
        try:
            yield
        finally:
            self._rows = rows

    def _advance(self, tokens: int, slots: int | list[bool]) -> None:
        """Count ``tokens`` more in every row, stored in ``slots`` new slots, or (bools ``[B]``) one in some rows."""
        rows = self.rows
        slots = [slots] * len(rows["counts"]) if isinstance(slots, int) else slots
        for name in ("lengths", "live"):
            rows[name] = list(map(tokens.__add__, rows[name]))
        rows["counts"] = list(map(operator.add, rows["counts"], slots))
