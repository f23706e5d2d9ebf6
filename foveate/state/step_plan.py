"""What one decode step is: the numbers of its rows, which all layers read alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor


class StepPlan:
    """The numbers of a batch's rows in one step, made once by what drives the step and shared by its layers.

    ``plan["lengths"]`` is int64 ``[B]`` on the device; see :class:`~foveate.state.row_numbers.RowNumbers` for the
    names. Numbers include the step's token.

    Args:
        numbers: by name, a tuple ``[B]``; in a captured step int64 ``[B]`` on the device.
        device: of the numbers.
        constants: of a captured step: where what :meth:`constant` makes is kept from step to step. None: the step is
            not captured.
    """

    alike: bool = False
    """Whether all rows have the same length and use the same number of slots; False in a captured step."""
    whole: Tensor | None = None
    """int64 ``[B]``: lengths of rows that read all keys, whatever is chosen, and 0 of others; None: no row."""

    def __init__(self, numbers: Mapping[str, Any], device: torch.device, constants: dict | None = None):
        self.device, self.captured = device, constants is not None
        """Whether the step is captured, so that nothing may depend on numbers on the host."""
        self._constants = {} if constants is None else constants
        self.changes: dict[Hashable, Callable[[], Any]] = {}
        """Of maintenance: changes of numbers at its end, when all layers are done, by :meth:`after`."""
        self._numbers = numbers
        self._shared: dict[Hashable, Any] = {}
        if not self.captured:
            self.alike = all(len(set(numbers[name])) == 1 for name in ("lengths", "counts", "live"))

    @property
    def decoded(self) -> int:
        """Tokens decoded since the prompt in the first row; not of a captured step. Rows have the same number, except
        in lossless decoding, whose methods do not ask."""
        return self._numbers["lengths"][0] - self._numbers["prompt"][0]

    def __getitem__(self, name: str) -> Tensor:
        """The row numbers of this name. Do not write to them."""
        return self._numbers[name] if self.captured else on_device(self._numbers[name], self.device)

    def some(self, name: str, every: int = 1) -> bool:
        """Whether a row may have a number of this name that is above 0 and a multiple of ``every``; True in a captured
        step."""
        return self.captured or any(number > 0 and number % every == 0 for number in self._numbers[name])

    def may_hold(self, mask: Tensor) -> bool:
        """Whether an element of a bool mask may be true: it is read on a CPU alone, and not in a captured step."""
        return self.captured or mask.is_cuda or bool(mask.any())

    def cached(self, key: Hashable, compute: Callable[[], Any], if_captured: Callable[[], Any] | None = None) -> Any:
        """The result of ``compute()``, computed by the first layer of the step that asks for this key.

        Args:
            if_captured: what computes it in a captured step, where no row number is on the host; None: ``compute``.
        """
        if key not in self._shared:
            self._shared[key] = (if_captured if self.captured and if_captured else compute)()
        return self._shared[key]

    def after(self, key: Hashable, change: Callable[[], Any]) -> None:
        """Register a change of row numbers for the end of maintenance; once for a key."""
        self.changes.setdefault(key, change)

    def constant(self, numbers: Iterable[int]) -> Tensor:
        """Numbers that no step changes, int64 ``[n]`` on the device; copied there once, without a host sync."""
        numbers = tuple(numbers)
        if numbers not in self._constants:
            self._constants[numbers] = on_device(numbers, self.device)
        return self._constants[numbers]

    def per_row(self, rule: Callable[..., Tensor | int], *args: Hashable, of: str = "lengths") -> Tensor:
        """``rule(numbers, *args)`` of the row numbers of a name, computed once for all layers: by default ``[B]``.

        Args:
            rule: arithmetic on an int64 tensor. A named function or method, not a lambda: layers share a function's
                results by its identity, and a bound method's results by the spec of its object.
        """
        key = _key(rule), args, tuple(map(type, args)), of
        if key not in self._shared:
            with torch.inference_mode(False):
                made = rule(self[of], *args)
                self._shared[key] = made if isinstance(made, Tensor) else torch.full_like(self[of], made)
        return self._shared[key]

    def for_sparse_rows(self, rule: Callable[..., Tensor | int], of: str = "lengths") -> Tensor:
        """:meth:`per_row`, but 0 for a row that reads all keys, where nothing is scored."""
        numbers = self.per_row(rule, of=of)
        if self.whole is None:
            return numbers
        return self.cached(("sparse rows", _key(rule), of), lambda: numbers.where(self.whole == 0, 0))

    def count_dense_rows(self, read: Tensor) -> Tensor:
        """Keys that rows read of those chosen, ``[B, Hkv or 1]``; of a row read whole, all that are counted."""
        return read if self.whole is None else self["live"][:, None].where(self.whole[:, None] > 0, read)

    def where(self, rule: Callable[..., Any]) -> list[bool] | Tensor | None:
        """The rows for which ``rule(live, length)`` is true: bools, or None when there are none.

        The rule is of ints; in a captured step of int64 tensors, and the result always bool ``[B]`` on the device.
        """
        live, lengths = self._numbers["live"], self._numbers["lengths"]
        if self.captured:
            return self.cached((_key(rule), "where"), lambda: rule(live, lengths))
        chosen = [bool(rule(*row)) for row in zip(live, lengths)]
        return chosen if any(chosen) else None


def _key(rule: Callable[..., Any]) -> Hashable:
    """A key by which the layers of a step share a rule's result: equal for the same rule of methods with one spec.

    Comparing the methods themselves would be wrong: dataclasses with top_k=1 (one key) and top_k=1.0 (all keys) are
    equal in Python, but their specs differ.
    """
    if type(rule) is not MethodType:
        return rule
    return rule.__func__, type(rule.__self__), getattr(rule.__self__, "spec", rule.__self__)


@functools.lru_cache(maxsize=256)
def on_device(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Integers as a tensor int64 ``[n]`` on the device, copied from pinned memory without a host sync.

    Cached: the same tensor serves every layer of a step, so it must not be written to.
    """
    with torch.inference_mode(False):
        if len(set(numbers)) == 1:
            return torch.full((len(numbers),), numbers[0], dtype=torch.int64, device=device)
        pinned = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
        return pinned.to(device, non_blocking=True)
