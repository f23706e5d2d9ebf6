"""The indexer's settings and ablations, on the CPU at a small size."""

import pytest
import torch

from benchmarks import indexer_study as study
from foveate.csa import indexer
from foveate.lab.results.measurements import FIELDS

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


def test_a_wrong_set_is_seen(monkeypatch):
    real = study.csa.lightning_indexer
    monkeypatch.setattr(study.csa, "lightning_indexer", lambda *a, **k: real(*a, **k).clamp_min(0) // 2)
    rows = study.run(study.Plan(tokens=500, small=400, **SMALL), lambda _: None)
    assert all(row["recall_min"] < 1 for row in rows if row["case"]["study"] != "ablation")


def test_recall_counts_a_key_once():
    plan = study.Plan(tokens=200, small=150, **SMALL)
    inputs = study.bench._draw(plan.at(150), 150, study.bench.ALONE)
    recall = study._Recall(plan, inputs, 60)
    right = study._select(plan, inputs, 60)
    assert bool((recall(right) == 1).all())
    assert recall(torch.full_like(right, -1)).max() == 0
    assert recall(right[..., :1].expand_as(right)).tolist() == [1 / 60] * 150
