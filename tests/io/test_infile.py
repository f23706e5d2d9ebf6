"""Every reader takes regular files alone, bounded, and every output keeps what it was made of."""

import lzma
import os
import signal
import socket
import tarfile
from io import BytesIO
from pathlib import Path

import pytest
from safetensors.torch import save_file
from typer.testing import CliRunner

from foveate import calibration, methods
from foveate.calibration.eviction_scores import EvictionScores
from foveate.cli import app, imports
from foveate.errors import UserError
from foveate.hybrids.training import checkpoints, configuration, journal
from foveate.integrations.transformers import model_folder
from foveate.io import digest, infile, outfile, reading
from foveate.lab.report import rows
from foveate.lab.results import lens, measurements, resultfile


@pytest.fixture(autouse=True)
def no_wait():
    """A reader that waits for a pipe's writer ends after a few seconds, not never."""

    def late(*_):
        raise TimeoutError("it waits")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)


def in_folder(name, read):
    """A reader of one file of a folder: the file is a link to the path."""

    def through(path):
        folder = path.parent / f"of {name}"
        folder.mkdir()
        (folder / name).symlink_to(path)
        return read(folder)

    return through


READERS = {
    "bytes": infile.read,
    "check": infile.check,
    "digest": lambda path: digest.digest([path]),
    "sha256": digest.sha256,
    "text": reading.read_text,
    "json": reading.read_json,
    "jsonl": lambda path: list(reading.read_jsonl(path)),
    "calibration": calibration.load,
    "spec": lambda path: methods.parse(str(path)),
    "method's calibration": lambda path: methods.parse(f"kascade:calibration={path}").for_model(dict),
    "eviction scores": EvictionScores.load,
    "import": imports.run,
    "config": in_folder("config.json", model_folder.read_config),
    "state": in_folder(checkpoints.STATE, checkpoints.read_state),
    "log": in_folder(journal.LOG, journal.read),
    "settings": lambda path: configuration.load(path),
    "rows": rows.read_any,
    "rows so far": lambda path: resultfile.read_rows(path, {}),
    "bench rows": lambda path: measurements.check_out(path, "decode"),
    "lens": lens.read,
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["pipe", "device", "socket"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, monkeypatch, name, kind):
    path = tmp_path / "a.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        monkeypatch.chdir(tmp_path)  # an address has few characters
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises((OSError, ValueError), match="is a device, pipe or socket"):
        READERS[name](path)


def test_reading_is_bounded(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"x" * 100)
    assert infile.read(path, 100) == b"x" * 100
    with pytest.raises(OSError, match="holds more than 99 bytes"):
        infile.read(path, 99)
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a file of holes
    with pytest.raises(ValueError, match=r"holds more than 67,108,864 bytes"):
        calibration.load(path)


@pytest.mark.parametrize("size", [0, 1, 3_000_000])
def test_compressed_files_are_bounded_by_what_they_hold(tmp_path, size):
    content = os.urandom(16) * (size // 16) + b"y" * (size % 16)
    packed = lzma.compress(content)
    for raw in (packed, packed + lzma.compress(b"more"), packed + bytes(8)):
        assert infile.decompressed(tmp_path, raw) == lzma.decompress(raw.rstrip(b"\0") if raw[-8:] == bytes(8) else raw)
    if size:
        with pytest.raises(UserError, match="holds more than"):
            infile.decompressed(tmp_path, packed, size - 1)
    for damaged in (packed[:-1], packed[:-8] + b"12345678", b"no xz", packed + b"no xz"):
        with pytest.raises(UserError, match=r"damaged \.xz file"):
            infile.decompressed(tmp_path, damaged)


def test_names_of_any_bytes_are_read_and_written(tmp_path):
    path = tmp_path / os.fsdecode(b"\xff\xfe.safetensors")
    outfile.write(path, b"content")
    assert infile.read(path) == b"content"
    with infile.plainly_named(path) as name:
        assert Path(name).read_bytes() == b"content"
    save_file({}, tmp_path / "plain", {"foveate.eviction_scores": "[]"})
    os.replace(tmp_path / "plain", path)
    with pytest.raises(ValueError, match=r"not an LTE file .list indices"):
        EvictionScores.load(path)


# Outputs that are inputs


def run(*words):
    done = CliRunner().invoke(app, [str(word) for word in words])
    return done.exit_code, " ".join(done.output.split())


def kept(path, name):
    """What a path is, by another name: itself, a link, a link to a link's folder, or a hard link."""
    if name == "itself":
        return path
    if name == "link":
        (path.parent / "other.html").symlink_to(path)
    elif name == "hard link":
        (path.parent / "other.html").hardlink_to(path)
    else:
        (path.parent / "folder").symlink_to(path.parent)
        return path.parent / "folder" / path.name
    return path.parent / "other.html"


@pytest.mark.parametrize("name", ["itself", "link", "hard link", "linked folder"])
@pytest.mark.parametrize(
    "command",
    [
        ("report", "IN", "--out", "OUT"),
        ("report", "IN", "--csv", "OUT"),
        ("plot", "frontier", "IN", "--out", "OUT"),
        ("plot", "calibration", "IN", "--out", "OUT"),
        ("generate", "--model", "m", "--prompt-file", "IN", "--lens", "OUT"),
        ("generate", "--model", "m", "--prompt", "p", "--method", "kascade:calibration=IN", "--lens", "OUT"),
        ("tune", "--model", "m", "--data", "IN", "--out", "OUT"),
        ("calibrate", "--model", "m", "--data", "IN", "--out", "OUT"),
        ("compare", "--model", "m", "--task", "documents", "--data", "IN", "--out", "OUT"),
        ("compare", "--model", "m", "--task", "niah", "--import", "IN", "--out", "OUT"),
        ("train", "lte", "--model", "m", "--text", "IN", "--out", "OUT"),
        ("bench", "decode-model", "--prompt-file", "IN", "--offload", "--out", "OUT"),
    ],
    ids=" ".join,
)
def test_no_output_is_an_input(tmp_path, command, name):
    path = tmp_path / "in.html"
    path.write_text("# all that there is\n")
    out = str(kept(path, name))
    words = [word.replace("IN", str(path)).replace("OUT", out) for word in command]
    code, said = run(*words)
    assert code == 2
    assert "would be lost; choose another" in said
    assert path.read_text() == "# all that there is\n"


def test_two_outputs_are_two_files(tmp_path):
    code, said = run("report", tmp_path / "rows.jsonl", "--out", tmp_path / "a.html", "--csv", tmp_path / "a.html")
    assert code == 2
    assert "choose another" in said


def test_no_output_is_a_file_of_the_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        code, said = run("calibrate", "--model", tmp_path, "--out", tmp_path / name)
        assert code == 2
        assert "is a file of the model" in said
    assert "is a file of the model" not in run("calibrate", "--model", tmp_path, "--out", tmp_path / "anchors.json")[1]


# What a folder holds and is not read


def test_novels_that_are_none_are_named(tmp_path):
    books = tmp_path / "books"
    books.mkdir()
    for name in ("a.txt", "b.epub", "c.pdf", ".hidden"):
        (books / name).write_text("text")
    with pytest.warns(UserWarning, match=r"books: 2 left out, of none of the kinds \.txt, .*: b\.epub, c\.pdf$"):
        assert [path.name for path in reading.novel_files(tmp_path)] == ["a.txt"]
    packed = BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as archive:
        for name in ("a.txt", "b.pdf"):
            archive.addfile(tarfile.TarInfo(name), BytesIO())
    (tmp_path / "one.tar.xz").write_bytes(packed.getvalue())
    with pytest.warns(UserWarning, match=r"1 left out, .* \.txt: b\.pdf$"):
        reading._read_archive(tmp_path / "one.tar.xz")
