"""Axes that are logarithmic where their values span much."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

_LOG_FROM = 3.0  # a logarithmic axis once the largest value is so many times the smallest


def log_if_wide(axis: Any, set_scale: Callable[[str], None], values: Sequence[float]) -> None:
    """Make one axis of a plot logarithmic where its values span much."""
    if not values or max(values) <= _LOG_FROM * min(values):
        return
    set_scale("log")
    for set_formatter in (axis.set_major_formatter, axis.set_minor_formatter):
        set_formatter(lambda value, _: f"{value:g}" if _leading(value) in (1, 2, 3, 5) else "")


def _leading(value: float) -> float:
    """The value between 1 and 10 that a power of ten makes of it."""
    return round(value / 10 ** math.floor(math.log10(value) + 1e-9), 6)
