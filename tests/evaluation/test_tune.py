"""Searching for the cheapest setting that keeps answers."""

import json

import pytest
from evaluation import tiny
from typer.testing import CliRunner

from foveate import methods
from foveate.cli import app
from foveate.evaluation import tasks, tune
from foveate.inputs import loading
from foveate.results.errors import UserError

pytest.importorskip("optuna")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def plan(folder, tmp_path):
    def made(**settings):
        task = tasks.parse("documents", split="tune", length=120, max_new_tokens=4)
        how = {"max_loss": 80.0, "limit": 3, "trials": 6, "objective": "memory", "device": "cpu"} | settings
        return tune.Plan(folder, task, tiny.SAMPLE / "books", tmp_path / "foveate.json", **how)

    return made


def test_the_setting_found_keeps_what_it_may_lose(plan, tmp_path):
    said = []
    found = tune.search(plan(), said.append)
    written = json.loads((tmp_path / "foveate.json").read_text(encoding="utf-8"))
    assert written["method"] == found.spec
    assert written["measured"]["split"] == "test"
    assert found.loss <= 80.0
    rows = {
        split: [json.loads(line) for line in plan().rows(split).read_text(encoding="utf-8").splitlines()]
        for split in ("tune", "test")
    }
    dense = next(row for row in rows["test"] if row["method"] == "dense")
    assert found.cost < dense["resident_bytes"]
    tried = [one for one in rows["tune"] if one["method"] != "dense"]
    assert {row["method"] for row in tried} >= set(tune.EVICTING)
    fitting = [one["resident_bytes"] for one in tried if -one["diff_to_dense"] <= 80.0]
    chosen = next(one for one in tried if one["spec"] == methods.parse(found.spec).spec)
    assert chosen["resident_bytes"] in sorted(fitting)[:3]
    assert methods.make(str(tmp_path / "foveate.json")) == methods.parse(found.spec)


def test_an_interrupted_search_goes_on_where_it_was(plan, monkeypatch):
    loads, load, left = [], loading.load_model, [2]

    def counted(*given):
        loads.append(given)
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return load(*given)

    monkeypatch.setattr(loading, "load_model", counted)
    with pytest.raises(KeyboardInterrupt):
        tune.search(plan())
    done = plan().rows("tune").read_text(encoding="utf-8").splitlines()
    assert len(done) >= 1 + len(tune.EVICTING) + 1, "the first of each method are measured together"
    left[0] = 1000
    again = tune.search(plan())
    rows = plan().rows("tune").read_text(encoding="utf-8").splitlines()
    assert rows[: len(done)] == done, "what was tried before is not tried again"
    left[0] = 0
    assert tune.search(plan()) == again, "a search that was finished loads no model"


def test_no_more_is_tried_than_asked_for(plan):
    said = []
    tune.search(plan(trials=2), said.append)
    assert said[:4] == [
        "together: dense, snapkv:top_k=0.12, adakv:top_k=0.12",
        *(f"{n} of 3 items" for n in (1, 2, 3)),
    ]
    rows = [json.loads(line) for line in plan().rows("tune").read_text(encoding="utf-8").splitlines()]
    assert [row["method"] for row in rows] == ["dense", *list(tune.EVICTING)[:2]]


def test_later_trials_read_prompts_together_too(plan, monkeypatch):
    rows, said = tune._rows, []

    def noted(plan, split, specs, *progress):
        said.append([spec for spec in specs if spec != "dense"])
        return rows(plan, split, specs, *progress)

    monkeypatch.setattr(tune, "_rows", noted)
    tune.search(plan(trials=6, max_loss=100.0), said.append)
    runs = [one for one in said if isinstance(one, list) and len(one) > 1]
    assert [len(run) for run in runs] == [len(tune.EVICTING), 2]
    assert said[said.index(runs[1]) :][1:4] == [f"{n} of 3 items" for n in (1, 2, 3)]


def test_dense_attention_where_nothing_keeps_the_answers(plan, monkeypatch):
    measured = tune._measure
    monkeypatch.setattr(
        tune,
        "_measure",
        lambda *given: tune.dataclasses.replace(measured(*given), loss=0.0 if given[2] == "dense" else 99.0),
    )
    assert tune.search(plan(trials=2)).spec == "dense"


def test_the_first_of_each_method_do_not_end_the_search(plan, monkeypatch):
    measured, asked, said = tune._measure, [], []

    def losing(plan, split, spec):
        asked.append(spec)
        return tune.dataclasses.replace(measured(plan, split, spec), loss=0.0 if spec == "dense" else 99.0)

    monkeypatch.setattr(tune, "_measure", losing)
    monkeypatch.setattr(tune, "_STALE", 2)
    monkeypatch.setattr(tune, "_TOGETHER", 2)
    assert tune.search(plan(trials=9), said.append).spec == "dense"
    assert len([spec for spec in dict.fromkeys(asked) if spec != "dense"]) == len(tune.EVICTING) + 2
    assert "no better setting in 2 trials" in said


def test_a_setting_that_fails_ends_no_search(plan, monkeypatch):
    measured, said = tune._measure, []

    def failing(plan, split, spec):
        if spec.startswith("snapkv"):
            raise UserError("out of luck\nmore")
        return measured(plan, split, spec)

    monkeypatch.setattr(tune, "_measure", failing)
    assert not tune.search(plan(trials=4), said.append).spec.startswith("snapkv")
    assert any(line.endswith(": out of luck") for line in said)


def test_the_cost_is_what_was_asked_for():
    row = {"resident_bytes": 7, "decode_ms_per_token": 6.0, "batch_size": 2, "kv_bytes_per_step": 11}
    assert tune.cost_of(row, "memory") == 7
    assert tune.cost_of(row, "latency") == tune.cost_of(row, "throughput") == 3.0
    assert tune.cost_of(row | {"decode_ms_per_token": None}, "latency") == 11


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "speed"}, "objective"),
        ({"max_loss": -1.0}, "max-loss"),
        ({"minutes": 0.0}, "minutes"),
        ({"objective": "throughput"}, "batch-size"),
        ({"task": tasks.parse("perplexity")}, "no splits tune and test"),
    ],
)
def test_refusals(folder, tmp_path, settings, message):
    given = {"task": tasks.parse("documents"), "data": tmp_path, "out": tmp_path / "x.json"} | settings
    with pytest.raises(UserError, match=message):
        tune.Plan(folder, **given)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a setting of foveate tune"),
        ('{"kind": "other"}', "not a setting of foveate tune"),
        ('{"kind": "foveate_setting", "schema": 9, "method": "dense"}', "schema 9"),
        ('{"kind": "foveate_setting", "schema": 1, "method": "x.json"}', "names another file"),
    ],
)
def test_files_that_are_no_setting(tmp_path, content, message):
    path = tmp_path / "foveate.json"
    with pytest.raises(ValueError, match="no such file"):
        methods.make(str(path))
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        methods.make(str(path))


def test_the_command(folder, tmp_path):
    data, out = tiny.SAMPLE / "books", tmp_path / "foveate.json"
    arguments = ["tune", "--model", folder, "--data", data, "--out", out, "--limit", 3, "--trials", 3, "--max-loss", 50]
    arguments += ["--task", "documents:length=120,max_new_tokens=3", "--objective", "memory"]
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    assert done.exit_code == 0, done.output
    assert "on held-back data" in done.output
    method = ["generate", "--model", folder, "--method", out, "--prompt", "Call me", "--max-new-tokens", 2]
    assert CliRunner().invoke(app, [str(one) for one in method]).exit_code == 0
