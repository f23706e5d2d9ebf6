import pytest

from foveate.results.errors import DataError
from foveate.results.rows import ROW_FIELDS, check_row, ordered


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
