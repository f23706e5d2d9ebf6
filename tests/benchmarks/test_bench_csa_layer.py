"""The bench of a layer of compressed sparse attention, on the CPU at a small size."""

import pytest

from benchmarks import csa_layer
from foveate.lab.results.measurements import FIELDS

SMALL = {
    "heads": 4,
    "dim": 16,
    "index_heads": 16,
    "index_dim": 8,
    "top_k": 20,
    "window": 9,
    "chunk": 48,
    "dtype": "float32",
    "repeats": 1,
    "device": "cpu",
}


def test_a_row_for_each_length():
    rows = csa_layer.run(csa_layer.Plan(tokens=(40, 130), **SMALL), lambda _: None)
    assert [row["case"]["tokens"] for row in rows] == [40, 130]
    for row in rows:
        assert all(field in row for field in FIELDS)
        assert row["error"] < 1e-5
        read = sum(min((t + 1) // 4, 20) + min(t + 1, 9) for t in range(row["case"]["tokens"]))
        assert row["attention_tflop_per_s"] * row["attention_ms"] * 1e9 == pytest.approx(4 * 4 * 16 * read)


def test_a_chunk_that_is_computed_for_another_place_is_seen(monkeypatch):
    real = csa_layer.csa.forward
    monkeypatch.setattr(csa_layer.csa, "forward", lambda *a, offset, **k: real(*a, offset=max(0, offset - 1), **k))
    (row,) = csa_layer.run(csa_layer.Plan(tokens=(130,), **SMALL), lambda _: None)
    assert row["error"] > 1e-2
