"""The commands of benches: what a row's command says is what runs, and help answers without torch."""

import dataclasses
import shlex
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from benchmarks import decode, layer, prefill
from foveate.cli import app
from foveate.errors import UserError
from foveate.lab.bench import decode_model, plan, prefill_model

SHAPE = {"heads": 4, "kv_heads": 2, "head_dim": 16, "layers": 4}
HOW = {"dtype": "float32", "seed": 3, "device": "cpu"}
MODEL = {"contexts": [64], "dtype": "bfloat16", "seed": 0, "device": "cpu"}
QUOTED = ["quest", "luka:page_size=16,top_k=3"]
SIZES = {"batches": [1, 2], "steps": 3, "rounds": 2}
LAYER = "python -m benchmarks.layer"
PLANS = {
    f"{LAYER} prefill": prefill.Plan(["h2o"], [64, 128], repeats=2, **SHAPE, **HOW),
    "foveate bench prefill-model": prefill_model.Plan("qwen3-8b", ["quest"], chunks=[0, 64], repeats=1, **MODEL),
    f"{LAYER} decode": decode.Plan(["quest"], [64], batches=[1, 2], level="layer", **SHAPE, **HOW),
    "foveate bench decode-model": decode_model.Plan(
        "llama-3.1-8b", ["quest", "luka:page_size=16,top_k=3"], liger=True, dense_below="auto", **SIZES, **MODEL
    ),
    "foveate bench decode-model ": decode_model.Plan(
        "llama-3.1-8b", ["luka"], liger=False, dense_below=4096, **SIZES, **MODEL
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_command_of_a_plan_asks_for_it(name, monkeypatch):
    made = []
    monkeypatch.setattr(plan, "measure", lambda bench, run, plan, *more: made.append(plan))
    words = shlex.split(plan.command(name.strip(), PLANS[name]))
    program, words = (app, words[1:]) if words[0] == "foveate" else (layer.app, words[3:])
    done = CliRunner().invoke(program, words)
    assert done.exit_code == 0, done.output
    assert made == [PLANS[name]]


def test_folders_are_shortened_to_their_last_names():
    made = plan.command(
        "foveate bench prefill-model", dataclasses.replace(PLANS["foveate bench prefill-model"], model="/a/of/mine")
    )
    assert made.startswith("foveate bench prefill-model --model mine --method quest ")


@pytest.mark.parametrize(
    "words",
    ["decode-model --context 0", "prefill-model --repeats 0", "prefill-model --chunk -1", "decode-model --seed -1"],
)
def test_numbers_that_are_too_small_are_refused(words):
    done = CliRunner().invoke(app, ["bench", *words.split()])
    assert done.exit_code == 2
    assert "than or equal to" in done.output or "is not in the range" in done.output  # by the release of typer


def test_methods_are_spelled_out_after_dense():
    assert plan.specs(["quest", "dense", "quest:"]) == ["dense", "quest"]
    with pytest.raises(UserError, match="did you mean 'quest'"):
        plan.parsed("qest")


def test_options_are_known_without_torch():
    code = "import sys, foveate.lab.bench.commands; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
