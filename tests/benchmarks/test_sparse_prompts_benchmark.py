"""`benchmarks/sparse_prompts.py` on a tiny model: rows beside dense attention's, which a second run leaves alone."""

import json
import os
import runpy
from pathlib import Path

from evaluation import tiny

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = runpy.run_path(str(ROOT / "benchmarks" / "sparse_prompts.py"))


def test_rows_are_of_each_variant_and_made_once(tmp_path, monkeypatch, capsys):
    model = tiny.build(tmp_path / "models" / "tiny-llama")
    monkeypatch.chdir(tmp_path)
    arguments = ["--model", str(model), "--data", str(tiny.SAMPLE), "--out", "out/rows.jsonl", "--device", "cpu"]
    sizes = "--length 600 --limit 2 --batch-size 2 --base kascade:anchors=1,top_k=9,pool=layer"
    arguments += sizes.split()
    arguments += ["--tasks", "multikey_2", "single_3", "--variants", "{}", '{"dense_last": 16}', '{"oracle": true}']
    BENCHMARK["main"]([*arguments, "--seconds", "0"])
    out = tmp_path / "out" / "rows.jsonl"
    assert not out.exists()
    BENCHMARK["main"](arguments)
    assert os.getcwd() == str(tmp_path)
    text = out.read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    base = "kascade:top_k=9,pool=layer,anchors=1"
    specs = ["dense", base, "kascade:top_k=9,pool=layer,dense_last=16,anchors=1", "oracle_topk:top_k=9,pool=layer"]
    assert [(row["spec"], row["task"]) for row in rows] == [
        (spec, task) for spec in specs for task in ("multikey_2", "single_3")
    ]
    assert all(row["n"] == 2 and row["dense_score"] == rows[0]["score"] for row in rows if row["task"] == "multikey_2")
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
    BENCHMARK["main"](arguments)
    assert out.read_text(encoding="utf-8") == text
    BENCHMARK["main"]([*arguments, "--length", "500"])
    assert len(out.read_text(encoding="utf-8").splitlines()) == 2 * len(rows)
