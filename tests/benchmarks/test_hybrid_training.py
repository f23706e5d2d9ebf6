"""Training steps of hybrids, on the CPU at the smallest size."""

import json

import pytest

from benchmarks import hybrid_training
from foveate.lab.bench.plan import measure
from foveate.lab.results.measurements import FIELDS
from tests.ranks import run_ranks

SMALL = {"tokens": 128, "length": 64, "steps": 2, "compile": False, "device": "cpu"}


def one_of_several(out):
    measure("hybrids", hybrid_training.run, hybrid_training.Plan(("gdn_swa-tiny",), **SMALL), out, str)


def test_a_row_for_each_model_beside_the_transformer():
    said, kept = [], []
    plan = hybrid_training.Plan(models=("lalte-tiny", "transformer-tiny"), **SMALL)
    rows = hybrid_training.run(plan, said.append, kept.append)
    assert [row["case"]["preset"] for row in rows] == ["transformer", "lalte"]
    assert kept == [[row] for row in rows]
    assert all(field in row for row in rows for field in FIELDS)
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(128_000 / row["ms"])
        assert row["tflop_per_s"] == pytest.approx(6e-12 * row["multiplied"] * row["tokens_per_s"])
        assert row["speedup"] == pytest.approx(rows[0]["ms"] / row["ms"])
        assert (row["baseline"], row["case"]["gpus"], row["peak_share"]) == ("transformer", 0, None)
    assert rows[0]["gated_delta_rule"] is None
    assert rows[1]["gated_delta_rule"].startswith("torch (")
    assert "delta rule by torch (" in said[1]


def test_a_profile_lists_what_a_step_s_time_goes_to():
    said = []
    hybrid_training.run(hybrid_training.Plan(models=("lalte-tiny",), profile=True, **SMALL), said.append)
    assert "aten::addmm" in said[0] or "aten::mm" in said[0]


def test_a_step_moves_the_weights_and_the_sparsity_feedback(monkeypatch):
    seen = {}

    def step(parallel, optimizer, feedback, ids):
        before = [parameter.detach().clone() for parameter in parallel.network.parameters()]
        _step(parallel, optimizer, feedback, ids)
        seen["moved"] = sum(bool((a != b).any()) for a, b in zip(before, parallel.network.parameters())) / len(before)
        seen["average"] = feedback.average

    _step = hybrid_training._step
    monkeypatch.setattr(hybrid_training, "_step", step)
    hybrid_training.run(hybrid_training.Plan(models=("lalte-tiny",), **SMALL), lambda text: None)
    assert seen["moved"] > 0.9
    assert seen["average"] is not None


def test_two_processes_train_together_and_the_first_has_the_row(tmp_path):
    out = tmp_path / "rows.jsonl"
    run_ranks(2, one_of_several, out, folder=tmp_path)
    (row,) = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    assert row["case"]["processes"] == 2
    assert row["tokens_per_s"] == pytest.approx(2 * 128_000 / row["ms"])
