"""The table of points and speed of the same run."""

import json

import pytest

from benchmarks import end_to_end_table, tables
from foveate.errors import UserError


@pytest.fixture(scope="module")
def rows():
    path = tables.ROOT / "benchmarks/results/end-to-end.jsonl"
    return [row for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()) if row["batch_size"] == 16]


def cells(rows):
    lines = [line for line in end_to_end_table.table(rows).splitlines() if line.startswith("|")]
    return {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in lines}


def test_a_line_has_points_by_task_and_what_they_cost(rows):
    some = [row for row in rows if row["task"] == "hotpotqa"]
    dense, ours = (next(row for row in some if row["spec"].startswith(name)) for name in ("dense", "kascade:cal"))
    found = cells(some)
    assert found["method"][0] == "hotpotqa dev, n = 128"
    assert found["`dense`"][:2] == [f"{dense['score']:.1f}", f"{dense['decode_ms_per_token']:.2f}"]
    points, token, faster, request, sooner, cache = found["`kascade`"]
    assert points == f"+{ours['diff_to_dense']:.1f} [{ours['diff_low']:.1f}, +{ours['diff_high']:.1f}]"
    assert token == f"{ours['decode_ms_per_token']:.2f}"
    assert faster == f"{dense['decode_ms_per_token'] / ours['decode_ms_per_token']:.2f}×"
    assert (request, sooner) == (
        f"{ours['request_ms'] / 1000:.1f}",
        f"{dense['request_ms'] / ours['request_ms']:.2f}×",
    )
    assert cache == f"{ours['resident_bytes'] / 16e9:.2f} GB"


def test_a_row_whose_steps_were_dense_tells_nothing_of_its_method(rows):
    shares = {("snapkv", None): 1.0, ("pages", "countdown_0.5k"): 0.25}
    dense = [
        row | {"dense_steps": round(row["decode_steps"] * share)}
        for row in rows
        for share in [shares.get((row["method"], None)) or shares.get((row["method"], row["split"])) or 0]
    ]
    found = cells(dense)
    assert found["`snapkv:top_k=0.25`"][:5] == ["dense in 100 % of the steps"] * 5
    assert found["`snapkv:top_k=0.25`"][5:9] == ["–"] * 4
    assert found["`pages`"][3] == "dense in 25 % of the steps"
    assert "–" not in found["`pages`"]


def test_where_dense_attention_answers_nothing_nothing_is_compared(rows):
    some = [row | {"score": 0.0} if row["method"] == "dense" else row for row in rows if row["task"] == "hotpotqa"]
    found = cells(some)
    assert found["`dense`"][0] == "0.0"
    assert found["`kascade`"][0] == "–"
    assert "×" in found["`kascade`"][2]


def test_a_batch_has_no_more_sequences_than_there_are_items(rows):
    some = [row | {"batch_size": 200} for row in rows if row["task"] == "hotpotqa"]
    assert "128 × 30,000 tokens" in end_to_end_table.table(some)
    dense = next(row for row in some if row["method"] == "dense")
    assert cells(some)["`dense`"][-1] == f"{dense['resident_bytes'] / 128e9:.2f} GB"


def test_the_same_items_in_other_batches_have_a_table_of_their_own(rows, tmp_path):
    eight = [row | {"batch_size": 8, "decode_ms_per_token": 1.25} for row in rows]
    (tmp_path / "both.jsonl").write_text("\n".join(map(json.dumps, [*rows, *eight])))
    sixteen, other = tables.marked(["both.jsonl", "end-to-end"], tmp_path).split("\n\nqwen")
    assert "16 × 30,000 tokens" in sixteen
    assert "8 × 30,000 tokens" in other
    assert "| 1.25 |" in other
    assert "| 1.25 |" not in sixteen


def test_a_method_is_named_without_the_file_of_its_calibration(rows):
    spec = 'kascade:top_k=0.2,calibration="shipped:qwen2.5-coder-1.5b-instruct"'
    some = [row | {"spec": spec} if row["method"] == "kascade" else row for row in rows]
    assert "`kascade:top_k=0.2`" in cells(some)


def test_rows_of_other_bounds_and_older_rows_are_refused(rows):
    with pytest.raises(UserError, match="rows of different --dense-below are not compared"):
        end_to_end_table.table([*rows[:-1], rows[-1] | {"dense_below": 0}])
    older = {name: value for name, value in rows[0].items() if name != "request_ms"}
    with pytest.raises(UserError, match="rows without the time of a request"):
        end_to_end_table.table([older])
