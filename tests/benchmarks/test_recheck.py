"""`benchmarks/recheck.py` measures rows again: the same code gives the same scores, and another method is seen."""

import json
import runpy
from pathlib import Path

import pytest

from foveate.evaluation import runner, tasks
from foveate.results.errors import DataError
from tests.evaluation import tiny

ROOT = Path(__file__).resolve().parents[2]
RECHECK = runpy.run_path(str(ROOT / "benchmarks" / "recheck.py"))
RESULTS = ROOT / "benchmarks" / "results"
H2O, STREAMING = "h2o:top_k=8,window=8", "streaming:window=16"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def results(model, tmp_path_factory):
    """A folder with rows of two methods, as `foveate compare` writes them."""
    folder = tmp_path_factory.mktemp("results")
    methods, _ = runner.parse_methods([H2O, STREAMING])
    task = tasks.parse("perplexity:continuation=12", length=60)
    plan = runner.Comparison(model, task, tiny.SAMPLE, methods, 6, folder / "rows.jsonl", batch_size=2, device="cpu")
    runner.run(runner.prepare(plan))
    return folder


def cells(*specs):
    return [RECHECK["Cell"]("rows.jsonl", "perplexity", "books", spec, 60) for spec in specs]


def changed_rows(results, folder, **fields):
    """The rows of H2O with other fields, in a folder of their own."""
    rows = [json.loads(line) for line in (results / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    changed = [{**row, **fields} if row["spec"] == H2O else row for row in rows]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in changed), encoding="utf-8")
    return folder


def test_the_same_code_gives_the_same_scores(model, results, tmp_path):
    lines = RECHECK["check"](model, tiny.SAMPLE, tmp_path, cells(STREAMING, H2O), results, "cpu")
    assert [line["spec"] for line in lines] == [STREAMING, H2O]
    for line in lines:
        assert line["new"]["score"] == line["old"]["score"] > 0
        assert line["change"] == {"value": 0.0, "low": 0.0, "high": 0.0}
        assert (line["n"], line["items_changed"], line["differs"]) == (6, 0, False)
    written = (tmp_path / "recheck.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in written] == lines
    assert RECHECK["table"](lines).count("0 of 6 | no |") == 2


def test_a_run_of_one_cell_leaves_the_lines_of_the_others(model, results, tmp_path):
    lines = RECHECK["check"](model, tiny.SAMPLE, tmp_path, cells(STREAMING, H2O), results, "cpu")
    changed = [{**lines[0], "n": 1}, lines[1]]
    (tmp_path / "recheck.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in changed), encoding="utf-8")
    assert RECHECK["check"](model, tiny.SAMPLE, tmp_path, cells(STREAMING), results, "cpu") == lines[:1]
    written = (tmp_path / "recheck.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in written] == lines


def test_a_row_of_another_policy_differs(model, results, tmp_path):
    """As if the method had predicted every token better when its row was measured."""
    rows = [json.loads(line) for line in (results / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    values = next(row for row in rows if row["spec"] == H2O)["item_values"]
    old = changed_rows(results, tmp_path, item_values={**values, "nll": [value / 2 for value in values["nll"]]})
    (line,) = RECHECK["check"](model, tiny.SAMPLE, tmp_path / "new", cells(H2O), old, "cpu")
    assert line["differs"]
    assert line["items_changed"] == 6
    assert line["change"]["high"] < 0
    assert RECHECK["table"]([line]).endswith("6 of 6 | yes |")


def test_other_items_are_refused(model, results, tmp_path):
    rows = [json.loads(line) for line in (results / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    old = changed_rows(results, tmp_path, run={**rows[0]["run"], "items": "0123456789abcdef"})
    with pytest.raises(DataError, match="the items of perplexity books are 0123456789abcdef there and"):
        RECHECK["check"](model, tiny.SAMPLE, tmp_path / "new", cells(H2O), old, "cpu")


def test_a_cell_without_a_row_is_refused(model, results, tmp_path):
    with pytest.raises(DataError, match=r"rows.jsonl: 0 rows of h2o on perplexity books and tiny-llama"):
        RECHECK["check"](model, tiny.SAMPLE, tmp_path, cells("h2o"), results, "cpu")


def test_every_cell_has_its_row_and_its_method():
    """Ten methods, each in one row of the half-billion model, with settings that are allowed now."""
    assert len({cell.name for cell in RECHECK["CELLS"]}) == len(RECHECK["CELLS"]) == 10
    for cell in RECHECK["CELLS"]:
        row = cell.row(RECHECK["read"]([RESULTS / cell.file]), "qwen2.5-coder-0.5b-instruct")
        method = RECHECK["_method"](row, RESULTS / "calibrations" / row["model"])
        assert method.name == cell.name == row["method"]
        settings = json.loads(json.dumps({**method.retired, **method.settings()}))
        assert {name: settings[name] for name in row["settings"] if name != "calibration"} == {
            name: value for name, value in row["settings"].items() if name != "calibration"
        }
        assert row["length"] <= 8192
