import json

import pytest

from foveate.evaluation import resultfile
from foveate.evaluation.errors import DataError, UserError
from tests.helpers import full_disk

RUN = {"task": "niah", "length": 512, "limit": 3}


@pytest.fixture
def out(tmp_path):
    return tmp_path / "deep" / "rows.jsonl"


def keep(out, *records, run=RUN):
    with resultfile.PartialFile(out, run) as partial:
        for record in records:
            partial.append(record)


def row(**more):
    return {"method": "dense", "item_values": {}, "run": RUN, **more}


def test_records_survive_and_further_ones_are_added(out):
    assert resultfile.read_partial(out, RUN) == []
    keep(out, {"a": 1}, {"a": "é"})
    keep(out, {"a": 3})
    assert resultfile.read_partial(out, RUN) == [{"a": 1}, {"a": "é"}, {"a": 3}]


@pytest.mark.parametrize("torn", ['{"a": 2', '{"a": 2}', "{", "é"])
def test_a_torn_last_line_is_dropped(out, torn):
    keep(out, {"a": 1})
    with resultfile.partial_path(out).open("ab") as file:
        file.write(torn.encode())
    assert resultfile.read_partial(out, RUN) == [{"a": 1}]
    keep(out, {"a": 3})
    assert resultfile.read_partial(out, RUN) == [{"a": 1}, {"a": 3}]


def test_a_torn_header_is_a_fresh_start(out):
    keep(out)
    path = resultfile.partial_path(out)
    header = path.read_bytes()
    for length in (0, 1, len(header) // 2, len(header) - 1):
        path.write_bytes(header[:length])
        assert resultfile.read_partial(out, RUN) == []
        keep(out, {"a": 1})
        assert resultfile.read_partial(out, RUN) == [{"a": 1}]


def test_results_of_another_run_are_left_alone(out):
    keep(out, {"a": 1})
    path = resultfile.partial_path(out)
    before = path.read_bytes()
    other = {**RUN, "length": 1024, "seed": 1}
    with pytest.raises(UserError) as error:
        resultfile.read_partial(out, other)
    assert "length is 512 there, 1024 here; seed is None there, 1 here. Choose another --out" in str(error.value)
    assert "limit" not in str(error.value)
    out.write_text(json.dumps(row()) + "\n")
    with pytest.raises(UserError, match="length is 512 there, 1024 here"):
        resultfile.read_rows(out, other)
    assert path.read_bytes() == before


def test_files_that_are_not_ours_are_left_alone(out):
    out.parent.mkdir()
    path = resultfile.partial_path(out)
    for content in ('{"a": 1}\n', "a diary without a newline", "a diary\n"):
        path.write_text(content)
        for attempt in (resultfile.read_partial, resultfile.PartialFile):
            with pytest.raises(UserError, match=r"rows\.jsonl\.partial.*choose another --out"):
                attempt(out, RUN)
        assert path.read_text() == content
    for content in ('{"bench": "decode"}\n', "a diary", "[1]\n"):
        out.write_text(content)
        with pytest.raises(UserError, match=r"rows\.jsonl:1.*choose another --out"):
            resultfile.read_rows(out, RUN)


def test_damage_inside_names_the_line(out):
    keep(out, {"a": 1}, {"a": 2}, {"a": 3})
    path = resultfile.partial_path(out)
    path.write_text(path.read_text().replace('{"a": 2}', '{"a": 2'))
    with pytest.raises(DataError, match=r"rows\.jsonl\.partial:3: malformed JSON"):
        resultfile.read_partial(out, RUN)


def test_two_writers_exclude_each_other(out):
    with resultfile.PartialFile(out, RUN), pytest.raises(UserError, match="another process is writing"):
        resultfile.PartialFile(out, RUN)
    keep(out)


def test_rows_replace_the_partial_file(out):
    keep(out, {"a": 1})
    resultfile.write_rows(out, [row(), row(method="h2o")], keep_partial=True)
    assert resultfile.partial_path(out).exists()
    resultfile.write_rows(out, [row(), row(method="h2o")])
    assert [found["method"] for found in resultfile.read_rows(out, RUN)] == ["dense", "h2o"]
    assert list(out.parent.iterdir()) == [out]
    out.write_text(out.read_text().rstrip("\n"))  # an editor's doing; no row is lost
    assert len(resultfile.read_rows(out, RUN)) == 2


def test_rows_that_cannot_be_written_leave_the_old_ones(out):
    out.parent.mkdir()
    out.write_text("old")
    with pytest.raises(ValueError, match="JSON compliant"):
        resultfile.write_rows(out, [row(score=float("nan"))])
    assert out.read_text() == "old"
    assert list(out.parent.iterdir()) == [out]


def test_a_folder_is_no_rows_file(tmp_path):
    with pytest.raises(UserError, match="directory"):
        resultfile.read_rows(tmp_path, RUN)


def test_a_full_disk_keeps_the_records_before(out):
    room = 600
    with full_disk(room), resultfile.PartialFile(out, RUN) as partial:
        partial.append({"a": 1})
    with full_disk(room), pytest.raises(UserError) as error, resultfile.PartialFile(out, RUN) as partial:
        partial.append({"a": "x" * room})
    path = resultfile.partial_path(out)
    kept = "the results before are kept, and the same command goes on from there"
    assert str(error.value) == f"{path}: cannot be written to (File too large); {kept}"
    assert resultfile.read_partial(out, RUN) == [{"a": 1}]
    with full_disk(room), pytest.raises(UserError) as error:
        resultfile.write_rows(out, [row(score="x" * room)])
    assert str(error.value).startswith(f"{out}: cannot be written to (File too large); the results are kept in {path}")
    assert path.exists()
    assert not out.exists()
    keep(out, {"a": 2})
    assert resultfile.read_partial(out, RUN) == [{"a": 1}, {"a": 2}]
