import pytest

from foveate.errors import DataError
from foveate.lab.results.rows import ROW_FIELDS, check_row, ordered


def test_rows_have_the_fields_of_the_schema():
    row = dict.fromkeys(reversed(ROW_FIELDS))
    assert list(ordered(row)) == list(ROW_FIELDS)
    with pytest.raises(ValueError, match="scored"):
        ordered({**row, "scored": 1})
    del row["seed"]
    with pytest.raises(ValueError, match="seed"):
        ordered(row)


def test_a_score_that_its_items_contradict_is_refused():
    row = {"score": 75.0, "n": 4, "metrics": {"f1": {"value": 75.0, "low": 0.0, "high": 100.0}}}
    needed = ("score", "metrics", "item_values")
    check_row(row | {"item_values": {"f1": [1, 1, 0.5, 0.5], "em": [0, 0, 0, 0]}}, needed, "rows.jsonl:1")
    check_row(row | {"item_values": {"nll": [9, 9, 9, 9]}}, needed, "rows.jsonl:1")  # a perplexity averages nothing
    with pytest.raises(DataError, match=r"^rows.jsonl:1: 'score' is 75.0, and 'item_values' of 'f1' average 50$"):
        check_row(row | {"item_values": {"f1": [1, 1, 0, 0]}}, needed, "rows.jsonl:1")


@pytest.mark.parametrize(
    ("value", "low", "high"), [("score", "low", "high"), ("diff_to_dense", "diff_low", "diff_high")]
)
@pytest.mark.parametrize(("at", "inside"), [(59.9, False), (60.0, True), (75.0, True), (80.0, True), (80.1, False)])
def test_a_value_outside_its_interval_is_refused(value, low, high, at, inside):
    row = {value: at, low: 60.0, high: 80.0, "n": 1, "item_values": {"nll": [9]}}
    if inside:
        check_row(row, row.keys(), "rows.jsonl:1")
        return
    with pytest.raises(DataError, match=rf"^rows.jsonl:1: '{value}' is {at}, outside its interval of 60.0 to 80.0$"):
        check_row(row, row.keys(), "rows.jsonl:1")
