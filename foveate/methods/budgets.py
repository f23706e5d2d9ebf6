"""Budgets: the number of tokens that a setting stands for in a context of a given length, for ints and tensors
alike."""

from __future__ import annotations

import math
from typing import TypeVar

from torch import Tensor

Number = TypeVar("Number", int, Tensor)


def budget(value: int | float, length: Number, least: int = 0) -> int | Number:
    """The number of tokens that a budget allows in a context of ``length`` tokens.

    An int is the number itself. A float is a share of the length, rounded down, and never less than ``least``. For an
    int64 tensor of lengths the result is computed on its device and equals the results for its elements. It raises
    nothing: a method checks its settings when it is made.
    """
    if not isinstance(value, float):
        return value
    if isinstance(length, Tensor):
        return (value * length.double() + 1e-9).floor().long().clamp_min(least)
    return max(math.floor(value * length + 1e-9), least)


def clamp(number: int | Number, low: int | Number, high: Number) -> Number:
    """``number``, raised to at least ``low`` and then lowered to at most ``high``; elementwise for int64 tensors."""
    if isinstance(number, Tensor):
        number = number.clamp_min(low)
        return number.minimum(high) if isinstance(high, Tensor) else number.clamp_max(high)
    number = max(number, low)
    return high.clamp_max(number) if isinstance(high, Tensor) else min(number, high)
