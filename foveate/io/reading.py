"""Reading data: text, JSON and JSON Lines, plain or .xz, and novels from a folder or a .tar.xz archive.

Every error is a `DataError` that names the file and, for malformed content, the line.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from foveate.errors import DataError
from foveate.io import infile
from foveate.io.json_text import parse_json

_START = re.compile(r"^\*\*\*\s?START OF (?:THE|THIS) PROJECT GUTENBERG EBOOK.*$", re.MULTILINE)
_END = re.compile(r"^\*\*\*\s?END OF (?:THE|THIS) PROJECT GUTENBERG EBOOK.*$", re.MULTILINE)
_KINDS = {str: "text", list: "list", dict: "object", int: "number", bool: "true or false"}

_OF_NOVELS = (".txt", ".txt.xz", ".tar.xz")


class Novel(NamedTuple):
    """One book: its name (the file's stem) and its text, without licence blocks, lines ended by a newline."""

    name: str
    text: str


def read_bytes(path: Path) -> bytes:
    """The content of `path`, decompressed if its name ends in .xz. Raises `DataError`."""
    try:
        raw = infile.read(path)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    return raw if Path(path).suffix != ".xz" else infile.decompressed(path, raw)


def read_text(path: Path) -> str:
    """The text of `path` (UTF-8, plain or .xz), lines ended by a newline. Raises `DataError` with the line."""
    return _decode(read_bytes(path), str(path))


def read_json(path: Path) -> Any:
    """The JSON document in `path` (plain or .xz). Raises `DataError` with file, line and column."""
    try:
        return parse_json(read_text(path))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: malformed JSON, column {error.colno}: {error.msg}") from None


def read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields (line number from 1, value) of a JSON Lines file (plain or .xz); empty lines are passed over.

    Raises `DataError` with file and line.
    """
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield number, parse_json(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{number}: malformed JSON, column {error.colno}: {error.msg}") from None


def subfolder(data: Path, name: str) -> Path:
    """`data/name` if there is such a folder, else `data` itself. Raises `DataError` if that is none."""
    data = Path(data)
    if not data.is_dir():
        raise DataError(f"{data}: no such folder")
    return data / name if (data / name).is_dir() else data


def find_data_file(folder: Path, stem: str, content: str = "", source: str = "") -> Path:
    """`folder/stem`, or the same with .xz.

    Raises `DataError` if neither is there, naming both, what they should hold (`content`) and where it is to be had.
    """
    for path in (folder / stem, folder / f"{stem}.xz"):
        if path.is_file():
            return path
    content = content and f"; it should hold {content}"
    source = source and f"; source: {source}"
    raise DataError(f"{folder / stem}: no such file (nor {stem}.xz){content}{source} (docs/guide/data.md)")


def field(value: Any, name: str, kind: type, where: str) -> Any:
    """`value[name]` of a JSON object, of that kind. Raises `DataError`, beginning with `where`, if it is not there."""
    if not isinstance(value, dict) or not isinstance(value.get(name), kind):
        raise DataError(f"{where}: expected an object with '{name}' ({_KINDS[kind]})")
    return value[name]


def novel_files(data: Path) -> list[Path]:
    """The files that hold the novels of a data folder: .txt, .txt.xz or .tar.xz in `data/books`, else in `data`.

    Raises `DataError` if the folder is missing or holds none.
    """
    data = Path(data)
    if not data.is_dir():
        raise DataError(f"{data}: no such folder")
    for folder in (data / "books", data):
        there = sorted(path for path in folder.glob("[!.]*") if not path.is_dir())
        found = [path for path in there if path.is_file() and path.name.endswith(_OF_NOVELS)]
        if found:
            if folder != data:  # which holds other tasks' files, too
                infile.warn_of_unread(folder, [path.name for path in there if path not in found], _OF_NOVELS)
            return found
    raise DataError(
        f"{data}: no novels found; expected .txt, .txt.xz or .tar.xz files in {data / 'books'}; source: such as "
        "https://www.gutenberg.org (docs/guide/data.md)"
    )


def read_novels(data: Path) -> list[Novel]:
    """All novels of a data folder, sorted by name, Project Gutenberg's header and licence removed.

    Raises `DataError` for a missing folder, a damaged archive, text that is not UTF-8 (with the line), an empty book.
    """
    novels = []
    for path in novel_files(data):
        if path.name.endswith(".tar.xz"):
            novels.extend(_read_archive(path))
        else:
            novels.append(Novel(path.name.removesuffix(".xz").removesuffix(".txt"), read_text(path)))
    novels = [Novel(novel.name, strip_gutenberg(novel.text)) for novel in novels]
    for novel in novels:
        if not novel.text:
            raise DataError(f"{data}: the novel '{novel.name}' is empty")
    return sorted(novels, key=lambda novel: novel.name)


def strip_gutenberg(text: str) -> str:
    """The book alone: what stands between Project Gutenberg's START and END lines; all of it if there are none."""
    start, end = _START.search(text), _END.search(text)
    return text[start.end() if start else 0 : end.start() if end else len(text)].strip()


def _read_archive(path: Path) -> list[Novel]:
    novels, others = [], []
    try:
        with tarfile.open(fileobj=io.BytesIO(read_bytes(path)), mode="r:") as archive:
            for member in archive:
                if not member.isfile() or not member.name.endswith(".txt"):
                    others += [] if member.isdir() else [member.name]
                    continue
                handle = archive.extractfile(member)
                content = handle.read() if handle else b""
                novels.append(Novel(Path(member.name).stem, _decode(content, f"{path}!{member.name}")))
    except (tarfile.TarError, EOFError) as error:
        raise DataError(f"{path}: damaged archive ({error})") from None
    if not novels:
        raise DataError(f"{path}: the archive holds no .txt file")
    infile.warn_of_unread(path, others, (".txt",))
    return novels


def _decode(content: bytes, name: str) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{name}:{line}: not UTF-8 (byte 0x{content[error.start]:02x})") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")
