"""What a step's time on a GPU goes to: weighing keys, choosing some, attending, and everything else."""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from foveate import ops
from foveate.lab.results.measurements import PARTS

_SUMMARIES = {"score": "score", "select": "select"}
"""Parts of LuKA's fused operation, by the module in ``ops.summaries``; its other modules attend."""
_ATTENTION = ("flash", "fmha", "sdpa")
"""What the names of such kernels contain: FlashAttention's, cuDNN's and PyTorch's."""


def start() -> Callable[[], dict[str, float]]:
    """Begins to watch a GPU's kernels; what it returns waits for them, and gives milliseconds by kernel."""
    stop = watch(ProfilerActivity.CUDA)
    return lambda: {event.key: event.device_time_total / 1e3 for event in stop()}


def watch(activity: ProfilerActivity) -> Callable[[], Any]:
    """Begins a profile; what it returns ends it, after waiting for the GPU, and gives the averages by name.

    What watches a GPU is taken out of the process afterwards, unless ``TEARDOWN_CUPTI`` says otherwise: left in it, it
    would slow every launch that is timed later. Before CUDA 12.6 that does not go together with CUDA graphs.
    """
    cuda = activity == ProfilerActivity.CUDA
    if cuda and tuple(map(int, (torch.version.cuda or "0").split("."))) >= (12, 6):
        os.environ.setdefault("TEARDOWN_CUPTI", "1")
    profiled = profile(activities=[activity])
    profiled.__enter__()

    def stop() -> Any:
        if cuda:
            torch.cuda.synchronize()
        profiled.__exit__(None, None, None)
        return profiled.key_averages()

    return stop


def by_part(milliseconds: dict[str, float]) -> dict[str, float]:
    """The same by :data:`PARTS` instead of by kernel."""
    known, found = _kernels(), dict.fromkeys(PARTS, 0.0)
    for kernel, ms in milliseconds.items():
        attends = any(word in kernel.lower() for word in _ATTENTION)
        found[known.get(kernel, "attend" if attends else "other")] += ms
    return found


@functools.cache
def _kernels() -> dict[str, str]:
    """The part of every kernel, by its name."""
    known = {}
    for package in (*PARTS[:-1], "summaries"):
        found = importlib.import_module(f"{ops.__name__}.{package}")
        for module in pkgutil.iter_modules(found.__path__, f"{found.__name__}."):
            if module.name.endswith("kernel"):
                stem = module.name.rpartition(".")[2].removesuffix("_kernel")
                part = _SUMMARIES.get(stem, "attend") if package == "summaries" else package
                kernels = vars(importlib.import_module(module.name))
                known |= {name: part for name, one in kernels.items() if getattr(one, "__module__", "") == module.name}
    return known
