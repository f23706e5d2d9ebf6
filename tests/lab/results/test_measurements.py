import json
from pathlib import Path

import pytest

from foveate.errors import UserError
from foveate.lab.results import measurements
from tests.helpers import full_disk


def row(method, **more):
    return {**dict.fromkeys(measurements.FIELDS, 1.0), "bench": "decode", "case": {"method": method}, **more}


def test_rows_replace_those_of_the_same_cases(tmp_path):
    out = tmp_path / "new" / "rows.jsonl"
    measurements.check_out(out, "decode")
    assert list(tmp_path.iterdir()) == []
    measurements.write(out, [row("dense"), row("h2o")])
    measurements.check_out(out, "decode")
    measurements.write(out, [row("h2o", ms=2.0), row("luka")])
    found = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert found == [row("dense"), row("h2o", ms=2.0), row("luka")]
    assert list(out.parent.iterdir()) == [out]


def test_a_case_with_a_tuple_is_that_of_the_file_with_a_list(tmp_path):
    out = tmp_path / "rows.jsonl"
    for ms in (1.0, 2.0):
        measurements.write(out, [row("dense", case={"ratios": (4, 128)}, ms=ms)])
    assert [json.loads(line)["ms"] for line in out.read_text(encoding="utf-8").splitlines()] == [2.0]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("a diary", "1: not a results row"),
        ('{"bench": "csa", "case": {}}', "1: holds rows of csa, not of decode"),
        ('{"method": "dense"}', "1: holds rows of a comparison, not of decode"),
        (json.dumps(row("dense")) + '\n{"bench": "decode"}', "2: a row of decode without its 'case'"),
    ],
)
def test_files_of_something_else_are_refused_before_anything_is_measured(tmp_path, content, fault):
    out = tmp_path / "rows.jsonl"
    out.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=f"^{out}:{fault}; name another --out$"):
        measurements.check_out(out, "decode")
    assert out.read_text(encoding="utf-8") == content


def test_devices_are_refused_before_anything_is_measured():
    with pytest.raises(UserError, match="/dev/full: is a device, pipe or socket"):
        measurements.check_out(Path("/dev/full"), "decode")


def test_a_full_disk_keeps_the_older_rows(tmp_path):
    out = tmp_path / "rows.jsonl"
    measurements.write(out, [row("dense")])
    before = out.read_bytes()
    with full_disk(10), pytest.raises(UserError, match=f"^{out}: cannot be written to "):
        measurements.write(out, [row("h2o")])
    assert out.read_bytes() == before
    assert list(tmp_path.iterdir()) == [out]
