"""How long a step takes that finds nothing of what it reads in a GPU's cache.

In a model the weights and the other layers' keys are read between two reads of the same key. Here a buffer larger than
any cache is read before each step, and its time is not counted. On a CPU nothing is: steps there are references.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foveate.lab.results import timing
from foveate.lab.results.timing import memory_rate, settle  # noqa: F401 for who times cold steps

_BEYOND_CACHES = 512 << 20
"""Bytes that no cache of a device holds."""
_SECONDS, _MOST = 0.5, 200
"""How long one step is timed, and how often at most."""
_IN_A_GRAPH, _SHORT = 8, 0.25
"""How many steps a graph takes that need, each with reading the buffer, so many milliseconds or fewer; of longer ones
fewer."""


class Turn(NamedTuple):
    """A step, and what is done before it and not counted."""

    step: Callable[[], Any]
    before: Callable[[], Any] | None = None


class Timed(NamedTuple):
    ms: float
    graph: bool
    """Whether a CUDA graph was replayed."""


def flush(device: str) -> None:
    """Push everything else out of a GPU's cache: by reading, which leaves nothing to be written back later."""
    if device == "cuda":
        _filler().sum()


@functools.cache
def _filler() -> Tensor:
    return torch.zeros(_BEYOND_CACHES // 4, device="cuda")


def repeated(step: Callable[[], Any], device: str) -> Timed:
    """Median of a step that is the same each time, recorded as a CUDA graph where that is possible."""
    for _ in range(3):
        step()
    ms = added([Turn(step)]) if device == "cuda" else None
    if ms is None:
        return Timed(_median(functools.partial(_measured, step, device)), False)
    return Timed(ms, True)


def added(turns: Sequence[Turn], start: Callable[[], Any] | None = None) -> float | None:
    """Milliseconds that the steps of some turns add to a CUDA graph; None where one waits for the device.

    As in a model, whose layers follow each other in one: a graph takes the turns, some times over, the buffer read
    before each step, and before what comes before it; and what the same graph takes without the steps is not counted.
    So neither the host's time counts nor that of an event.

    Args:
        start: done at the beginning of a graph, such as to put things back, and not counted.
    """
    start = start or _nothing
    alone = _recorded(turns, start, 1)
    if alone is None:
        return None
    alone()
    number = max(1, min(_IN_A_GRAPH // len(turns), round(_IN_A_GRAPH * _SHORT / max(alone(), _SHORT))))
    steps = _recorded(turns, start, number)
    nothing = _recorded([Turn(_nothing, turn.before) for turn in turns], start, number)
    return _median(lambda: (steps() - nothing()) / number)


def _nothing() -> None:
    """What takes no time."""


def _median(measure: Callable[[], float]) -> float:
    measure()
    begin = time.perf_counter()
    measure()
    repeats = max(5, min(_MOST, math.ceil(_SECONDS / max(time.perf_counter() - begin, 1e-6))))
    return statistics.median(measure() for _ in range(repeats))


def _measured(step: Callable[[], Any], device: str) -> float:
    """Milliseconds of a step that a busy device is handed."""
    flush(device)
    return timing.milliseconds(step, device)


def once(step: Callable[[], Any], device: str) -> float:
    """Milliseconds of a step that changes what it works on: of an idle device, so that the host's time counts."""
    flush(device)
    if device == "cuda":
        torch.cuda.synchronize()
    return timing.milliseconds(step, device)


def _recorded(turns: Sequence[Turn], start: Callable[[], Any], number: int) -> Callable[[], float] | None:
    """What replays a graph of some turns, so many times, and returns its milliseconds; None where a step waits for the
    device."""
    flush("cuda")  # whose buffer belongs to no graph
    graph = torch.cuda.CUDAGraph()
    begin, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
    try:
        with torch.cuda.graph(graph):
            start()
            begin.record()
            for turn in [*turns] * number:
                if turn.before is not None:
                    flush("cuda")
                    turn.before()
                flush("cuda")
                turn.step()
            end.record()
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError:
        torch.cuda.synchronize()
        return None

    def replay() -> float:
        graph.replay()
        end.synchronize()
        return begin.elapsed_time(end)

    return replay


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
