"""`benchmarks/frozen_lte.py` on a tiny model: its rows name no path of a machine, and one file holds them all."""

import json
import os
import runpy
from pathlib import Path

import pytest

from foveate.results.errors import UserError
from foveate.results.rows import ROW_FIELDS
from tests.evaluation import tiny

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = runpy.run_path(str(ROOT / "benchmarks" / "frozen_lte.py"))


def test_rows_name_the_file_alone(tmp_path, monkeypatch):
    model = tiny.build(tmp_path / "models" / "tiny-llama")
    monkeypatch.chdir(tmp_path)  # from which --out is given
    sizes = "--length 600 --steps 2 --limit 1 --batch-size 1 --shares 0.25 --allocations uniform"
    chosen = "--tasks uuid --questions after with --out out --gather rows.jsonl"
    places = ["--model", str(model), "--text", str(tiny.SAMPLE), "--data", str(tiny.SAMPLE)]
    BENCHMARK["main"]([*places, *sizes.split(), *chosen.split()])
    assert os.getcwd() == str(tmp_path)
    text = (tmp_path / "rows.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    assert str(tmp_path) not in text
    assert [row["task_settings"].get("question", "with") for row in rows] == ["after"] * 7 + ["with"] * 7
    learned = [row for row in rows if row["method"] == "lte" and row["settings"]["file"]]
    assert [row["spec"].partition(",")[0] for row in learned] == ['lte:file="lte.safetensors"'] * 2
    assert all(list(row) == list(ROW_FIELDS) for row in rows)


def test_nothing_to_gather_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no rows"):
        BENCHMARK["gather"](tmp_path, tmp_path / "rows.jsonl")
