import json

import pytest

from foveate import methods
from foveate.errors import DataError, UserError
from foveate.lab.report.rows import spelled
from foveate.lab.results import resultfile
from foveate.lab.results.rows import ROW_FIELDS
from tests.helpers import full_disk

RUN = {"task": "niah", "length": 512, "limit": 3}


@pytest.fixture
def out(tmp_path):
    return tmp_path / "deep" / "rows.jsonl"


def keep(out, *records, run=RUN):
    with resultfile.PartialFile(out, run) as partial:
        for record in records:
            partial.append(record)


def record(first, **more):
    """What is kept of a batch."""
    stats = dict.fromkeys(("keys_read_per_step", "keys_read_share", "decode_steps", "kv_bytes_per_step"), 1.0)
    return {
        "key": "dense",
        "spec": "dense",
        "first": str(first),
        "values": [{"f1": 1.0}],
        "texts": ["é"],
        "prefill_ms": None,
        "decode_ms_per_token": 2.5,
        "timing": "generate",
        "peak_bytes": 1,
        "peak_kind": "RSS",
        "stats": {**stats, "resident_bytes": 1, "notes": []},
        "commit": "abc",
        **more,
    }


def row(**more):
    texts = ("spec", "model", "task", "split", "timing", "peak_kind", "dtype", "device", "commit", "command")
    objects = ("settings", "architecture", "task_settings", "versions", "metrics")
    lists = {"item_values": {"f1": [1.0]}, "n": 1, "notes": [], "examples": [], "recall": None}
    known = {"method": "dense", **dict.fromkeys(texts, ""), **{name: {} for name in objects}, **lists, "run": RUN}
    return dict.fromkeys(ROW_FIELDS, 0) | known | more


def test_records_survive_and_further_ones_are_added(out):
    assert resultfile.read_partial(out, RUN) == []
    keep(out, record(1), record("é"))
    keep(out, record(3))
    assert resultfile.read_partial(out, RUN) == [record(1), record("é"), record(3)]


@pytest.mark.parametrize("torn", ['{"a": 2', '{"a": 2}', "{", "é"])
def test_a_torn_last_line_is_dropped(out, torn):
    keep(out, record(1))
    with resultfile.partial_path(out).open("ab") as file:
        file.write(torn.encode())
    assert resultfile.read_partial(out, RUN) == [record(1)]
    keep(out, record(3))
    assert resultfile.read_partial(out, RUN) == [record(1), record(3)]


def test_a_torn_header_is_a_fresh_start(out):
    keep(out)
    path = resultfile.partial_path(out)
    header = path.read_bytes()
    for length in (0, 1, len(header) // 2, len(header) - 1):
        path.write_bytes(header[:length])
        assert resultfile.read_partial(out, RUN) == []
        keep(out, record(1))
        assert resultfile.read_partial(out, RUN) == [record(1)]


def test_results_of_another_run_are_left_alone(out):
    keep(out, record(1))
    path = resultfile.partial_path(out)
    before = path.read_bytes()
    other = {**RUN, "length": 1024, "seed": 1}
    with pytest.raises(UserError) as error:
        resultfile.read_partial(out, other)
    assert "length is 512 there, 1024 here; seed is None there, 1 here. Choose another --out" in str(error.value)
    assert "limit" not in str(error.value)
    with pytest.raises(UserError, match=r"another run: length is 512 there, None here\. Choose"):
        resultfile.read_partial(out, {name: value for name, value in RUN.items() if name != "length"})
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
    keep(out, record(1), record(2), record(3))
    path = resultfile.partial_path(out)
    path.write_text(path.read_text().replace('"first": "2"', '"first": "2'))
    with pytest.raises(DataError, match=r"rows\.jsonl\.partial:3: malformed JSON"):
        resultfile.read_partial(out, RUN)


def test_two_writers_exclude_each_other(out):
    with resultfile.PartialFile(out, RUN), pytest.raises(UserError, match="another process is writing"):
        resultfile.PartialFile(out, RUN)
    keep(out)


def test_rows_replace_the_partial_file(out):
    keep(out, record(1))
    resultfile.write_rows(out, [row(), row(method="h2o")], keep_partial=True)
    assert resultfile.partial_path(out).exists()
    resultfile.write_rows(out, [row(), row(method="h2o"), row(method="h2o", settings={"top_k": 9})])
    assert [found["method"] for found in resultfile.read_rows(out, RUN)] == ["dense", "h2o", "h2o"]
    assert list(out.parent.iterdir()) == [out]
    out.write_text(out.read_text().rstrip("\n"))  # an editor's doing; no row is lost
    assert len(resultfile.read_rows(out, RUN)) == 3


@pytest.mark.parametrize("name", ["luka", "luka_paper"])
@pytest.mark.parametrize(
    ("setting", "gone", "allowed"),
    [
        ("score", "box", "summary, spread, lowrank"),
        ("score", "bound", "summary, spread, lowrank"),
        ("bias", "spread", "none, log, entropy"),
        ("compressor", "random", "mean, attention"),
    ],
)
def test_rows_with_a_value_that_is_gone_are_read_as_they_stand(out, name, setting, gone, allowed):
    out.parent.mkdir()
    method = methods.make(name)
    settings = json.loads(json.dumps(methods.settings_of(method) | {setting: gone}))
    mixed = methods.settings_of(methods.make("mixed", clustered=method)) | {"clustered": {"method": name, **settings}}
    rows = [
        row(method=name, spec=f"{name}:{setting}={gone}", settings=settings),
        row(method="mixed", spec=f"mixed:clustered={name}", settings=json.loads(json.dumps(mixed))),
    ]
    resultfile.write_rows(out, rows)
    assert resultfile.read_rows(out, RUN) == rows
    assert [spelled(one) for one in rows] == rows
    assert [resultfile.method_of(one) for one in rows] == [None, None]
    with pytest.raises(ValueError, match=f"{name}: {setting} must be one of {allowed}, not {gone!r}"):
        methods.make(name, **settings)


def test_rows_that_cannot_be_written_leave_the_old_ones(out):
    out.parent.mkdir()
    out.write_text("old")
    with pytest.raises(ValueError, match="JSON compliant"):
        resultfile.write_rows(out, [row(score=float("nan"))])
    assert out.read_text() == "old"
    assert list(out.parent.iterdir()) == [out]


def test_a_folder_is_no_rows_file(tmp_path):
    with pytest.raises(UserError, match="is a folder, not a file"):
        resultfile.read_rows(tmp_path, RUN)


def test_a_full_disk_keeps_the_records_before(out):
    room = 600
    with full_disk(room), resultfile.PartialFile(out, RUN) as partial:
        partial.append(record(1))
    with full_disk(room), pytest.raises(UserError) as error, resultfile.PartialFile(out, RUN) as partial:
        partial.append({"a": "x" * room})
    path = resultfile.partial_path(out)
    kept = "the results before are kept, and the same command goes on from there"
    assert str(error.value) == f"{path}: cannot be written to (File too large); {kept}"
    assert resultfile.read_partial(out, RUN) == [record(1)]
    with full_disk(room), pytest.raises(UserError) as error:
        resultfile.write_rows(out, [row(score="x" * room)])
    assert str(error.value).startswith(f"{out}: cannot be written to (File too large); the results are kept in {path}")
    assert path.exists()
    assert not out.exists()
    keep(out, record(2))
    assert resultfile.read_partial(out, RUN) == [record(1), record(2)]


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        ({"values": None}, "'values' is missing"),
        ({"values": []}, "'values' must be a list of objects of finite numbers, not []"),
        ({"values": [{}]}, "'values' must be a list of objects of finite numbers, not [{}]"),
        ({"values": [{"f1": "x"}]}, "'values' must be a list of objects of finite numbers, not ["),
        ({"values": [{"f1": float("nan")}]}, "'values' must be a list of objects of finite numbers, not ["),
        ({"values": [{"f1": 1.0}] * 2}, "1 'texts' of 2 'values'"),
        ({"values": [{"em": 1.0}]}, "'values' of ['em'], and line 2 has ['f1']"),
        ({"stats": []}, "'stats' must be an object, not []"),
        ({"stats": {"notes": []}}, "'stats' ('keys_read_per_step' is missing)"),
        ({"stats": record(1)["stats"] | {"decode_steps": "x"}}, "'stats': 'decode_steps' must be a finite number"),
        ({"peak_bytes": "x"}, "'peak_bytes' must be a finite number, not \"x\""),
        ({"first": 1}, "'first' must be a text, not 1"),
        ({"first": "1"}, "the batch of item 1 with dense is in line 2, too"),
    ],
)
def test_a_damaged_record_is_named_with_its_line_and_field(out, damage, fault):
    damaged = {name: value for name, value in (record(2) | damage).items() if value is not None or name not in damage}
    keep(out, record(1))
    path = resultfile.partial_path(out)
    path.write_text(path.read_text() + json.dumps(damaged) + "\n")
    before = path.read_bytes()
    for attempt in (resultfile.read_partial, resultfile.PartialFile):
        with pytest.raises(DataError) as error:
            attempt(out, RUN)
        assert str(error.value).startswith(f"{path}:3: ")
        assert fault in str(error.value)
    assert path.read_bytes() == before


def test_a_header_without_a_run_is_named(out):
    keep(out, record(1))
    path = resultfile.partial_path(out)
    path.write_text(path.read_text().replace(json.dumps(RUN), "[1]"))
    with pytest.raises(DataError, match=r"rows\.jsonl\.partial:1: 'run' must be an object"):
        resultfile.read_partial(out, RUN)


def test_statistics_of_null_are_named(out):
    keep(out, record(1))
    path = resultfile.partial_path(out)
    path.write_text(path.read_text() + json.dumps(record(2, stats=None)) + "\n")
    with pytest.raises(DataError, match=r"rows\.jsonl\.partial:3: .*'stats' must be an object, not null"):
        resultfile.read_partial(out, RUN)


@pytest.mark.parametrize(
    ("damaged", "fault"),
    [
        ({name: value for name, value in row().items() if name != "settings"}, "'settings' is missing"),
        (row(settings=None), "'settings' must be an object, not null"),
        (row(score="x"), "'score' must be a finite number, not \"x\""),
        (row(), "the method dense is in line 1, too; leave one of them out"),
        (row(spec="also dense"), "the method also dense is in line 1, too; leave one of them out"),
    ],
)
def test_a_damaged_row_is_named_with_its_line_and_field(out, damaged, fault):
    out.parent.mkdir()
    rows = [row(spec="dense"), damaged | {"spec": damaged["spec"] or "dense"}]
    out.write_text("".join(json.dumps(one) + "\n" for one in rows))
    with pytest.raises(DataError) as error:
        resultfile.read_rows(out, RUN)
    assert str(error.value).startswith(f"{out}:2: ")
    assert fault in str(error.value)
