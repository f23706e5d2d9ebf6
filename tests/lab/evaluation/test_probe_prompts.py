"""Prompts for calibrating without data."""

import json
import re

import pytest
from typer.testing import CliRunner

from foveate.calibration import load
from foveate.cli import app
from foveate.errors import UserError
from foveate.lab.evaluation import tasks
from foveate.lab.evaluation.tasks.base import Output
from foveate.lab.evaluation.tasks.probes import TEXT, Probes
from foveate.prompting import encode
from tests import tiny


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.make_tokenizer()


@pytest.mark.parametrize("split", Probes.splits)
def test_the_answer_stands_once_in_the_prompt(split, tokenizer):
    task = tasks.parse("probes", split=split, length=900)
    items = task.items(TEXT, tokenizer, 6, 0)
    assert len({item.prompt for item in items}) == 6
    for item in items:
        assert item.prompt.count(item.answers[0]) == 1
        assert 800 < len(item.prompt_ids) <= 900
        asked = [{"role": "user", "content": item.prompt}]
        assert list(item.prompt_ids) == encode(tokenizer, asked, item.answer_prefix)
        assert task.grade(item, Output(text=f" {item.answers[0]}."))["found"] == 1
        assert task.grade(item, Output(text="no idea"))["found"] == 0
    assert [item.prompt for item in task.items(TEXT, tokenizer, 6, 0)] == [item.prompt for item in items]
    assert task.items(TEXT, tokenizer, 1, 1)[0].prompt != items[0].prompt


def test_a_ledger_is_of_entries_alike(tokenizer):
    """No sentence of the novel, every shelf once, and crates by uuids in some ledgers and by numbers in others."""
    kinds = set()
    for item in tasks.parse("probes", split="ledger", length=900).items(TEXT, tokenizer, 8, 0):
        ledger, question = item.prompt.rsplit("\n\n", 1)
        entries = [entry.strip(".") for entry in ledger.split(". ")]
        found = [re.fullmatch(r"Shelf (\d+) of the (\w+ \w+) holds crate ([\w-]+)", entry) for entry in entries]
        assert all(found)
        shelves = {one.group(1, 2): one[3] for one in found}
        assert len(shelves) == len(entries) > 10
        asked = re.search(r"on shelf (\d+) of the (\w+ \w+)\?", question)
        assert shelves[asked.group(1, 2)] == item.answers[0]
        kinds.add(len(item.answers[0]))
    assert kinds == {7, 36}


def test_a_text_that_is_too_short_is_named(tokenizer, tmp_path):
    (tmp_path / "short.txt").write_text("One sentence. " * 40, encoding="utf-8")
    with pytest.raises(UserError, match="ask for a shorter length"):
        tasks.parse("probes", length=4096).items(tmp_path, tokenizer, 1, 0)


def test_calibrate_needs_a_model_alone(tmp_path):
    model, out = tiny.build(tmp_path / "tiny", positions=700, layers=4), tmp_path / "found.json"
    arguments = ["calibrate", "--model", model, "--out", out, "--limit", 1, "--answer-tokens", 3]
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    assert done.exit_code == 0, done.output
    found = load(out)
    assert len(found.anchors) == 1, "a third of four layers"
    text = json.dumps(found.found)
    assert "--by together" in text
    assert "--task" not in text
    assert f"--length {700 - 64} " in text
    assert "--batch-size 8 " in text
    assert done.output.splitlines()[-1] == f"kascade:calibration={out}"


def test_other_anchors_and_other_ways_to_choose(tmp_path):
    model = tiny.build(tmp_path / "tiny", positions=700, layers=4)
    for more, anchors in ((["--anchors", 2], 2), (["--by", "similarity", "--anchors", 1], 1)):
        out = tmp_path / f"found {anchors}.json"
        arguments = ["calibrate", "--model", model, "--out", out, "--limit", 1, "--length", 560, *more]
        done = CliRunner().invoke(app, [str(one) for one in arguments])
        assert done.exit_code == 0, done.output
        assert len(load(out).anchors) == anchors
    short = tiny.build(tmp_path / "short", positions=300)
    done = CliRunner().invoke(app, ["calibrate", "--model", str(short), "--out", str(tmp_path / "none.json")])
    assert "prompts without data take 512 tokens" in " ".join(done.output.split())


def test_data_goes_with_a_task(tmp_path):
    for more in (["--data", "x"], ["--split", "codes"]):
        done = CliRunner().invoke(app, ["calibrate", "--model", "m", "--out", str(tmp_path / "o"), *more])
        assert done.exit_code == 2
        assert "without one the novel" in done.output.replace("\n", " ")
    done = CliRunner().invoke(app, ["calibrate", "--model", "m", "--out", str(tmp_path / "o"), "--task", "ruler"])
    assert "give their folder as --data" in done.output.replace("\n", " ")


def test_compare_reads_the_novel_that_comes_with_foveate(tmp_path):
    model, out = tiny.build(tmp_path / "m", positions=600), tmp_path / "rows.jsonl"
    how = ["--model", str(model), "--method", "tova", "--limit", "1", "--out", str(out)]
    done = CliRunner().invoke(app, ["compare", "--task", "probes:length=512,max_new_tokens=4", *how])
    assert done.exit_code == 0, done.output
    assert all("--data" not in json.loads(line)["command"] for line in out.read_text(encoding="utf-8").splitlines())
    how[-1] = str(out := tmp_path / "fidelity.jsonl")
    done = CliRunner().invoke(app, ["compare", "--task", "probes:length=512,max_new_tokens=4", "--fidelity", *how])
    assert done.exit_code == 0, done.output
    assert all("--data" not in json.loads(line)["command"] for line in out.read_text(encoding="utf-8").splitlines())
    done = CliRunner().invoke(app, ["compare", "--task", "niah", *how])
    assert done.exit_code == 2
    assert "task 'niah' reads files: give their folder as --data" in " ".join(done.output.split())


def test_the_help_of_compare_names_every_task():
    shown = CliRunner().invoke(app, ["compare", "--help"], env={"COLUMNS": "200"}).output
    assert [name for name in tasks.names() if name not in re.findall(r"\w+", shown)] == []
