"""How long work on a device takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def milliseconds(work: Callable[[], Any], device: str) -> float:
    """How long some work takes, on a GPU from event to event; waits for its end."""
    if not device.startswith("cuda"):
        begin = time.perf_counter()
        work()
        return 1000 * (time.perf_counter() - begin)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        start.record()
        work()
        end.record()
    end.synchronize()
    return start.elapsed_time(end)


def marks(device: str) -> tuple[Callable[[], Any], Callable[[Any, Any], float]]:
    """What marks a moment, on a GPU without waiting, and what gives the milliseconds between two, which waits."""
    if not device.startswith("cuda"):
        return time.perf_counter, lambda start, end: 1000 * (end - start)

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def between(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end)

    return mark, between
