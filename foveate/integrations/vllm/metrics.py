"""Counts of what was read, as Prometheus metrics beside vLLM's own.

Steps are counted in vLLM's workers, and another process serves ``/metrics``. A worker writes its totals to a file of
its own; the process that serves them adds up the files when it is asked. Where vLLM has several such processes, it uses
the files of ``prometheus_client`` itself (PROMETHEUS_MULTIPROC_DIR), and so do the workers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from foveate.runtime import EngineSteps

_FOLDER = "FOVEATE_METRICS_DIR"
_EVERY = 0.5
"""Seconds between two publications of a worker; the last of a busy time follow with the next step."""

METRICS = {
    "steps": ("decode_steps", "Decode steps."),
    "rows": ("decode_tokens", "Decoded tokens."),
    "dense_rows": (
        "dense_tokens",
        "Decoded tokens that read all keys: contexts were short, or launches would have cost more than they save.",
    ),
    "keys_read": ("keys_read", "Keys read in decode steps, scored ones by their bytes, over all layers."),
    "keys_available": ("keys_available", "Keys that dense attention would have read."),
    "selections": ("selections", "Choices of keys: decoded tokens times layers that choose."),
}
"""By counter of a worker: name and description. The names begin with ``foveate:`` and end with ``_total``."""


class Meter:
    """Publishes the counts of a group of layers. It never waits for the device.

    Args:
        steps: what counts.
        vllm_config: of the engine. Ranks of one engine read the same tokens, so that the first one publishes.
    """

    def __init__(self, steps: EngineSteps, vllm_config: Any):
        self.steps, self.next = steps, 0.0
        self.published = vllm_config.parallel_config.rank % vllm_config.parallel_config.tensor_parallel_size == 0
        self.waiting: tuple[dict[str, float], torch.Tensor, Any] | None = None
        """Counts of the host, those of the device on their way to it, and an event that tells their arrival."""
        self.publish = _Increments().set if "PROMETHEUS_MULTIPROC_DIR" in os.environ else _File(id(self)).set

    def update(self) -> None:
        """Publish what the steps so far have counted, if it is time; called before each step."""
        now = time.monotonic()
        if self.published and now >= self.next and self.waiting is None:
            self.next = now + _EVERY
            self.waiting = (dataclasses.asdict(self.steps.totals), *self._fetch())
        if self.waiting is not None and (self.waiting[2] is None or self.waiting[2].query()):
            counts, read, _ = self.waiting
            self.waiting = None
            self.publish(counts | {"keys_read": float(read)})

    def _fetch(self) -> tuple[torch.Tensor, Any]:
        read = self.steps.keys_read()
        if read.device.type != "cuda":
            return read, None
        host = torch.empty((), dtype=read.dtype, pin_memory=True).copy_(read, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return host, event


class _File:
    """Totals of one group of layers in a file, replaced as a whole."""

    def __init__(self, number: int):
        self.path = Path(os.environ.get(_FOLDER, tempfile.gettempdir())) / f"{os.getpid()}-{number}.json"
        self.active = _FOLDER in os.environ

    def set(self, counts: dict[str, float]) -> None:
        if self.active:
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            part = self.path.with_suffix(".part")
            part.write_text(json.dumps(counts), encoding="utf-8")
            part.replace(self.path)


@functools.cache
def _counters() -> dict[str, Any]:
    """Counters of ``prometheus_client``, whose files the processes that serve metrics read."""
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    return {
        key: prometheus_client.Counter(f"foveate:{name}", text, registry=registry)
        for key, (name, text) in METRICS.items()
    }


class _Increments:
    """Adds what a group of layers has counted since the last time to :func:`_counters`."""

    def __init__(self):
        self.last = dict.fromkeys(METRICS, 0.0)

    def set(self, counts: dict[str, float]) -> None:
        for key, counter in _counters().items():
            counter.inc(max(0.0, counts[key] - self.last[key]))  # a capture counts from 0 again
            self.last[key] = counts[key]


class Collector:
    """Adds up the workers' files when ``/metrics`` is asked for."""

    def __init__(self, folder: Path):
        self.folder = folder

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily

        found = [json.loads(path.read_text(encoding="utf-8")) for path in self.folder.glob("*.json")]
        for key, (name, text) in METRICS.items():
            if found:
                yield CounterMetricFamily(f"foveate:{name}", text, sum(counts[key] for counts in found))


def serve() -> None:
    """In vLLM's first process: name the folder of the workers' files, and serve what they will hold.

    The folder is made by the first worker that publishes; other processes find its name in the environment.
    """
    if _FOLDER in os.environ:
        return
    import atexit

    from prometheus_client import REGISTRY

    folder = Path(tempfile.gettempdir()) / f"foveate-{os.getpid()}-{secrets.token_hex(8)}"
    os.environ[_FOLDER] = str(folder)
    REGISTRY.register(Collector(folder))
    atexit.register(_remove, folder, os.getpid())


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
