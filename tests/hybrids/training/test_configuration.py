"""Configurations: files, settings over them, and what is refused in which words."""

import json
from pathlib import Path

import pytest

from foveate.errors import UserError
from foveate.hybrids.training import configuration
from foveate.hybrids.training.configuration import BatchSettings, load, parse

ROOT = Path(__file__).resolve().parents[3]


def test_toml_json_and_settings_over_them(tmp_path, values):
    (tmp_path / "a.json").write_text(json.dumps(values))
    toml = "steps = 12\nseed = 3\n" + "".join(
        f"[{name}]\n" + "".join(_toml(key, value) for key, value in table.items())
        for name, table in values.items()
        if isinstance(table, dict)
    )
    (tmp_path / "a.toml").write_text(toml)
    assert load(tmp_path / "a.json") == load(tmp_path / "a.toml") == parse(values)
    changed = load(
        tmp_path / "a.json", ["optim.lr=1e-4", "mixture.text.loss=all", "sparsity.budget=5", "batch.longer=null"]
    )
    assert (changed.optim.lr, changed.mixture["text"].loss, changed.sparsity.budget) == (1e-4, "all", 5)
    assert changed.batch.longer is None
    assert changed.steps == 12


def _toml(key, value):
    if isinstance(value, dict):
        return f"{key} = {{{', '.join(f'{k} = {json.dumps(v)}' for k, v in value.items())}}}\n"
    return f"{key} = {json.dumps(value)}\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("step=3", r"the configuration: unknown setting 'step'. Did you mean 'steps'\?"),
        ("optim.learning_rate=1", "optim: unknown setting 'learning_rate'. .*Allowed: lr, scores, final"),
        ("optim.lr=fast", "optim.lr: expected a number, got 'fast'"),
        ("optim.lr=0", "optim.lr must be above 0, got 0"),
        ("mixture.copies.gap=[9]", r"mixture.copies.gap: expected 2 values, got \[9\]"),
        ("steps=1.5", "steps: expected a whole number, got 1.5"),
        ("steps=true", "steps: expected a whole number, got True"),
        ("steps=0", "steps must be at least 1, got 0"),
        ("run.compile=1", "run.compile: expected true or false, got 1"),
        ("run.device=gpu", "run: unknown device 'gpu'.*Allowed: auto, cpu, cuda"),
        ("mixture.txt.share=1", "mixture: unknown source 'txt'. Did you mean 'text'"),
        ("mixture.text.shares=1", "mixture.text: unknown setting 'shares'. Did you mean 'share'"),
        ("mixture.copies.gap=9", "mixture.copies.gap: expected a list, got 9"),
        ("batch.device_tokens=200", r"batch.tokens must be a multiple of batch.device_tokens \(200\), got 512"),
        ("batch.length=100", "batch.device_tokens must be a multiple of a row's 100 tokens, got 256"),
        ("batch.longer_from=1", "batch.longer_from must be between 0 and 1, got 1"),
        ("model.preset=lalte", "model needs either folder, or preset and size"),
        ("data.prepare.limit=5", "data.prepare does nothing without data.text"),
        ("data=5", "data: expected settings, got 5"),
        ("sparsity.budget=0", "sparsity.budget must be at least 1, got 0"),
        ("sparsity.threshold=0.4", "sparsity: unknown setting 'threshold'"),
        ("steps", "--set steps: expected NAME=VALUE"),
        ("steps.of=3", "--set steps.of=3: steps has no settings of its own"),
    ],
)
def test_refusals_name_the_setting(tmp_path, values, change, message):
    (tmp_path / "a.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=message):
        load(tmp_path / "a.json", [change])


@pytest.mark.parametrize("part", ["model", "data", "mixture"])
def test_what_a_configuration_must_have(values, part):
    del values[part]
    with pytest.raises(UserError, match=rf"the configuration lacks \[{part}\]"):
        parse(values)


def test_bad_files(tmp_path):
    (tmp_path / "a.toml").write_text("steps = \n")
    with pytest.raises(UserError, match=r"a\.toml: malformed TOML"):
        load(tmp_path / "a.toml")
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(UserError, match=r"a\.json: expected settings, got list"):
        load(tmp_path / "a.json")
    with pytest.raises(UserError, match=r"a configuration is a \.toml or \.json file"):
        load(tmp_path / "a.yaml")
    with pytest.raises(UserError, match="no such file"):
        load(tmp_path / "none.toml")


def test_text_is_prepared_by_its_settings(values, text_folder):
    values["data"] |= {"text": str(text_folder), "prepare": {"vocab_size": 400, "limit": 5, "leave_out": ["a", "b"]}}
    plan = parse(values).data.preparation()
    assert (plan.text, plan.limit, plan.leave_out) == (text_folder, 5, (Path("a"), Path("b")))
    values["data"]["prepare"]["vocab"] = 3
    with pytest.raises(UserError, match=r"data\.prepare: unknown setting 'vocab'"):
        parse(values)


def test_phases_share_the_tokens_of_a_step():
    shape = BatchSettings(tokens=4096, device_tokens=1024, length=128, longer=256, longer_from=0.75).shape(100, 2, 1)
    assert shape.accumulate == 2
    assert [tuple(phase) for phase in shape.phases] == [(0, 75, 128, 32), (75, 100, 256, 16)]
    with pytest.raises(UserError, match=r"batch.tokens \(4,096\) must be a multiple of .* times the 3 processes"):
        BatchSettings(tokens=4096, device_tokens=1024, length=128).shape(100, 3, 0)


def test_every_setting_has_help():
    listed = {name: text for name, _, text in configuration.settings()}
    assert {"steps", "optim.lr", "sparsity.up", "mixture.needles.ruler", "model.preset", "data.text"} <= listed.keys()
    assert all(listed.values())


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "hybrids").glob("*.toml")), ids=lambda path: path.name)
def test_example_configurations_are_valid(path):
    config = load(path)
    assert sum(source.share for source in config.mixture.values()) == pytest.approx(1)
    config.batch.shape(config.steps, 1, 0)


def test_there_are_example_configurations():
    assert list((ROOT / "benchmarks" / "hybrids").glob("*.toml"))
