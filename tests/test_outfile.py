import os
from pathlib import Path

import pytest

from foveate import outfile
from foveate.results.errors import UserError
from tests.helpers import full_disk


@pytest.mark.parametrize("name", ["rows.jsonl", "new/deep/rows.jsonl"])
def test_a_place_that_can_be_written_to_is_left_as_it_was(tmp_path, name):
    outfile.check(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    outfile.write(tmp_path / name, b"rows")
    outfile.check(tmp_path / name)
    assert (tmp_path / name).read_bytes() == b"rows"


@pytest.mark.parametrize("device", ["/dev/full", "/dev/null", "/dev/zero", "/dev/stdout"])
def test_devices_are_refused(device):
    if Path(device).is_file():  # the tests' output goes to a file
        device = "/dev/null"
    with pytest.raises(UserError, match=f"{device}: is a device, pipe or socket, and --out must name a regular file"):
        outfile.check(Path(device))


def test_pipes_and_folders_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe: is a device, pipe or socket"):
        outfile.check(tmp_path / "pipe")
    with pytest.raises(UserError, match="is a folder, and --out must name a regular file"):
        outfile.check(tmp_path)


@pytest.mark.parametrize("name", ["rows.jsonl", "new/rows.jsonl"])
def test_a_file_is_no_folder(tmp_path, name):
    (tmp_path / "file").write_text("a diary")
    with pytest.raises(UserError, match=f"file/{name}: {tmp_path}/file is no folder; choose another --out"):
        outfile.check(tmp_path / "file" / name)
    with pytest.raises(UserError, match="file is no folder"):
        outfile.check_folder(tmp_path / "file")
    assert outfile.new_folder(tmp_path / "file" / "new") is None


def test_a_folder_of_the_system_is_refused():
    for out in ("/proc/rows.jsonl", "/proc/new/rows.jsonl"):
        with pytest.raises(UserError, match=rf"{out}: cannot be written to \("):
            outfile.check(Path(out))


def test_only_folders_that_are_not_there_are_new(tmp_path):
    assert outfile.new_folder(tmp_path) is None
    assert outfile.new_folder(tmp_path / "new" / "deep") == tmp_path / "new" / "deep"


def test_a_full_disk_is_named_and_leaves_the_old_file(tmp_path):
    out = tmp_path / "rows.jsonl"
    outfile.write(out, b"old")
    with full_disk(100), pytest.raises(UserError, match=rf"^{out}: cannot be written to \(File too large\); kept$"):
        outfile.write(out, b"x" * 101, "; kept")
    assert out.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [out]
