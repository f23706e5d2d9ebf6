"""Counts of what was read, as Prometheus metrics beside vLLM's own.

Steps are counted in vLLM's workers, and another process serves ``/metrics``. A worker writes its totals to a file of
its own; the process that serves them adds up the files when it is asked. Where vLLM has several such processes, it uses
the files of ``prometheus_client`` itself (PROMETHEUS_MULTIPROC_DIR), and so do the workers.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
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


HISTOGRAMS = {
    "agreement": ("audit_agreement", "Whether the greedy token of an audited row is that of dense attention.", (0, 1)),
    "kl": (
        "audit_kl_nats",
        "KL divergence of an audited row's next-token distribution from that of dense attention.",
        (1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 1, 3),
    ),
    "mass_read": (
        "audit_mass_read",
        "Share of an audited row's attention that the keys hold which are read, the mean over layers and heads.",
        (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 1),
    ),
}
"""Of audited rows: name, description and upper bounds of buckets."""


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
        self.file = None if "PROMETHEUS_MULTIPROC_DIR" in os.environ else _File(id(self))
        self.publish = _Increments().set if self.file is None else self.file.set

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

    def observe(self, found: Mapping[str, torch.Tensor]) -> None:
        """Count an audit: by histogram, the numbers of its rows; waits for the device."""
        if not self.published:
            return
        for name, numbers in found.items():
            for number in numbers.tolist():
                if self.file is None:
                    _histograms()[name].observe(number)
                else:
                    self.file.observe(name, number)

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
        self.observed = {name: [0] * (len(bounds) + 1) + [0.0] for name, (_, _, bounds) in HISTOGRAMS.items()}
        """By histogram: numbers in each bucket, those above the last bound, and the sum."""

    def observe(self, name: str, number: float) -> None:
        self.observed[name][bisect.bisect_left(HISTOGRAMS[name][2], number)] += 1
        self.observed[name][-1] += number

    def set(self, counts: dict[str, float]) -> None:
        if self.active:
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            part = self.path.with_suffix(".part")
            part.write_text(json.dumps(counts | {"observed": self.observed}), encoding="utf-8")
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


@functools.cache
def _histograms() -> dict[str, Any]:
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    return {
        key: prometheus_client.Histogram(f"foveate:{name}", text, registry=registry, buckets=bounds)
        for key, (name, text, bounds) in HISTOGRAMS.items()
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
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        found = [json.loads(path.read_text(encoding="utf-8")) for path in self.folder.glob("*.json")]
        if not found:
            return
        for key, (name, text) in METRICS.items():
            yield CounterMetricFamily(f"foveate:{name}", text, sum(counts[key] for counts in found))
        for key, (name, text, bounds) in HISTOGRAMS.items():
            *buckets, total = map(sum, zip(*(counts["observed"][key] for counts in found)))
            if any(buckets):
                ends = [*map(float, bounds), "+Inf"]
                held = [(str(end), sum(buckets[: n + 1])) for n, end in enumerate(ends)]
                yield HistogramMetricFamily(f"foveate:{name}", text, held, total)


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
