"""How long work on a device takes, and how fast its memory is."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

_GRAPHS, _LAUNCHES = 8, 4  # how many CUDA graphs settle a process, and how many kernels each has


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


@functools.cache
def settle(device: str) -> None:
    """Bring a process into the state in which a server spends its life, before anything in it is timed.

    On an H100 with CUDA 13.0 kernels of all graphs take about 0.3 microseconds longer each, and for good, from the
    fourth CUDA graph on that a process captures. What is timed first would be favoured.
    """
    if device != "cuda":
        return
    work = torch.zeros(1024, device=device)
    torch.cuda.synchronize()
    for _ in range(_GRAPHS):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_LAUNCHES):
                work.add_(1)
        graph.replay()
    torch.cuda.synchronize()


def memory_rate(device: str) -> float:
    """GB/s that the device's memory moves at most: in a read, or in a copy, both ways counted.

    Moves 8 GiB, or half of the free memory if that is less: with 1 GiB, start and end would be a tenth of the time.
    """
    size = min(torch.cuda.mem_get_info()[0] // 4, 8 << 30) if device == "cuda" else 16 << 20
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    moved = {
        source.sum: source.nbytes,
        source.amax: source.nbytes,
        functools.partial(target.copy_, source): 2 * source.nbytes,
    }
    rates = []
    for work, size in moved.items():
        times = [milliseconds(work, device) for _ in range(12)]
        rates.append(size / statistics.median(times[2:]) / 1e6)
    return max(rates)
