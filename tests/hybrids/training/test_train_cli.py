"""`foveate train`: from a folder of text to a model, in one go."""

import json
import os
import re
import signal

import pytest
from typer.testing import CliRunner

from foveate.cli import app
from foveate.hybrids.cli import train
from foveate.hybrids.training import journal


def foveate(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def error_of(result):
    assert result.exit_code == 2
    return " ".join(result.output.split())


def test_twenty_steps_from_text_to_a_model(tmp_path, text_folder, values):
    made = foveate(
        "train", "prepare", "--text", text_folder, "--out", tmp_path / "t", "--vocab-size", 800, "--held-out", 0.1
    )
    assert made.exit_code == 0, made.output
    assert "parts.jsonl: " in made.output
    values |= {"data": {"folder": str(tmp_path / "t")}, "steps": 20}
    values["checkpoints"]["every"] = 10
    (tmp_path / "c.json").write_text(json.dumps(values))
    done = foveate("train", "--config", tmp_path / "c.json", "--out", tmp_path / "run", "--set", "log.every=5")
    assert done.exit_code == 0, done.output
    assert f"the model is in {tmp_path / 'run' / 'model'}" in done.output
    assert re.search(r"step 20 of 20 · loss \d\.\d{4} · [\d,]+ tokens/s", done.output)
    assert re.search(r"step 20 · loss \d\.\d+ · held-out loss \d\.\d+ · [\d,]+ tokens/s", done.output)
    losses = [row["loss"] for row in journal.read(tmp_path / "run") if "loss" in row]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.2
    header = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[0])
    assert {"config", "parameters", "device", "versions", "commit"} <= header.keys()
    again = foveate(
        "train", "--config", tmp_path / "c.json", "--out", tmp_path / "run", "--resume", "--set", "log.every=5"
    )
    assert "is complete; nothing to train" in again.output


@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGTERM])
def test_a_run_ended_by_a_signal_says_so_by_its_exit_code(tmp_path, values, monkeypatch, blow):
    values["log"] = {"every": 1}
    (tmp_path / "c.json").write_text(json.dumps(values))
    run = ("train", "--config", tmp_path / "c.json", "--out", tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr(train._Readings, "__call__", lambda self, step, *_: step == 1 and os.kill(os.getpid(), blow))
        ended = foveate(*run)
    assert ended.exit_code == 128 + blow, ended.output
    assert "stopped after step 2; --resume goes on from there" in ended.output
    stopped = foveate(*run, "--resume", "--minutes", "1e-6")
    assert stopped.exit_code == 0, stopped.output


def test_bad_input_is_one_line(tmp_path, values):
    assert "foveate train needs --config and --out" in error_of(foveate("train"))
    (tmp_path / "c.json").write_text(json.dumps(values))
    run = ("train", "--config", tmp_path / "c.json", "--out", tmp_path / "run")
    assert "unknown setting 'lr'" in error_of(foveate(*run, "--set", "lr=3"))
    assert "--minutes must be above 0, got 0" in error_of(foveate(*run, "--minutes", 0))
    assert "no such file" in error_of(foveate("train", "--config", tmp_path / "d.json", "--out", tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    (tmp_path / "empty").mkdir()
    message = error_of(foveate("train", "prepare", "--text", tmp_path / "empty", "--out", tmp_path / "out"))
    assert "a folder without text" in message


def test_settings_are_listed():
    listed = foveate("train", "settings").output
    assert "optim.lr = 0.0003  # highest learning rate" in listed
    assert "mixture.copies.gap = [300, 3500]  # " in listed


@pytest.mark.parametrize("command", [("train",), ("train", "prepare"), ("train", "settings")])
def test_help(command):
    assert foveate(*command, "--help").exit_code == 0
