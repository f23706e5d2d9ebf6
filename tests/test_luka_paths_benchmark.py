"""`benchmarks/luka_paths.py`: every path is switched off while its rows are measured, and on again."""

import json
import runpy
from pathlib import Path

import pytest

from foveate.bench import decode

plan = pytest.importorskip("foveate.ops.summaries.plan", exc_type=ImportError)
BENCHMARK = runpy.run_path(str(Path(__file__).resolve().parents[1] / "benchmarks" / "luka_paths.py"))
NAMES = ("_FEW", "_FEW_OF", "_NO_BOUNDS")


def constants():
    return {name: getattr(plan, name) for name in NAMES}


def test_rows_name_what_is_switched_off(tmp_path, monkeypatch):
    out, before, seen, run = tmp_path / "rows.jsonl", constants(), [], decode.run
    monkeypatch.setattr(decode, "run", lambda *args: seen.append(constants()) or run(*args))
    BENCHMARK["main"](["--out", str(out), "--context", "300", "--batch", "1", "--device", "cpu"])
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    named = [(row["case"]["path"], row["case"]["method"]) for row in rows]
    assert named == [(path, method) for path in BENCHMARK["OFF"] for method in BENCHMARK["METHODS"]]
    assert seen == [before | off for off in BENCHMARK["OFF"].values()]
    assert constants() == before
