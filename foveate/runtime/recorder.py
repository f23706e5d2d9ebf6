"""Recorders capture a function for replay: :class:`CudaRecorder` as a CUDA graph. Tests use others, without a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class CaptureError(RuntimeError):
    """A decode step could not be captured. Nothing was executed, so the cache is unchanged."""


class Recording(NamedTuple):
    """A captured function."""

    out: Any
    """Its return value; each replay overwrites the tensors in it."""
    replay: Callable[[], None]
    """Runs the captured launches again."""


Recorder = Callable[[Callable[[], Any]], Recording]
"""Captures a function without executing it."""


@dataclass
class Use:
    """How many decode steps were replayed since the last reset, and why others were not."""

    replayed: int = 0
    """Steps replayed from a CUDA graph."""
    captured: int = 0
    """CUDA graphs captured."""
    reason: str = ""
    """Why the last step that was not replayed could not be."""

    def reset(self) -> None:
        """Set the counts to zero."""
        self.replayed = self.captured = 0


class CudaRecorder:
    """Captures functions as CUDA graphs, which share one memory pool for temporaries: only one may run at a time.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._pool: Any = None
        self._stream: Any = None
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()

    def __call__(self, run: Callable[[], Any]) -> Recording:
        with torch.cuda.device(self.device):
            graph = torch.cuda.CUDAGraph()
            if self._stream is None:  # PyTorch's default capture stream is on the GPU used first
                self._stream = torch.cuda.Stream(self.device)
            if not self._graphs:  # once all its graphs are gone a pool cannot be used again
                self._pool = torch.cuda.graph_pool_handle()
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                out = run()
        self._graphs.add(graph)
        return Recording(out, graph.replay)
