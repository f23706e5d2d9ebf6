"""`benchmarks/hybrid_curves.py` on a tiny model: losses are the log's, shares those of the scores; both are drawn."""

import json
import runpy
import shutil
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

from benchmarks import hybrid_plots, hybrid_tables
from foveate.errors import DataError, UserError
from foveate.hybrids.models import HybridForCausalLM
from foveate.hybrids.training import journal
from foveate.hybrids.training.configuration import parse
from foveate.hybrids.training.loop import train
from foveate.hybrids.training.tokens import TokenStore

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "hybrid_curves.py"
SETTINGS = {
    "steps": 4,
    "model": {"preset": "lalte", "size": "tiny"},
    "batch": {"tokens": 128, "device_tokens": 128, "length": 64, "longer": None},
    "mixture": {"text": {"share": 0.5}, "copies": {"share": 0.5, "gap": [8, 40], "span": [8, 16]}},
    "sparsity": {"budget": 8},
    "log": {"every": 1, "held_out": 128, "answers": 2, "far": 20},
    "run": {"compile": False, "device": "cpu"},
}


@pytest.fixture
def trained(store_folder, tmp_path):
    out = tmp_path / "out"
    run = out / "runs" / "lalte-tiny-0"
    settings = SETTINGS | {"data": {"folder": str(store_folder)}}
    train(parse(settings), run, say=lambda text: None)
    shutil.copytree(run / "model", out / "models" / "lalte-tiny-0")
    return out


def test_rows_and_figures(trained, store_folder, tmp_path, monkeypatch):
    script = runpy.run_path(str(SCRIPT))
    monkeypatch.setitem(script["main"].__globals__, "EVERY", 2)
    monkeypatch.setitem(script["main"].__globals__, "BEGINNING", 3)
    file = tmp_path / "curves.jsonl"
    sizes = ["--length", "64", "--sequences", "3", "--device", "cpu"]
    script["main"](["--out", str(trained), "--text", str(store_folder), "--write", str(file), *sizes])
    (row,) = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    logged = [line["loss"] for line in journal.read(trained / "runs" / "lalte-tiny-0") if "loss" in line]
    assert row["loss"] == pytest.approx([sum(logged[:2]) / 2, sum(logged[2:]) / 2])
    assert row["tokens"] == [256, 512]
    steps = [line for line in journal.read(trained / "runs" / "lalte-tiny-0") if "loss" in line and line["step"] <= 3]
    assert [one["retained_mean"] for one in row["retained_at_first"]] == [line["retained_mean"] for line in steps]
    assert [one["step"] for one in row["retained_at_first"]] == [1, 2, 3]
    assert row["held_out_tokens"][-1] == 512
    assert [one["step"] for one in row["answers"]] == [2, 4]
    assert [one["step"] for one in row["heads"]] == [2, 4]
    found = hybrid_tables.heads([row])
    numbers = [row["answers"][-1]["copies"][where]["n"] for where in ("near", "far")]
    retained = f"{row['heads'][-1]['retained_mean']:.0f}"
    cells = ["lalte-tiny-0", "0M", *(f"0 (n = {number})" for number in numbers), retained, "0", "0", "1e-09"]
    assert f"| {' | '.join(cells)} |" in found

    model = HybridForCausalLM.from_pretrained(trained / "models" / "lalte-tiny-0").eval()
    held_out, window = TokenStore(store_folder).held_out, model.config.lte_window
    places = [int(number) for number in torch.linspace(0, len(held_out) // 64 - 1, 3).tolist()]
    ids = torch.stack([torch.from_numpy(held_out.window(64 * place, 64)) for place in places])
    with torch.no_grad():
        scores = model(input_ids=ids, use_cache=False, output_retention=True).retention
    expected = [(one[:, :, : 63 - window] > 0.5).float().mean((0, 2)).tolist() for one in scores]
    assert row["retention"]["share"] == [pytest.approx(layer) for layer in expected]

    rows = hybrid_plots.read([file])
    hybrid_plots.losses(rows, tmp_path / "losses.png")
    hybrid_plots.retention(rows, tmp_path / "retention.png")
    assert all(imread(tmp_path / f"{name}.png").std() > 0 for name in ("losses", "retention"))
    hybrid_plots.main(file, tmp_path, "some", [row["model"]])
    assert {path.name for path in tmp_path.glob("some-*")} == {"some-losses.png", "some-retention.png"}
    with pytest.raises(UserError, match=f"--model other: .* has .*{row['model']}"):
        hybrid_plots.main(file, tmp_path, "some", ["other"])


def test_no_model_no_rows_no_layers(tmp_path, store_folder):
    script = runpy.run_path(str(SCRIPT))
    with pytest.raises(UserError, match="no run of a training"):
        script["main"](["--out", str(tmp_path), "--text", str(store_folder), "--write", str(tmp_path / "rows.jsonl")])
    (tmp_path / "rows.jsonl").write_text('{"model": "x"}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: not a row of"):
        hybrid_plots.read([tmp_path / "rows.jsonl"])
    with pytest.raises(UserError, match="no row is of a model with lte layers"):
        hybrid_plots.retention([{"retention": None}], tmp_path / "retention.png")
