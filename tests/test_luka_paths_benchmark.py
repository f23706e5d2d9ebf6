"""`benchmarks/luka_paths.py`: every path is switched off in turn, and on again."""

import json
import runpy
from pathlib import Path

import pytest

plan = pytest.importorskip("foveate.ops.summaries.plan", exc_type=ImportError)
BENCHMARK = runpy.run_path(str(Path(__file__).resolve().parents[1] / "benchmarks" / "luka_paths.py"))


def test_rows_name_what_is_switched_off(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    before = vars(plan).copy()
    BENCHMARK["main"](["--out", str(out), "--context", "300", "--batch", "1", "--device", "cpu"])
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    named = [(row["case"]["path"], row["case"]["method"]) for row in rows]
    assert named == [(path, method) for path in BENCHMARK["OFF"] for method in BENCHMARK["METHODS"]]
    assert {name: before[name] for name in ("_FEW", "_FEW_OF", "_NO_BOUNDS")} == {
        name: getattr(plan, name) for name in ("_FEW", "_FEW_OF", "_NO_BOUNDS")
    }
