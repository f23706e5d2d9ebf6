"""JSON that nothing can be done with is refused as malformed, wherever it is read."""

import json
import re

import pytest
from safetensors.torch import save_file
from typer.testing import CliRunner

from foveate import calibration, methods
from foveate.calibration.eviction_scores import EvictionScores
from foveate.cli import app
from foveate.hybrids.training import checkpoints, journal
from foveate.integrations.transformers import model_folder
from foveate.io import reading
from foveate.io.json_text import parse_json

BOMBS = {
    "nested": ("[" * 200_000 + "]" * 200_000, "nested too deeply"),
    "digits": ('{"a": ' + "9" * 6000 + "}", "an integer of 6,000 digits"),
    "no float": ("1" + "0" * 310, "an integer of 311 digits"),
    "surrogate": ('{"text": "a\\uDC80b"}', "half of a character"),
}
each_bomb = pytest.mark.parametrize(("text", "fault"), BOMBS.values(), ids=BOMBS)


def test_what_is_json_is_read_as_ever():
    text = '{"a": [1, -2.5e3, "\\ud83d\\ude00é", ' + "9" * 300 + '], "b": {}}'
    assert parse_json(text) == parse_json(text.encode()) == json.loads(text)
    assert parse_json("[[1, 2]]", object_pairs_hook=dict) == [[1, 2]]
    with pytest.raises(json.JSONDecodeError, match="line 1 column 2"):
        parse_json("[")


@each_bomb
@pytest.mark.parametrize("as_bytes", [False, True])
def test_what_cannot_be_held_is_malformed(text, fault, as_bytes):
    with pytest.raises(json.JSONDecodeError, match=fault):
        parse_json(text.encode() if as_bytes else text)


@each_bomb
def test_files_of_it_are_named_in_one_line(tmp_path, text, fault):
    file = tmp_path / "a.json"
    file.write_text(text)
    for read in (reading.read_json, calibration.load, lambda path: next(reading.read_jsonl(path))):
        with pytest.raises(ValueError, match=rf"{re.escape(str(file))}\S* malformed JSON.*{fault}"):
            read(file)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"malformed JSON: {fault}"):
        model_folder.read_config(tmp_path)
    save_file({}, tmp_path / "a.safetensors", {"foveate.eviction_scores": text})
    with pytest.raises(ValueError, match=f"not an LTE file .{fault}"):
        EvictionScores.load(tmp_path / "a.safetensors")
    (tmp_path / checkpoints.STATE).write_text(text)
    with pytest.raises(ValueError, match=f"damaged .{fault}"):
        checkpoints.read_state(tmp_path)
    (tmp_path / journal.LOG).write_text(f'{{"step": 1}}\n{text}\n')
    assert journal.read(tmp_path) == [{"step": 1}]
    for command in (["report"], ["plot", "frontier", "--out", tmp_path / "a.png"]):
        rows = tmp_path / "rows.jsonl"
        rows.write_text(text)
        done = CliRunner().invoke(app, list(map(str, [*command, rows])))
        assert done.exit_code == 2
        assert done.stderr.startswith(f"error: {rows}:1: malformed JSON")


def test_a_spec_of_too_many_digits_names_its_setting():
    with pytest.raises(ValueError, match="h2o: top_k must be an integer of at least 1"):
        methods.parse(f"h2o:top_k={'9' * 6000}")
