"""Rows as a data frame, and as CSV."""

import csv
import json
from pathlib import Path

import pandas
import pytest

from foveate.errors import DataError, UserError
from foveate.lab.report import frame, to_dataframe

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


@pytest.fixture
def files(tmp_path):
    """Two rows of a comparison, and one of a bench."""
    for name, first in (("luka-niah.jsonl", 2), ("decode.jsonl", 1)):
        lines = (RESULTS / name).read_text(encoding="utf-8").splitlines(keepends=True)[:first]
        (tmp_path / name).write_text("".join(lines), encoding="utf-8")
    return [tmp_path / "luka-niah.jsonl", tmp_path / "decode.jsonl"]


def test_recall_has_a_column_for_each_layer(files):
    lines = list(map(json.loads, files[0].read_text(encoding="utf-8").splitlines()))
    lines[1]["recall"] = {"0": 0.5, "11": 0.75}
    files[0].write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    found = to_dataframe(files[:1])
    assert found["recall.11"].tolist()[1] == 0.75
    assert found["recall.0"].isna().tolist() == [True, False]


def test_a_line_a_row_and_a_column_a_field(files):
    found = to_dataframe(files)
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    assert list(found["file"]) == [str(files[0]), str(files[0]), str(files[1])]
    for (_, line), row in zip(found.iterrows(), rows):
        if "bench" in row:
            assert line["case.context"] == row["case"]["context"]
            assert line["ms"] == row["ms"]
        else:
            assert line["metrics.string_match.low"] == row["metrics"]["string_match"]["low"]
            assert line["item_values.string_match"] == row["item_values"]["string_match"]
            assert line["task_settings.length"] == row["task_settings"]["length"]
        assert line["versions.torch"] == row["versions"]["torch"]
    assert found["score"].isna().tolist() == [False, False, True]


def test_one_path_is_enough(files):
    assert to_dataframe(str(files[0])).equals(to_dataframe(files[:1]))
    assert to_dataframe(files[0]).equals(to_dataframe(files[:1]))


def test_rows_are_not_written_over(files):
    before = files[0].read_bytes()
    with pytest.raises(UserError, match=r"--csv must be a file that ends in \.csv, not"):
        frame.check(files[0])
    assert files[0].read_bytes() == before


def test_csv_is_the_frame_without_its_lists(files, tmp_path):
    frame.write_csv(files, tmp_path / "rows.csv")
    found, whole = pandas.read_csv(tmp_path / "rows.csv"), to_dataframe(files)
    assert len(found) == 3
    gone = set(whole.columns) - set(found.columns)
    assert {"item_values.string_match", "examples", "notes"} <= gone
    assert all(any(isinstance(value, list) for value in whole[name]) for name in gone)
    assert found["score"].tolist()[:2] == whole["score"].tolist()[:2]


def test_other_files_are_refused(files, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"method": 1}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"bad\.jsonl:1"):
        to_dataframe([*files, tmp_path / "bad.jsonl"])
    with pytest.raises(UserError, match="no file of rows is named"):
        frame.write_csv([], tmp_path / "rows.csv")


@pytest.mark.parametrize("begin", ["=", "+", "-", "@", "\t", "\r", "＝"])
def test_no_cell_is_a_formula(files, tmp_path, begin):
    """Of any field, also of names of fields; numbers stay numbers."""
    row = json.loads(files[0].read_text(encoding="utf-8").splitlines()[0])
    text = f"{begin}cmd|'/C calc'!A0"
    row |= {"model": text, "device": text, "more": -1.5, "task_settings": {text: text}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    frame.write_csv([tmp_path / "rows.jsonl"], tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(newline="", encoding="utf-8") as file:
        cells = [cell for line in csv.reader(file) for cell in line]
    assert f"'{text}" in cells
    assert "-1.5" in cells
    assert [cell for cell in cells if cell.startswith(begin) and cell != "-1.5"] == []
