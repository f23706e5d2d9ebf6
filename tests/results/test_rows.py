import pytest

from foveate.results.rows import ROW_FIELDS, ordered


def test_rows_have_the_fields_of_the_schema():
    row = dict.fromkeys(reversed(ROW_FIELDS))
    assert list(ordered(row)) == list(ROW_FIELDS)
    with pytest.raises(ValueError, match="scored"):
        ordered({**row, "scored": 1})
    del row["seed"]
    with pytest.raises(ValueError, match="seed"):
        ordered(row)
