"""Budgets: what a setting comes to in a context of so many tokens, of ints and of tensors alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

Number = TypeVar("Number", int, Tensor)


def budget(value: int | float, length: Number, least: int = 0) -> int | Number:
    """What a budget comes to in a context of ``length``: an int is itself, a float is a share, never below ``least``.

    An int64 tensor of lengths gives, on its device, the same numbers as its elements one by one. Raises nothing: values
    are checked when a method is made.
    """
    if not isinstance(value, float):
        return value
    if isinstance(length, Tensor):
        return (value * length.double() + 1e-9).floor().long().clamp_min(least)
    return max(math.floor(value * length + 1e-9), least)


@dataclass(frozen=True)
class PageCounts:
    """Numbers of pages that a row of some length has, of ints and of tensors alike.

    Args:
        size: tokens of a page.
    """

    size: int

    def pages(self, length: Number) -> Number:
        """Pages, the one that is being filled included."""
        return -(-length // self.size)

    def newest(self, length: Number) -> Number:
        """The page that holds the last token."""
        return self.pages(length) - 1

    def full(self, length: Number) -> Number:
        """Full pages."""
        return length // self.size

    @property
    def spec(self) -> str:
        """What distinguishes these rules, see :meth:`~foveate.state.row_numbers.RowNumbers.each_row`."""
        return f"pages of {self.size}"


def clamp(number: int | Number, low: int | Number, high: Number) -> Number:
    """At least ``low`` and, above all, at most ``high``; of ints, or of each in an int64 tensor."""
    if isinstance(number, Tensor):
        number = number.clamp_min(low)
        return number.minimum(high) if isinstance(high, Tensor) else number.clamp_max(high)
    number = max(number, low)
    return high.clamp_max(number) if isinstance(high, Tensor) else min(number, high)
