"""The program that measures lossless decoding, on the small real model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import lossless
from foveate.errors import UserError

MODEL = Path(__file__).parents[2] / "models" / "smollm2-135m"


@pytest.mark.full
def test_rows_say_what_was_accepted_and_that_answers_are_dense_ones(tmp_path):
    out = tmp_path / "rows.jsonl"
    asked = ["--task", "json", "--task", "code", "--draft", "3", "--method", "kascade:top_k=0.3", "--case", "200x2"]
    lossless.main(["--model", str(MODEL), "--out", str(out), "--new", "48", *asked])
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["case"]["task"] for row in rows] == ["json", "code"]
    for row in rows:
        assert row["bench"] == "lossless"
        assert row["equal"] == 1
        assert 0 < row["accepted"] <= row["drafted"] <= 3
        assert row["keys_read_share"] < 1
        assert row["baseline_ms"] > 0 < row["ms"]


@pytest.mark.full
def test_a_shape_accepts_the_share_that_is_given(tmp_path, monkeypatch):
    out = tmp_path / "rows.jsonl"
    monkeypatch.setitem(lossless.SHAPES, "8b", (3, 64, 2, 1, 64, 97))
    asked = ["--shape", "8b", "--accept", "0.5", "--draft", "4", "--method", "pages:top_k=0.3", "--case", "300x4"]
    lossless.main(["--out", str(out), "--new", "100", *asked])
    (row,) = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    assert row["equal"] is None
    assert row["accepted"] == pytest.approx(sum(0.5**n for n in range(1, 5)), abs=0.3)


def test_a_case_is_tokens_and_rows(capsys):
    with pytest.raises(SystemExit):
        lossless.main(["--shape", "8b", "--out", "rows.jsonl", "--case", "8K"])
    assert "8K is not TOKENSxROWS, such as 32768x8" in capsys.readouterr().err


@pytest.mark.full
def test_a_text_that_is_too_short_for_the_case_is_refused(tmp_path):
    asked = ["--task", "book", "--case", "60000x1", "--out", str(tmp_path / "rows.jsonl")]
    with pytest.raises(UserError, match=r"--case 60000x1: the text of --task book makes prompts of at most 3\d,\d{3}"):
        lossless.main(["--model", str(MODEL), *asked])
