"""The indexer's settings and ablations, on the CPU at a small size."""

import json

import pytest
import torch
from typer.testing import CliRunner

from foveate.bench import indexer_study as study
from foveate.cli import app
from foveate.layers.csa import indexer
from foveate.results.errors import UserError
from foveate.results.measurements import FIELDS

SMALL = {"heads": 4, "dim": 8, "top_k": 60, "ratio": 1, "dtype": "float32", "repeats": 1, "device": "cpu"}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(study, "TOP_K", (5, 60))
    monkeypatch.setattr(study, "CHUNKS", (16, 200))
    monkeypatch.setattr(study, "LONG_CHUNKS", (16, 200))
    monkeypatch.setattr(study, "HELD", (1, 2))
    monkeypatch.setattr(study, "TILE", 100)
    monkeypatch.setattr(study, "SMALL_TILE", 30)


def test_every_setting_is_exact_and_every_ablation_loses():
    before = indexer.QUERY_CHUNK, indexer.KEY_CHUNK, indexer.SCORES_BYTES
    rows = study.run(study.Plan(tokens=500, small=400, **SMALL), lambda _: None)
    assert before == (indexer.QUERY_CHUNK, indexer.KEY_CHUNK, indexer.SCORES_BYTES)
    assert all(field in row for row in rows for field in FIELDS)
    recall = {(row["case"]["study"], row["case"]["value"], row["case"]["tokens"]): row["recall_mean"] for row in rows}
    lossless = {key: share for key, share in recall.items() if not str(key[1]).startswith(("A1", "A2:", "A3"))}
    assert set(lossless.values()) == {1.0}
    assert len(lossless) == 2 + 2 + 4 + 4 + 2
    first = recall["ablation", "A1: tiles are not merged", 400]
    # of t + 1 keys as many as the first 100 hold: all of them, and then a share that falls
    assert first == pytest.approx((100 + sum(100 / (t + 1) for t in range(100, 400))) / 400, abs=0.03)
    assert recall["ablation", "A2: small tiles are skipped", 400] == 0.0
    assert 0.9 < recall["ablation", "A3: scores in fp16", 400] < 1.0


def test_small_tiles_are_skipped_in_the_loop():
    """And what of the keys is in a tile that is large enough is taken."""
    scores = torch.rand(1, 5, 250, generator=torch.Generator().manual_seed(0))
    found = study._merged(scores, 60, 100, skip=True)
    assert torch.equal(found, study._merged(scores[..., :200], 60, 100))
    assert bool((study._merged(scores, 60, 30, skip=True) == -1).all())
    assert torch.equal(study._merged(scores, 50, 100, skip=True), study._merged(scores, 50, 100))


def test_what_does_not_fit_is_left_out(monkeypatch):
    real, said = study.bench.timed, []

    def timed(plan, work, ranks):
        if indexer.QUERY_CHUNK == 16:
            raise torch.OutOfMemoryError
        return real(plan, work, ranks)

    monkeypatch.setattr(study.bench, "timed", timed)
    rows = study.run(study.Plan(tokens=500, small=400, **SMALL), said.append)
    assert len(rows) == 15
    assert sum("left out, it does not fit into memory" in line for line in said) == 2


def test_a_wrong_set_is_seen(monkeypatch):
    real = study.csa.lightning_indexer
    monkeypatch.setattr(study.csa, "lightning_indexer", lambda *a, **k: real(*a, **k).clamp_min(0) // 2)
    rows = study.run(study.Plan(tokens=500, small=400, **SMALL), lambda _: None)
    assert all(row["recall_min"] < 1 for row in rows if row["case"]["study"] != "ablation")


def test_the_command_writes_rows_and_tables(tmp_path):
    out = tmp_path / "rows.jsonl"
    options = "--tokens 300 --small 240 --heads 4 --dim 8 --top-k 60 --ratio 1 --dtype float32 --repeats 1 --device cpu"
    done = CliRunner().invoke(app, ["bench", "indexer-study", *options.split(), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "| ablation, 240 tokens |" in done.output
    assert "| A2: small tiles are skipped |" in done.output
    assert [json.loads(line)["bench"] for line in out.read_text().splitlines()] == [study.Plan.bench] * 17


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"small": 100}, "small must be at least 101 tokens, several tiles of keys, not 100"),
        ({"top_k": 30}, "top-k must be more than the 30 keys of a small tile, not 30"),
        ({"heads": 0}, "heads must be at least 1, not 0"),
        ({"tokens": 0}, "tokens must be at least the ratio"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(UserError, match=message):
        study.run(study.Plan(**{"tokens": 500, "small": 400, **SMALL, **change}))


def test_recall_counts_a_key_once():
    plan = study.Plan(tokens=200, small=150, **SMALL)
    inputs = study.bench._draw(plan.at(150), 150, study.bench.ALONE)
    recall = study._Recall(plan, inputs, 60)
    right = study._select(plan, inputs, 60)
    assert bool((recall(right) == 1).all())
    assert recall(torch.full_like(right, -1)).max() == 0
    assert recall(right[..., :1].expand_as(right)).tolist() == [1 / 60] * 150
