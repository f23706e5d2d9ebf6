"""Row numbers: the integers that a cache keeps for each row of its batch, such as its length.

They are Python lists on the host, except while decode steps are captured and replayed: then they are tensors on the
device (:class:`~foveate.state.device_rows.DeviceRows`). Methods ask for them through :class:`RowNumbers` in the same
way in both cases.

A *captured step* is a decode step inside ``foveate.runtime.capture.step``, whether it is being captured or runs eagerly
to warm up; its code must not depend on host values that change from step to step.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foveate.state.description import Evicts
from foveate.state.device_rows import DeviceRows


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
    - ``live``: tokens held, so at most ``counts``; where KV heads differ, those of the head that holds the most;
    - ``prompt``: the length when the last prompt ended;
    - ``observed``: tokens of the present prompt that the method's ``observe`` has seen; 0 after the prompt;
    - those that the method declares with :class:`~foveate.state.RowNumber`, such as LuKA's ``pages``.

    On the host a *rule* is applied to each row's int; in a captured step the same rule is applied to an int64 tensor
    ``[B]``, so it must be arithmetic that works on both.

    Args:
        numbers: a list ``[B]`` for each name.
        device: of the tensors that are returned.
    """

    evicts: Evicts = Evicts.NEVER
    """When the method evicts."""
    forward: dict[Hashable, Any]
    """What the layers of one forward pass share: results of rules, and what :meth:`SlotCache.hand_on` stores."""

    def __init__(self, numbers: dict[str, list[int]], device: torch.device):
        self.device = device
        self.rows = numbers

    @property
    def rows(self) -> dict[str, list[int]]:
        """The row numbers on the host, by name; synchronises with the device if they are there.

        Raises:
            RuntimeError: during capture, where a host value would be frozen into the graph.
        """
        if self.device_state is not None:
            if self.device_state.rows.capturing:
                raise RuntimeError(
                    "a decode step asked for row numbers on the host during CUDA graph capture; they change with each "
                    "step: use each_row, most, rows_where or row_tensor"
                )
            self.sync_to_host()
        return self._rows

    @rows.setter
    def rows(self, rows: dict[str, list[int]]) -> None:
        self._rows: dict[str, list[int]] = rows
        self.device_state: DeviceState | None = None

    @property
    def step(self) -> DeviceRows | None:
        """The row numbers on the device, during a step or maintenance that is captured; else None.

        Outside of these, numbers that are still on the device are first brought to the host.
        """
        if self.device_state is not None and not self.device_state.rows.capturing:
            self.sync_to_host()
        return None if self.device_state is None else self.device_state.rows

    def sync_to_host(self) -> None:
        """Bring the row numbers from the device to the host, if they are there."""
        if self.device_state is not None:
            moved = self.device_state.rows.read()[0]  # shared with other layers: copy the lists
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
        """Tokens decoded since the prompt, the same number in every row; never synchronises with the device."""
        steps = 0 if self.device_state is None else self.device_state.rows.steps
        return self._rows["lengths"][0] + steps - self._rows["prompt"][0]

    @property
    def _now(self) -> int | None:
        """Distinguishes single-token steps within one forward pass: a row's length; None in a captured step."""
        return self.rows["lengths"][0] if self.step is None else None

    def row_tensor(self, name: str) -> Tensor:
        """The row numbers of this name, int64 ``[B]`` on the device. Do not write to it."""
        step = self.device_state and self.step
        return on_device(tuple(self._rows[name]), self.device) if step is None else step[name]

    def on_device(self, numbers: list[int]) -> Tensor:
        """Host integers as int64 ``[n]`` on the device, without a host sync; in a captured step they are constants."""
        step = self.device_state and self.step
        return on_device(tuple(numbers), self.device) if step is None else step.constant(tuple(numbers))

    def each_row(self, rule: Callable[..., Any], *args: Hashable, of: str = "lengths") -> Tensor:
        """``rule(number, *args)`` of each row's number, ``[B]`` on the device: fp64 for a rule of floats, else int64.

        Args:
            rule: arithmetic on an int or an int64 tensor. A named function or method, not a lambda: the layers of a
                captured step share results by its identity.
            of: name of the row number.
        """
        step = self.device_state and self.step
        if step is None:
            key = (rule, args, *map(type, args), self.device, *self._rows[of])
            if key not in self.forward:
                found = tuple([rule(number, *args) for number in self._rows[of]])
                dtype = torch.float64 if isinstance(found[0], float) else torch.int64
                self.forward[key] = on_device(found, self.device, dtype)
            return self.forward[key]

        def numbers() -> Tensor:
            found = rule(step[of], *args)
            return found if isinstance(found, Tensor) else torch.full_like(step[of], found)

        return step.once((_rule_key(rule), args, tuple(map(type, args)), of), numbers)

    def most(self, rule: Callable[[int], int], of: str = "lengths") -> int:
        """A width that suffices for all rows: the largest ``rule(number)``; in a captured step ``rule(capacity)``.

        The rule must not decrease as the number grows.

        Raises:
            RuntimeError: for ``lengths`` in a captured step of a method that evicts: they can exceed the capacity, the
                bound of ``counts`` and ``live``.
        """
        step = self.device_state and self.step
        if step is None:
            key = ("most", rule, *self._rows[of])
            if key not in self.forward:
                self.forward[key] = max(map(rule, self._rows[of]))
            return self.forward[key]
        if self.evicts and of == "lengths":
            raise RuntimeError(
                "in a captured step of a method that evicts, row lengths have no bound from which a width could "
                "follow: ask for a rule of counts"
            )
        return rule(step.bound)

    def rows_where(self, rule: Callable[..., Any]) -> list[bool] | Tensor | None:
        """The rows for which ``rule(live, length)`` is true: a list of bools, or None when there are none.

        In a captured step always bool ``[B]`` on the device.
        """
        step = self.device_state and self.step
        if step is not None:
            return step.once((_rule_key(rule), "where"), lambda: rule(step["live"], step["lengths"]))
        chosen = [bool(rule(live, length)) for live, length in zip(self._rows["live"], self._rows["lengths"])]
        return chosen if any(chosen) else None

    def _advance(self, tokens: int, slots: int | list[bool]) -> None:
        """Count ``tokens`` more in every row, stored in ``slots`` new slots, or (bools ``[B]``) one in some rows."""
        slots = [slots] * self.batch_size if isinstance(slots, int) else slots
        rows = self.rows
        rows["lengths"] = [number + tokens for number in rows["lengths"]]
        rows["live"] = [number + tokens for number in rows["live"]]
        rows["counts"] = [number + added for number, added in zip(rows["counts"], slots)]


def _rule_key(rule: Callable[..., Any]) -> Hashable:
    """A key by which the layers of a step share a rule's result: equal for the same rule of methods with one spec.

    Comparing the methods themselves would be wrong: dataclasses with top_k=1 (one key) and top_k=1.0 (all keys) are
    equal in Python, but their specs differ.
    """
    if not inspect.ismethod(rule):
        return rule
    return rule.__func__, type(rule.__self__), getattr(rule.__self__, "spec", rule.__self__)


@functools.lru_cache(maxsize=256)
def on_device(numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers as a tensor ``[n]`` on the device, copied from pinned memory without a host sync.

    Cached: the same tensor serves every layer of a step, so it must not be written to.
    """
    with torch.inference_mode(False):
        if len(set(numbers)) == 1:
            return torch.full((len(numbers),), numbers[0], dtype=dtype, device=device)
        pinned = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
        return pinned.to(device, non_blocking=True)
