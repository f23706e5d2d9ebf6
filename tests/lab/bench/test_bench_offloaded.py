"""`foveate bench decode-model --offload`: rows of what is in host memory, on the device, and of Transformers' own."""

import contextlib
import json

import pytest
import torch
from typer.testing import CliRunner

from foveate.cli import app
from foveate.errors import UserError
from foveate.integrations.transformers import loading
from foveate.lab.bench import offloaded

SMALL = {"contexts": (160,), "batches": (1, 2), "steps": 3, "dtype": "float32", "seed": 0, "device": "cpu"}


def plan(folder, **given):
    how = {"methods": ("pages:top_k=64,page_size=4",), "memory": "", "gpu_budget": "0.5", "prompt_file": ""}
    how["no_baseline"] = False
    return offloaded.Plan(str(folder), **SMALL | how | given)


def test_rows(tiny_folder, monkeypatch):
    monkeypatch.setattr(offloaded, "_FEW", 2)
    rows = offloaded.run(plan(tiny_folder), say=lambda _: None)
    spec = "pages:top_k=64,page_size=4"
    assert [(row["case"]["method"], row["case"]["memory"], row["case"]["batch"]) for row in rows] == [
        (name, where, batch)
        for batch in (1, 2)
        for name, where in ((offloaded.TRANSFORMERS, "host"), (spec, "host"), (spec, "device"))
    ]
    for row in rows:
        assert row["bench"] == "offload"
        assert row["baseline"] == offloaded.TRANSFORMERS
        assert row["case"]["steps"] == (2 if row["case"]["method"] == offloaded.TRANSFORMERS else 3)
        assert row["speedup"] == pytest.approx(row["baseline_ms"] / row["ms"])
        assert row["command"].startswith("foveate bench decode-model --offload --model ")
    host, device = rows[1], rows[2]
    assert host["stats"]["host_bytes"] > 0
    assert 0 < host["stats"]["pages_hot_share"] < 1
    assert host["stats"]["fetched_bytes_per_step"] > 0
    assert host["stats"]["keys_read_per_step"] == device["stats"]["keys_read_per_step"]
    assert (host["case"]["gpu_budget"], device["case"]["gpu_budget"]) == ("0.5", "")
    assert "host_bytes" not in device["stats"]
    lines = offloaded.table(rows).splitlines()
    assert len(lines) == 2 + len(rows)
    assert "host memory" in lines[3]


def test_rows_without_the_baseline(tiny_folder):
    rows = offloaded.run(plan(tiny_folder, batches=(1,), no_baseline=True), say=lambda _: None)
    spec = "pages:top_k=64,page_size=4"
    assert [(row["case"]["method"], row["baseline"]) for row in rows] == [(spec, spec)] * 2
    assert "--no-baseline" in rows[0]["command"]


def test_the_command_writes_a_file(tiny_folder, tmp_path):
    out = tmp_path / "offload.jsonl"
    how = f"--context 96 --steps 2 --dtype float32 --device cpu --out {out} --method pages:top_k=64,page_size=4"
    done = CliRunner().invoke(app, ["bench", "decode-model", "--offload", "--model", str(tiny_folder), *how.split()])
    assert done.exit_code == 0, done.output
    assert len([json.loads(line) for line in out.read_text().splitlines()]) == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"memory": "24GB"}, "memory=24GB is a limit of a GPU's memory, and the device is cpu"),
        ({"gpu_budget": "lots"}, "gpu-budget: gpu_budget must be a size"),
        ({"methods": ("dense",)}, "--offload needs a method that reads pages"),
        ({"methods": ("h2o",)}, "offload=True: .* take pages"),
    ],
)
def test_what_cannot_be_is_refused(tiny_folder, given, message):
    with pytest.raises(UserError, match=message):
        offloaded.run(plan(tiny_folder, **given), say=lambda _: None)


def test_options_without_offload_are_refused():
    done = CliRunner().invoke(app, ["bench", "decode-model", "--memory", "24GB", "--device", "cpu"])
    assert done.exit_code != 0


def test_what_does_not_fit_is_said_and_left_out(tiny_folder, monkeypatch):
    generated, said = offloaded._generated, []

    def fits(plan, model, spec, where, *more):
        if where == "device":
            raise torch.cuda.OutOfMemoryError
        return generated(plan, model, spec, where, *more)

    monkeypatch.setattr(offloaded, "_generated", fits)
    rows = offloaded.run(plan(tiny_folder, batches=(1,)), say=said.append)
    assert [row["case"]["memory"] for row in rows] == ["host", "host"]
    assert any("device memory: does not fit" in line for line in said)


def test_the_baseline_takes_smaller_chunks_and_at_last_no_limit(tiny_folder, monkeypatch):
    generated, said, tried, limits = offloaded._generated, [], [], []

    def needs(plan, model, spec, where, ids, chunk):
        if spec == offloaded.TRANSFORMERS:
            tried.append((chunk, limits[-1]))
            if limits[-1] or chunk != least:
                raise torch.cuda.OutOfMemoryError
        return generated(plan, model, spec, where, ids, chunk)

    monkeypatch.setattr(offloaded, "_generated", needs)
    monkeypatch.setattr(offloaded, "_limited", lambda memory: contextlib.nullcontext(limits.append(memory)))
    monkeypatch.setattr(offloaded.Plan, "check", lambda self: None)
    least = offloaded._CHUNKS[0]
    rows = offloaded.run(plan(tiny_folder, batches=(1,), memory="24GB"), say=said.append)
    assert tried == [*((chunk, "24GB") for chunk in offloaded._CHUNKS), (least, "")]
    assert [row["case"]["limit"] for row in rows] == ["", "24GB", ""]
    assert "without the limit, within which it does not fit" in said[0]
    tried.clear()
    least = offloaded._CHUNKS[-1]
    rows = offloaded.run(plan(tiny_folder, batches=(1,)), say=said.append)
    assert (tried[-1], rows[0]["chunk"], rows[1]["chunk"]) == ((least, ""), least, offloaded._CHUNKS[0])


def test_prompts_of_a_text(tiny_folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Call me Ishmael. " * 60, encoding="utf-8")
    own = plan(tiny_folder, contexts=(50,), prompt_file=str(text))
    ids = own.prompts(None, 2, 50)
    assert ids.shape == (2, 50)
    assert ids.flatten().tolist() == loading.load_tokenizer(tiny_folder)(text.read_text())["input_ids"][:100]
    (row, *_) = offloaded.run(own, say=lambda _: None)
    assert row["case"]["prompts"] == "text.txt"
    assert "--prompt-file text.txt " in row["command"]
    with pytest.raises(UserError, match=r"prompt-file: .* tokens, and prompts need 100,000"):
        plan(tiny_folder, contexts=(50_000,), prompt_file=str(text))._text()


def test_a_budget_that_is_too_small_is_said_and_left_out(tiny_folder):
    said = []
    rows = offloaded.run(plan(tiny_folder, batches=(1,), gpu_budget="1KB"), say=said.append)
    assert [row["case"]["memory"] for row in rows] == ["host", "device"]
    assert any("host memory: does not fit (gpu_budget is 0.0 MB" in line for line in said)


@pytest.mark.parametrize("given", ["--rounds 2", "--liger", "--dense-below 0"])
def test_options_that_offload_does_not_use_are_refused(given):
    done = CliRunner().invoke(app, ["bench", "decode-model", "--offload", "--device", "cpu", *given.split()])
    assert done.exit_code != 0
    assert isinstance(done.exception, UserError) or given.split()[0] in done.output
    assert f"--offload does not go with {given.split()[0]}" in done.output + str(done.exception)
