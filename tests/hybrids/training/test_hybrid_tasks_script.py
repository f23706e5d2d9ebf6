"""`benchmarks/hybrid_tasks.py` on tiny models: it trains, answers, gathers, goes on, and its rows make the table."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from benchmarks import hybrid_task_tables as hybrid_tasks
from foveate.cli import app
from foveate.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
SAMPLE = ROOT / "examples" / "data"
SETTINGS = (
    "model.size=tiny",
    "steps=2",
    "batch.tokens=128",
    "batch.device_tokens=128",
    "batch.length=64",
    "batch.longer=none",
    'mixture={"text": {"share": 1.0}}',
    "log.held_out=0",
    "run.compile=false",
    "run.device=cpu",
)
ASKED = [
    ("ruler:split=niah_single_1,length=300,max_new_tokens=4", 2),
    ("mqar:length=100,pairs=4", 1),
    ("recall:split=squad,max_length=200", 2),
    ("perplexity:length=64,continuation=16", 2),
]


@pytest.fixture
def script(monkeypatch):
    made = runpy.run_path(str(ROOT / "benchmarks" / "hybrid_tasks.py"))
    monkeypatch.setitem(made["main"].__globals__, "questions", lambda limit: ASKED)

    def run(command, check):  # within this process: a new one takes seconds to begin
        assert check
        assert command[:3] == [sys.executable, "-m", "foveate"]
        assert CliRunner().invoke(app, command[3:]).exit_code == 0

    monkeypatch.setitem(made["main"].__globals__, "subprocess", SimpleNamespace(run=run))
    return made


def test_it_trains_answers_and_gathers(script, store_folder, tmp_path):
    out, file = tmp_path / "out", tmp_path / "rows.jsonl"
    places = ["--text", str(store_folder), "--data", str(SAMPLE), "--out", str(out), "--gather", str(file)]
    command = [*places, "--presets", "gdn_attn", "--seeds", "3", "--batch-size", "2", "--set", *SETTINGS]
    script["main"](command)
    text = file.read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    assert str(tmp_path) not in text
    assert {row["model"] for row in rows} == {"gdn_attn-27M-3"}
    assert len(rows) == 3 * len(ASKED)  # dense, tova, uniform
    found = hybrid_tasks.table(rows)
    assert found.count("| gdn_attn-27M | 3 |") == len(ASKED)
    assert found.count("| gdn_attn-27M, `tova:top_k=384,pool=kv_head` | 3 |") == len(ASKED)
    model = (out / "models" / "gdn_attn-27M-3" / "model.safetensors").stat().st_mtime_ns
    script["main"](command)  # nothing is left to do
    assert file.read_text(encoding="utf-8") == text
    assert (out / "models" / "gdn_attn-27M-3" / "model.safetensors").stat().st_mtime_ns == model

    script["main"]([*command, "--label", "again", "--do", "train"])
    assert {path.name for path in (out / "models").iterdir()} == {"gdn_attn-27M-3", "gdn_attn_again-27M-3"}


def test_nothing_to_gather_is_refused(script, tmp_path):
    with pytest.raises(UserError, match="has no rows"):
        script["gather"](tmp_path, tmp_path / "rows.jsonl")
