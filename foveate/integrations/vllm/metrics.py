"""Counts of the keys and bytes that steps read, as Prometheus metrics beside vLLM's own.

Steps are counted in vLLM's workers, and another process serves ``/metrics``: see
:mod:`~foveate.integrations.vllm.published`. Where vLLM has several such processes, it uses files of
``prometheus_client`` (PROMETHEUS_MULTIPROC_DIR), and so do the workers.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Mapping
from typing import Any

import torch

from foveate.integrations.vllm.published import HISTOGRAMS, LABELS, METRICS, Published
from foveate.runtime import EngineSteps

_EVERY = 0.5
"""Seconds between two publications of a worker; the last of a busy time follow with the next step."""


class Meter:
    """Publishes the counts of a group of layers. It never waits for the device.

    Args:
        steps: what counts.
        vllm_config: of the engine. Ranks of one engine read the same tokens, so that the first one publishes.
    """

    def __init__(self, steps: EngineSteps, vllm_config: Any):
        parallel = vllm_config.parallel_config
        self.steps, self.next = steps, 0.0
        self.published = parallel.rank % parallel.tensor_parallel_size == 0
        self.labels = (vllm_config.model_config.served_model_name, str(parallel.data_parallel_index))
        """Values of ``LABELS``."""
        self.waiting: tuple[dict[str, float], torch.Tensor, Any] | None = None
        """Counts of the host, counts that are being copied from the device, and an event that the copy has ended."""
        self.own = None if "PROMETHEUS_MULTIPROC_DIR" in os.environ else Published(self.labels)
        self.publish = _Increments(self.labels).set if self.own is None else self.own.set

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
                if self.own is None:
                    _histograms()[name].labels(*self.labels).observe(number)
                else:
                    self.own.observe(name, number)

    def _fetch(self) -> tuple[torch.Tensor, Any]:
        read = self.steps.keys_read()
        if read.device.type != "cuda":
            return read, None
        host = torch.empty((), dtype=read.dtype, pin_memory=True).copy_(read, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return host, event


@functools.cache
def _counters() -> dict[str, Any]:
    """Counters of ``prometheus_client``, whose files the processes that serve metrics read."""
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    return {
        key: prometheus_client.Counter(f"foveate:{name}", text, LABELS, registry=registry)
        for key, (name, text) in METRICS.items()
    }


@functools.cache
def _histograms() -> dict[str, Any]:
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    return {
        key: prometheus_client.Histogram(f"foveate:{name}", text, LABELS, registry=registry, buckets=bounds)
        for key, (name, text, bounds) in HISTOGRAMS.items()
    }


class _Increments:
    """Adds what a group of layers has counted since the last time to :func:`_counters`."""

    def __init__(self, labels: tuple[str, ...]):
        self.labels = labels
        self.last = dict.fromkeys(METRICS, 0.0)

    def set(self, counts: dict[str, float]) -> None:
        for key, counter in _counters().items():
            counter.labels(*self.labels).inc(max(0.0, counts[key] - self.last[key]))  # a capture counts from 0 again
            self.last[key] = counts[key]
