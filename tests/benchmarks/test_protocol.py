"""Rows of different protocols are not put side by side."""

import json

import pytest

from benchmarks import protocol, tables
from foveate.errors import UserError


@pytest.fixture(scope="module")
def rows():
    lines = (tables.ROOT / "benchmarks/results/end-to-end.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if (row["task"], row["batch_size"]) == ("hotpotqa", 16)]


def changed(row, path, value):
    first, *more = path
    return row | {first: changed(row[first], more, value) if more else value}


def test_rows_of_one_protocol_stay_as_they_are(rows):
    assert protocol.checked(rows) == rows


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("run", "weights"), "0123", "weights"),
        (("dtype",), "float16", "number format"),
        (("run", "data"), "0123", "data"),
        (("versions", "torch"), "2.10.0", "PyTorch"),
        (("versions", "transformers"), "5.18.0", "Transformers"),
        (("dense_below",), 0, "dense_below"),
    ],
)
def test_a_row_of_another_protocol_is_refused(rows, path, value, words, tmp_path):
    mixed = [*rows[:-1], changed(rows[-1], path, value)]
    with pytest.raises(UserError, match=f"rows of different .*{words}.* are not put side by side"):
        protocol.checked(mixed)
    (tmp_path / "mixed.jsonl").write_text("\n".join(map(json.dumps, mixed)))
    with pytest.raises(UserError, match="are not put side by side"):  # so `make tables` fails
        tables.marked(["mixed.jsonl", "differences"], tmp_path)


def test_another_device_than_that_of_dense_attention_is_named(rows):
    found = protocol.checked([*rows[:-1], changed(rows[-1], ("device",), "NVIDIA H100 80GB HBM3")])
    assert [row["spec"] for row in found] == [*(row["spec"] for row in rows[:-1]), f"{rows[-1]['spec']} on H100"]


def test_other_items_are_another_comparison(rows):
    other = [changed(changed(row, ("run", "items"), "0123"), ("dtype",), "float16") for row in rows]
    assert protocol.checked([*rows, *other]) == [*rows, *other]
