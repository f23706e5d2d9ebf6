"""The bench of hybrids' attention, on the CPU at a small size."""

import pytest

from benchmarks import cold_cache_timing as cold
from benchmarks import hybrid_attention as hybrids
from foveate.lab.results.measurements import FIELDS

SMALL = {
    "context": 200,
    "batches": (2,),
    "heads": 4,
    "kv_heads": 2,
    "nsa_kv_heads": 1,
    "head_dim": 16,
    "window": 40,
    "buffer": 16,
    "half": 8,
    "sliding": 48,
    "dtype": "float32",
    "device": "cpu",
}


@pytest.fixture(autouse=True)
def briefly(monkeypatch):
    monkeypatch.setattr(cold, "_SECONDS", 0.0)


def test_a_row_for_each_kind_of_attention():
    rows = hybrids.run(hybrids.Plan(**SMALL), lambda text: None)
    assert [(row["case"]["phase"], row["case"]["what"], row["baseline"]) for row in rows] == [
        ("decode", "swa", "swa"),
        ("decode", "lte, buffer full", "swa"),
        ("decode", "lte, buffer half full", "swa"),
        ("decode", "step of swa with its write", "swa"),
        ("decode", "lte, step with replacement", "step of swa with its write"),
        ("decode", "lte, scores of a step", "lte, buffer full"),
        ("decode", "dense, sdpa", "dense, sdpa"),
        ("decode", "nsa", "dense of nsa's heads, sdpa"),
        ("decode", "dense of nsa's heads, sdpa", "dense of nsa's heads, sdpa"),
        ("prefill", "swa", "swa"),
        ("prefill", "lte", "swa"),
        ("prefill", "lte, selection of tokens", "swa"),
        ("prefill", "lte, with selection", "swa"),
        ("prefill", "dense, sdpa", "dense, sdpa"),
    ]
    assert all(field in row for row in rows for field in FIELDS)
    checked = [row["error"] for row in rows if row["error"] is not None]
    assert len(checked) == 6
    assert max(checked) < 1e-5
    full, half = (row["gb_per_s"] * row["ms"] for row in rows[1:3])
    assert full / half == pytest.approx((41 + 16) / (41 + 8))


def test_scores_are_shared_by_the_steps_that_need_them():
    rows = hybrids.run(hybrids.Plan(**SMALL, phases=("decode",)), lambda text: None)
    assert [row["steps_that_share"] for row in rows if row["steps_that_share"] > 1] == [40 - 2 * 6]


@pytest.mark.parametrize("verb", ["attend_until", "attend"])
def test_a_wrong_result_is_seen(verb, monkeypatch):
    place = hybrids if verb == "attend_until" else hybrids.ops
    real = getattr(place, verb)

    def wrong(q, *args, **how):
        attended = real(q, *args, **how)
        return attended if q.dtype.itemsize == 8 else attended._replace(out=attended.out * 1.1)

    monkeypatch.setattr(place, verb, wrong)
    phase = "prefill" if verb == "attend_until" else "decode"
    rows = hybrids.run(hybrids.Plan(**SMALL, phases=(phase,)), lambda text: None)
    assert max(row["error"] for row in rows if row["error"] is not None) > 0.05
