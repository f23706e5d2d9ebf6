import time

import pytest

from benchmarks import cold_cache_timing as cold
from foveate.lab.results import timing


def test_times_are_milliseconds(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", iter([1.0, 1.25, 3.0, 3.5]).__next__)
    assert timing.milliseconds(lambda: None, "cpu") == pytest.approx(250)
    mark, between = cold.marks("cpu")
    start, end = mark(), mark()
    assert between(start, end) == pytest.approx(500)
