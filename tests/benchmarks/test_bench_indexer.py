"""The bench of the lightning indexer, on the CPU at a small size."""

import json

import pytest
import torch

from benchmarks import indexer
from foveate.errors import UserError
from foveate.lab.bench.plan import measure
from foveate.lab.results.measurements import FIELDS
from tests.ranks import run_ranks

SMALL = {"heads": 16, "dim": 8, "top_k": 20, "ratio": 4, "dtype": "float32", "repeats": 1, "device": "cpu"}


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 64, 1001])
@pytest.mark.parametrize("ratio", [1, 4, 7])
def test_useful_work_is_that_of_keys_that_may_be_read(tokens, ratio):
    assert indexer.pairs(tokens, ratio) == sum((t + 1) // ratio for t in range(tokens))


def test_hits_among_equal_scores_and_keys_that_are_not_there():
    """Rows: the first of equal keys; another of them; one below them; one more than there are; a query without keys."""
    inf = float("-inf")
    scores = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]] * 3 + [[2.0, inf, inf, inf, inf], [inf] * 5])
    found = torch.tensor([[1, 0, -1], [0, 2, 3], [0, 4, 1], [0, 3, -1], [-1, -1, -1]])
    strict, fair, whole = (numbers.tolist() for numbers in indexer.hits(found, scores, 3))
    assert strict == [2, 2, 2, 1, 0]
    assert fair == [2, 3, 2, 1, 0]
    assert whole == [3, 3, 3, 2, 0]


def test_a_row_for_each_implementation_and_length():
    said = []
    rows = indexer.run(indexer.Plan(tokens=(64, 200), **SMALL), said.append)
    assert [(row["impl"], row["case"]["tokens"]) for row in rows] == [
        (name, tokens) for tokens in (64, 200) for name in indexer.IMPLEMENTATIONS
    ]
    assert len(said) == 7, "the peer is left out"
    for row in rows:
        assert all(field in row for field in FIELDS)
        assert row["recall_min"] == 1
        assert row["baseline"] == "materialised"
        assert row["tflop_per_s"] * row["ms"] * 1e9 == pytest.approx(
            2 * 16 * 8 * indexer.pairs(row["case"]["tokens"], 4)
        )
        tokens = row["case"]["tokens"]
        moved = 4 * (tokens * 16 * 8 + tokens // 4 * 8 + tokens * 16 + tokens * 20 + indexer.pairs(tokens, 4))
        assert row["gb_per_s"] * row["ms"] * 1e6 == pytest.approx(moved)
        for name in ("score_ms", "select_ms"):
            assert row[name] > 0 if row["impl"] == "foveate" else row[name] is None


def test_what_does_not_fit_is_said(monkeypatch):
    said = []
    monkeypatch.setattr(indexer, "_LONGEST", 63)
    rows = indexer.run(indexer.Plan(tokens=(64,), **SMALL), said.append)
    assert [row["impl"] for row in rows] == ["foveate", "chunked"]
    assert rows[0]["baseline"] == "chunked"
    assert "materialised at 64 tokens: left out, it does not fit into memory" in said


def test_what_ran_out_of_memory_is_recorded(monkeypatch):
    real, said = indexer._measure, []

    def measure(plan, name, *more):
        if name == "materialised":
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return real(plan, name, *more)

    monkeypatch.setattr(indexer, "_measure", measure)
    rows = indexer.run(indexer.Plan(tokens=(64,), **SMALL), said.append)
    assert [(row["impl"], row["out_of_memory"]) for row in rows] == [
        (name, ["materialised"]) for name in ("foveate", "chunked")
    ]
    assert "materialised at 64 tokens: out of memory (CUDA out of memory)" in said


def test_a_wrong_set_is_seen(monkeypatch):
    real = indexer.csa.lightning_indexer
    monkeypatch.setattr(indexer.csa, "lightning_indexer", lambda *a, **k: real(*a, **k).roll(1, 1))
    (row,) = indexer.run(indexer.Plan(tokens=(200,), implementations=("foveate",), **SMALL), lambda _: None)
    assert row["recall_min"] < 1


def test_the_materialised_path_is_judged_by_its_own_scores(monkeypatch):
    """Which need not be those of the other paths."""
    real = indexer.indexer.materialised_scores
    monkeypatch.setattr(indexer.indexer, "materialised_scores", lambda *a: -real(*a))
    plan = indexer.Plan(tokens=(200,), implementations=("foveate", "materialised"), **SMALL)
    assert [row["recall_min"] for row in indexer.run(plan, lambda _: None)] == [1, 1]
    monkeypatch.setattr(indexer.ops.score, "indexer_scores", lambda *a, **k: 1 / 0)
    plan = indexer.Plan(tokens=(200,), implementations=("materialised",), **SMALL)
    assert [row["recall_min"] for row in indexer.run(plan, lambda _: None)] == [1]


def test_parts_are_those_of_the_blocks_that_the_fused_path_makes(monkeypatch):
    seen = {True: [], False: []}
    real = indexer.ops.score.indexer_scores
    plan = indexer.Plan(tokens=(200,), implementations=("foveate",), **SMALL)
    inputs, parts = indexer._draw(plan, 200, indexer.ALONE), [False]

    def noting(q, k, w, **how):
        seen[parts[0]].append((q.shape, k.shape, how["offset"]))
        return real(q, k, w, **how)

    monkeypatch.setattr(indexer.ops.score, "indexer_scores", noting)
    monkeypatch.setattr(indexer.indexer, "SCORES_BYTES", 4 * 30 * 40)
    indexer.csa.lightning_indexer(inputs.q, inputs.k, inputs.weights, 20, ratio=4, path="fused")
    parts[0] = True
    indexer._parts(plan, inputs, indexer.ALONE)
    assert len(seen[False]) > 2
    assert seen[True] == 2 * seen[False], "once to warm up, and once for the repeat"


def test_weights_are_as_a_fresh_linear_map_makes_them():
    plan = indexer.Plan(tokens=(4096,), **SMALL)
    drawn = indexer._draw(plan, 4096, indexer.ALONE).weights * (plan.dim * plan.heads) ** 0.5
    hidden = torch.randn(4096, 256, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    made = torch.nn.Linear(256, 16)(hidden)
    for x in (drawn, made):
        assert x.var().item() == pytest.approx(1 / 3, rel=0.03)
        assert ((x / x.std()) ** 4).mean().item() == pytest.approx(3, rel=0.1)


def test_keys_of_the_future_are_seen(monkeypatch):
    real = indexer.csa.lightning_indexer

    def leaking(*arguments, **more):
        found = real(*arguments, **more)
        return found.where(found >= 0, 40)

    monkeypatch.setattr(indexer.csa, "lightning_indexer", leaking)
    (row,) = indexer.run(indexer.Plan(tokens=(200,), implementations=("foveate",), **SMALL), lambda _: None)
    assert row["recall_min"] < 1


def one_of_several(out):
    sizes = {"heads": 4, "dim": 8, "top_k": 9, "repeats": 1, "device": "cpu"}
    measure("indexer", indexer.run, indexer.Plan((401,), ["foveate"], **sizes), out, str)


def test_of_several_ranks_the_first_writes_the_rows(tmp_path):
    out = tmp_path / "rows.jsonl"
    said = run_ranks(2, one_of_several, out, folder=tmp_path)
    assert ["foveate at 401 tokens" in text for text in said] == [True, False]
    (row,) = map(json.loads, out.read_text().splitlines())
    assert row["recall_min"] == 1
    assert (row["case"]["tokens"], row["case"]["ranks"]) == (401, 2)


def test_several_ranks_are_for_foveate_alone(monkeypatch):
    monkeypatch.setattr(indexer._Ranks, "of", lambda device: indexer._Ranks(0, 2, device))
    with pytest.raises(UserError, match="several ranks are for --impl foveate alone"):
        indexer.run(indexer.Plan(tokens=(64,), **SMALL), lambda _: None)
