"""The numbers of the rows of a batch: on the host as a rule, on the device while a graph of steps is replayed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foveate.state.device_rows import DeviceRows


class DeviceState(NamedTuple):
    """What a cache goes by while steps advance the numbers of its rows on the device."""

    rows: DeviceRows
    places: Tensor | None
    """int64 ``[B, Hkv]``: the slots freed last, -1 for none; None where none is ever given up."""


class RowNumbers:
    """Numbers of each row of a batch, which a method asks for by a rule, wherever they are.

    Args:
        numbers: a number for each row, by name: ``lengths`` are tokens seen, without padding, evicted ones included;
            ``counts`` slots in use; ``live`` tokens held.
        device: where tensors of them go.
    """

    def __init__(self, numbers: dict[str, list[int]], device: torch.device):
        self.device = device
        self.rows = numbers

    @property
    def rows(self) -> dict[str, list[int]]:
        """Numbers of each row on the host, by name; those that are on the device are brought back first.

        Raises:
            RuntimeError: in a step that is replayed, which must go by what is on the device.
        """
        if self.device_state is not None:
            if self.device_state.rows.capturing:
                raise RuntimeError(
                    "a decode step for a graph asked for numbers of the host, which change with each step"
                )
            self.sync_to_host()
        return self._rows

    @rows.setter
    def rows(self, rows: dict[str, list[int]]) -> None:
        self._rows: dict[str, list[int]] = rows
        self.device_state: DeviceState | None = None

    @property
    def step(self) -> DeviceRows | None:
        """The numbers on the device, in a step that is replayed; None elsewhere, where they are on the host."""
        if self.device_state is not None and not self.device_state.rows.capturing:
            self.sync_to_host()
        return None if self.device_state is None else self.device_state.rows

    def sync_to_host(self) -> None:
        """Bring the numbers back that are on the device."""
        if self.device_state is not None:
            moved = self.device_state.rows.read()[0]  # of all layers that share them: each needs lists of its own
            self.rows = self._rows | {name: list(numbers) for name, numbers in moved.items()}

    @property
    def batch_size(self) -> int:
        return len(self._rows["lengths"])

    @property
    def lengths(self) -> list[int]:
        """Tokens seen by each row, without padding, evicted ones included."""
        return self.rows["lengths"]

    @property
    def uniform(self) -> bool:
        """Whether every row has the same length and uses the same number of slots."""
        return all(len(set(self.rows[name])) == 1 for name in ("lengths", "counts", "live"))

    @property
    def decoded(self) -> int:
        """Tokens of a row since its prompt, which are as many in every row; asks the device for nothing."""
        steps = 0 if self.device_state is None else self.device_state.rows.steps
        return self._rows["lengths"][0] + steps - self._rows["prompt"][0]

    @property
    def now(self) -> int | None:
        """What tells the steps of a forward pass apart: a replayed one has but one."""
        return self.rows["lengths"][0] if self.step is None else None

    def row_tensor(self, name: str) -> Tensor:
        """A per-row number as int64 ``[B]`` on the device."""
        step = self.step
        return self.on_device(self.rows[name]) if step is None else step[name]

    def on_device(self, numbers: list[int]) -> Tensor:
        """Numbers as int64 ``[n]`` on the device, without waiting for it; in a replayed step they are constants."""
        step = self.step
        return on_device(tuple(numbers), self.device) if step is None else step.constant(tuple(numbers))

    def each_row(self, rule: Callable[..., Any], *args: Hashable, of: str = "lengths") -> Tensor:
        """``rule(number, *args)`` for the number of each row, ``[B]`` on the device.

        Args:
            rule: arithmetic that takes an int or a tensor; a function with a name, so that layers can share its result.
            of: which number.
        """
        step = self.step
        if step is None:
            found = tuple(rule(number, *args) for number in self.rows[of])
            return on_device(found, self.device, torch.float64 if isinstance(found[0], float) else torch.int64)

        def numbers() -> Tensor:
            found = rule(step[of], *args)
            return found if isinstance(found, Tensor) else torch.full_like(step[of], found)

        return step.once((_known(rule), args, tuple(map(type, args)), of), numbers)

    def most(self, rule: Callable[[int], int], of: str = "lengths") -> int:
        """The largest ``rule`` of a row, or in a replayed step of the longest that a row can get: a width.

        The rule must not fall as the number grows.

        Raises:
            RuntimeError: in a replayed step of a method that evicts, whose rows get longer than their room.
        """
        step = self.step
        if step is not None and step.evicts:
            raise RuntimeError("rows that give up slots have no bound, from which a width could follow")
        return max(map(rule, self.rows[of])) if step is None else rule(step.bound)

    def rows_where(self, rule: Callable[..., Any]) -> list[bool] | Tensor | None:
        """The rows for which ``rule(live, length)`` is true; None when the host knows that there are none."""
        step = self.step
        if step is not None:
            return step.once((_known(rule), "where"), lambda: rule(step["live"], step["lengths"]))
        chosen = [bool(rule(live, length)) for live, length in zip(self.rows["live"], self.lengths)]
        return chosen if any(chosen) else None

    def _advance(self, tokens: int, slots: int | list[bool]) -> None:
        """Rows have so many more tokens, in so many more slots."""
        slots = [slots] * self.batch_size if isinstance(slots, int) else slots
        rows = self.rows
        rows["lengths"] = [number + tokens for number in rows["lengths"]]
        rows["live"] = [number + tokens for number in rows["live"]]
        rows["counts"] = [number + added for number, added in zip(rows["counts"], slots)]


def _known(rule: Callable[..., Any]) -> Hashable:
    """What tells rules apart: those of methods with the same spec are equal, though Python's own comparison says no.

    Not those of equal methods: 1 key is as equal to a share of 1.0 as Python's numbers are.
    """
    if not inspect.ismethod(rule):
        return rule
    return rule.__func__, type(rule.__self__), getattr(rule.__self__, "spec", rule.__self__)


@functools.lru_cache(maxsize=256)
def on_device(numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Per-row numbers ``[B]``, not to be written to: they serve every layer of a step, and often the next."""
    with torch.inference_mode(False):
        if len(set(numbers)) == 1:
            return torch.full((len(numbers),), numbers[0], dtype=dtype, device=device)
        pinned = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
        return pinned.to(device, non_blocking=True)
