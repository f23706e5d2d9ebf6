"""Budgets: what a setting comes to in a context of so many tokens, of ints and of tensors alike."""

from __future__ import annotations

import math
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


def clamp(number: int | Number, low: int | Number, high: Number) -> Number:
    """At least ``low`` and, above all, at most ``high``; of ints, or of each in an int64 tensor."""
    if isinstance(number, Tensor):
        number = number.clamp_min(low)
        return number.minimum(high) if isinstance(high, Tensor) else number.clamp_max(high)
    number = max(number, low)
    return high.clamp_max(number) if isinstance(high, Tensor) else min(number, high)
