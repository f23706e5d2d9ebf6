"""`benchmarks/recheck.py` compares rows measured again: the same rows agree, and another method is seen."""

import json
from pathlib import Path

import pytest

from benchmarks import recheck
from foveate.errors import DataError
from foveate.lab.report.rows import read

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def old():
    return read([RESULTS / name for name in recheck.FILES])


@pytest.fixture(scope="module")
def cells(old):
    """The rows that `recheck.sh` measures again."""
    wanted = [json.loads(line) for line in (RESULTS / "recheck.jsonl").read_text(encoding="utf-8").splitlines()]
    key = ("spec", "model", "task", "split", "length", "n")
    found = []
    for one in wanted:
        one["spec"] = "luka:score=spread" if one["spec"] == "luka" else one["spec"]  # the default of then
        found += [row for row in old if all(row[name] == one[name] for name in key)]
    return found


def test_every_cell_has_its_row_and_the_same_rows_agree(cells, old):
    lines = recheck.compare(cells, old)
    assert len(lines) == len({line["cell"] for line in lines}) == 10
    for line in lines:
        assert line["new"]["score"] == line["old"]["score"] > 0
        assert line["change"] == {"value": 0.0, "low": 0.0, "high": 0.0}
        assert (line["items_changed"], line["differs"]) == (0, False)
    assert recheck.table(lines).count("| no |") == 10


def test_a_row_of_another_policy_differs(cells, old, tmp_path, capsys, monkeypatch):
    row = next(row for row in cells if row["method"] == "quest")
    (name,) = row["item_values"]
    best = dict.fromkeys(("score", "low", "high"), 100.0)
    better = row | {"item_values": {name: [1.0] * row["n"]}} | best
    (line,) = recheck.compare([better], old)
    assert line["differs"]
    assert line["items_changed"] == round(row["n"] * (100 - row["score"]) / 100)
    assert line["change"]["low"] > 0
    (tmp_path / "new.jsonl").write_text(json.dumps(better) + "\n", encoding="utf-8")
    with pytest.raises(recheck.typer.Exit):
        recheck.main(tmp_path / "out.jsonl", [tmp_path / "new.jsonl"])
    assert "| yes |" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8")) == line


def test_other_items_are_refused(cells, old):
    other = cells[0] | {"run": cells[0]["run"] | {"items": "0123456789abcdef"}}
    with pytest.raises(DataError, match=r"0 rows of .* on the items of"):
        recheck.compare([other], old)
