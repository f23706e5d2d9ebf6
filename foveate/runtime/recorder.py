"""What records a decode step, and how often steps were recorded and replayed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class CaptureError(RuntimeError):
    """A step could not be captured; the cache is as it was before."""


class Recording(NamedTuple):
    """A recorded step."""

    out: Any
    """What the step returned; a replay overwrites its tensors."""
    replay: Callable[[], None]


Recorder = Callable[[Callable[[], Any]], Recording]
"""Records what it is given to call."""


@dataclass
class Use:
    """How decode steps ran since the counters were reset."""

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
    """Records steps as CUDA graphs. They share a memory pool for temporaries, since one runs at a time.

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
            if self._stream is None:  # PyTorch's own belongs to whichever GPU came first
                self._stream = torch.cuda.Stream(self.device)
            if not self._graphs:  # a pool without graphs gives its memory back and cannot be used again
                self._pool = torch.cuda.graph_pool_handle()
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                out = run()
        self._graphs.add(graph)
        return Recording(out, graph.replay)
