"""The program that measures lossless decoding, on the small real model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import lossless

MODEL = Path(__file__).parents[2] / "models" / "smollm2-135m"


@pytest.mark.full
def test_rows_say_what_was_accepted_and_that_answers_are_dense_ones(tmp_path):
    out = tmp_path / "rows.jsonl"
    asked = ["--task", "json", "--task", "code", "--draft", "3", "--method", "kascade:top_k=0.3"]
    lossless.main(["--model", str(MODEL), "--out", str(out), "--length", "160", "--new", "12", *asked])
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["case"]["task"] for row in rows] == ["json", "code"]
    for row in rows:
        assert row["bench"] == "lossless"
        assert row["equal"] == 1
        assert 0 < row["accepted"] <= 3
        assert row["keys_read_share"] < 1
        assert row["baseline_ms"] > 0 < row["ms"]
