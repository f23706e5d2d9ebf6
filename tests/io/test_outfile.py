import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from foveate.errors import UserError
from foveate.io import infile, outfile
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


@pytest.mark.parametrize("link", [None, os.symlink, os.link])
def test_an_output_is_no_input_by_whatever_name(tmp_path, link):
    rows, out = tmp_path / "rows.jsonl", tmp_path / ("rows.jsonl" if link is None else "page.html")
    rows.write_text("{}")
    if link is not None:
        link(rows, out)
    (tmp_path / "other.html").write_text("")
    outfile.check_apart(tmp_path / "other.html", [rows])
    with pytest.raises(UserError, match=r"rows\.jsonl is the same file, which would be lost; choose another --out"):
        outfile.check_apart(out, [rows])


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


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_the_mode_is_that_of_any_new_file_or_of_the_one_replaced(tmp_path, mask):
    before = os.umask(mask)
    try:
        outfile.write(tmp_path / "new", b"rows")
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o666 & ~mask
    (tmp_path / "new").chmod(0o640)
    outfile.write(tmp_path / "new", b"others")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640


def test_a_link_stays_one(tmp_path):
    (tmp_path / "link").symlink_to("rows")
    outfile.write(tmp_path / "link", b"rows")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "rows").read_bytes() == b"rows"


def test_what_is_no_file_is_never_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for out in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(UserError, match="is a device, pipe or socket"):
            outfile.write(out, b"rows")
    assert (tmp_path / "pipe").is_fifo()
    assert Path("/dev/null").is_char_device()


def test_many_may_write_to_one_path(tmp_path):
    out, errors = tmp_path / "rows", []
    contents = [bytes([n]) * 100_000 for n in range(4)]

    def write(content):
        try:
            for _ in range(20):
                outfile.write(out, content)
                assert out.read_bytes() in contents
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


WRITES = """
import sys, time
from pathlib import Path
from foveate.io import infile, outfile
with outfile.replacing(Path(sys.argv[1])) as scratch:
    scratch.write_bytes(b"half")
    print("writing", flush=True)
    time.sleep(60)
"""


def test_what_a_killed_process_left_is_removed(tmp_path):
    out = tmp_path / "rows"
    process = subprocess.Popen([sys.executable, "-c", WRITES, str(out)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"writing\n"
    (left,) = tmp_path.iterdir()
    long_ago = time.time() - 1000
    os.utime(left, (long_ago, long_ago))
    outfile.write(out, b"rows")
    assert left.exists(), "it belongs to a process that is there"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    outfile.write(out, b"rows")
    assert list(tmp_path.iterdir()) == [out]


def test_paths_as_users_give_them(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert outfile.named("~/rows") == tmp_path / "rows"
    for odd in (None, 3, "", "a\0b"):
        with pytest.raises(UserError, match="path must be the path of a file, not"):
            outfile.named(odd)
    with pytest.raises(UserError, match="no such file"):
        infile.check(tmp_path / "rows")
    with pytest.raises(UserError, match="is a folder, not a file"):
        infile.check(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="is a device, pipe or socket, not a file"):
        infile.check(tmp_path / "pipe")
    (tmp_path / "secret").write_bytes(b"rows")

    def denied(*args, **kwargs):  # root may read any file
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(UserError, match=r"secret: cannot be read \(Permission denied\)"):
        infile.check(tmp_path / "secret")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.EWOULDBLOCK])
def test_a_file_system_without_locks_can_be_written_to(number, tmp_path, monkeypatch):
    (tmp_path / f".rows.x{outfile._SCRATCH}").mkdir()
    os.utime(tmp_path / f".rows.x{outfile._SCRATCH}", (0, 0))

    def refused(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    outfile.write(tmp_path / "rows", b"rows")
    assert (tmp_path / "rows").read_bytes() == b"rows"
    assert (tmp_path / f".rows.x{outfile._SCRATCH}").exists(), "a process may hold it"


@pytest.mark.parametrize("kind", [FileNotFoundError, BlockingIOError, ConnectionError])
def test_errors_of_the_block_are_its_own(kind, tmp_path):
    (tmp_path / "rows").write_bytes(b"old")
    with pytest.raises(kind, match="another file"), outfile.replacing(tmp_path / "rows"):
        raise kind("another file")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]
