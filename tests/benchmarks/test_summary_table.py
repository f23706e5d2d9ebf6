"""One table over several comparisons."""

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.summary_table import summary
from foveate.lab.report import pooled

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "luka-niah.jsonl"
H2O = "h2o:top_k=0.1,window=64"


@pytest.fixture(scope="module")
def rows():
    found = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    found = [row for row in found if row["model"] == found[0]["model"] and row["length"] < 20000]
    in_both = Counter(row["spec"] for row in found)
    found = [row for row in found if in_both[row["spec"]] == 2]
    return sorted(found, key=lambda row: row["length"])


def test_a_line_a_method_and_a_column_a_comparison(rows):
    lines = summary(rows).splitlines()
    n = sum(row["n"] for row in rows if row["method"] == "dense")
    assert lines[2].startswith(
        "| method | keys read | niah single 8K | niah single 16K | Δ to dense [95 %], pooled, n = " + str(n)
    )
    specs = list(dict.fromkeys(row["spec"] for row in rows))
    assert [line.split("`")[1] for line in lines[4:]] == specs
    for line in lines[4:]:
        scores = [f"{row['score']:.1f}" for row in rows if row["spec"] == line.split("`")[1]]
        assert line.split(" | ")[2:4] == scores
    for order in (rows, rows[::-1]):
        for line in summary(order).splitlines()[4:]:
            read = sorted(100 * row["keys_read_share"] for row in rows if row["spec"] == line.split("`")[1])
            assert line.split(" | ")[1] == f"{read[0]:.1f}–{read[-1]:.1f} %"


def test_the_pooled_difference_is_the_mean_over_all_items_paired(rows):
    dense = [row for row in rows if row["method"] == "dense"]
    for spec in ("tova:top_k=0.1", H2O):
        ours = [row for row in rows if row["spec"] == spec]
        found = pooled.difference(ours, dense)
        items = [value for row in ours for value in row["item_values"]["string_match"]]
        theirs = [value for row in dense for value in row["item_values"]["string_match"]]
        assert found.value == pytest.approx(100 * (sum(items) - sum(theirs)) / len(items))
        assert found.low <= found.value <= found.high
    same = pooled.difference(dense, dense)
    assert (same.value, same.low, same.high) == (0, 0, 0)


def test_methods_that_a_comparison_lacks_are_left_out_and_dense_is_needed(rows):
    some = [row for row in rows if row["spec"] != H2O or row["length"] == 8192]
    assert f"`{H2O}`" not in summary(some)
    assert f"`{H2O}`" in summary([row for row in rows if row["length"] == 8192])
    with pytest.raises(ValueError, match="no row of dense in niah single 8K"):
        summary([row for row in rows if row["method"] != "dense"])


def test_comparisons_of_other_items_are_columns_of_their_own(rows):
    short = [row for row in rows if row["length"] == 8192 and row["spec"] in ("dense", H2O)]
    fewer = [{**row, "n": 3, "run": {**row["run"], "items": "other"}} for row in short]
    fewer = [{**row, "item_values": {key: values[:3] for key, values in row["item_values"].items()}} for row in fewer]
    assert summary(short + fewer).splitlines()[2].count("niah single 8K") == 2
    perplexities = [{**row, "metrics": {"inverse_perplexity": row["metrics"]["string_match"]}} for row in short]
    with pytest.raises(ValueError, match="no pooled difference"):
        summary(perplexities)


def test_what_was_measured_otherwise_is_not_mixed(rows):
    """Number formats have tables of their own, seeds columns; commits are named, and what differs is refused."""
    short = [row for row in rows if row["length"] == 8192 and row["spec"] in ("dense", H2O)]
    halves = [{**row, "dtype": "float16", "score": 1.0} for row in short]
    assert summary([*short, *halves]) == f"{summary(short)}\n\n{summary(halves)}"
    assert f"{short[0]['model']}, float16, scores" in summary(halves)
    seeds = [{**row, "seed": 7} for row in short]
    head = summary([*short, *seeds]).splitlines()[2]
    assert "| niah single 8K, seed 0 | niah single 8K, seed 7 |" in head
    later = [{**row, "commit": "0123456"} for row in short]
    assert f"commit {short[0]['commit']}, 0123456):" in summary([*short, *later])
    others = [{**row, "keys_read_share": 0.5} for row in later]
    with pytest.raises(
        ValueError, match=f"two rows of dense in niah single 8K that differ, of commit {short[0]['commit']} and 0123456"
    ):
        summary([*short, *others])
