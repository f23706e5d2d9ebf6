"""What a step of a layer goes to on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foveate.lab.bench.breakdown import by_part, start

_REPEATS = 5


def parts(step: Callable[[], Any], device: str, repeats: int = _REPEATS) -> dict[str, float] | None:
    """Milliseconds of a step's kernels by what they are for, without the gaps between them; None on a CPU."""
    if device != "cuda":
        return None
    step()
    return by_part({kernel: ms / repeats for kernel, ms in _profiled(step, repeats).items()})


def total(step: Callable[[], Any]) -> float:
    """Milliseconds of the kernels of one step on a GPU."""
    return sum(_profiled(step, 1).values())


def _profiled(step: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Milliseconds by kernel."""
    stop = start()
    for _ in range(repeats):
        step()
    return stop()
