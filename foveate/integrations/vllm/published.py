"""Counts of vLLM's workers as Prometheus metrics of the process that serves ``/metrics``, which started the workers.

A worker keeps its totals in anonymous memory (memfd). The serving process finds this memory by its name among its own
open files and the open files of its descendants. Nothing is written to a disk or to the environment, and processes that
are killed leave nothing behind. Linux alone has such memory; elsewhere nothing is published.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import functools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_NAME = "foveate-counts"
_PROCESSES = Path("/proc")

LABELS = ("model_name", "engine")
"""Labels of every metric, as vLLM's own metrics have them: the name under which a model is served, and the rank of the
data parallelism."""

METRICS = {
    "steps": ("decode_steps", "Decode steps."),
    "rows": ("decode_tokens", "Decoded tokens; with speculative decoding, rows that verify drafts."),
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
    "ranks_alike": (
        "audit_ranks_alike",
        "Share of the layers in which all ranks of a tensor parallelism chose the same keys for an audited row.",
        (0.5, 0.9, 0.99, 1),
    ),
}
"""Of audited rows: name, description and upper bounds of buckets."""


class Published:
    """What a worker publishes of one group of layers.

    Args:
        labels: values of :data:`LABELS`.
    """

    def __init__(self, labels: Sequence[str]):
        self.labels = list(labels)
        self.observed = {name: [0] * (len(bounds) + 1) + [0.0] for name, (_, _, bounds) in HISTOGRAMS.items()}
        """By histogram: numbers in each bucket, those above the last bound, and the sum."""
        self.memory: Any = None

    def observe(self, name: str, number: float) -> None:
        """Count a number in a histogram; published with the next :meth:`set`."""
        self.observed[name][bisect.bisect_left(HISTOGRAMS[name][2], number)] += 1
        self.observed[name][-1] += number

    def set(self, counts: dict[str, float]) -> None:
        """Publish totals by counter."""
        if not hasattr(os, "memfd_create"):
            return
        if self.memory is None:
            self.memory = os.fdopen(os.memfd_create(_NAME), "r+b", buffering=0)
        text = json.dumps(counts | {"observed": self.observed, "labels": self.labels}).encode()
        with _locked(self.memory, fcntl.LOCK_EX) as memory:
            memory.seek(0)
            memory.write(text)
            memory.truncate()


@contextlib.contextmanager
def _locked(memory: Any, how: int) -> Iterator[Any]:
    fcntl.flock(memory, how)
    try:
        yield memory
    finally:
        fcntl.flock(memory, fcntl.LOCK_UN)


def found() -> list[dict[str, Any]]:
    """What this process and its descendants publish."""
    read = {}
    for process in _family(os.getpid()):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for number in os.listdir(_PROCESSES / str(process) / "fd"):
                path = _PROCESSES / str(process) / "fd" / number
                with contextlib.suppress(OSError):
                    if os.readlink(path).startswith(f"/memfd:{_NAME}"):
                        key = os.stat(path).st_ino  # a forked process has it, too
                        with path.open("rb") as memory, _locked(memory, fcntl.LOCK_SH):
                            read[key] = memory.read()
    return [json.loads(text) for text in read.values() if text]


def _family(first: int) -> list[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for path in _PROCESSES.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    family = [first]
    for process in family:
        family += children.get(process, [])
    return family


class Collector:
    """Adds up what the workers of each engine publish when ``/metrics`` is asked for."""

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        engines: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for counts in found():
            engines.setdefault(tuple(counts["labels"]), []).append(counts)
        if not engines:
            return
        for key, (name, text) in METRICS.items():
            counter = CounterMetricFamily(f"foveate:{name}", text, labels=LABELS)
            for labels, given in sorted(engines.items()):
                counter.add_metric(labels, sum(counts[key] for counts in given))
            yield counter
        for key, (name, text, bounds) in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(f"foveate:{name}", text, labels=LABELS)
            ends = [*map(str, map(float, bounds)), "+Inf"]
            for labels, given in sorted(engines.items()):
                *buckets, total = map(sum, zip(*(counts["observed"][key] for counts in given)))
                if any(buckets):
                    held = [(end, sum(buckets[: n + 1])) for n, end in enumerate(ends)]
                    histogram.add_metric(labels, held, total)
            if histogram.samples:
                yield histogram


@functools.cache
def serve() -> None:
    """Make this process's ``/metrics`` include the published counts; without any it adds nothing."""
    from prometheus_client import REGISTRY

    REGISTRY.register(Collector())
