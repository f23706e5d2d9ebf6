"""Documents of a folder of text: plain files, JSON Lines and the `<doc …>` format of wikiextractor, plain or .xz."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from foveate.errors import DataError
from foveate.io import infile, reading

ENDINGS = (".txt", ".txt.xz", ".jsonl", ".jsonl.xz")
_DOC = re.compile(r'<doc id="[^"]*" url="[^"]*" title="(?P<title>[^\n]*)">\n(?P<text>.*?)\n?</doc>', re.DOTALL)


class Document(NamedTuple):
    """One text, and the title by which it can be left out."""

    title: str
    text: str


def text_files(folder: Path) -> list[Path]:
    """The files of text directly in a folder, sorted by name. Raises `DataError` if there are none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    there = sorted(path for path in folder.iterdir() if not path.name.startswith(".") and not path.is_dir())
    files = [path for path in there if path.is_file() and path.name.endswith(ENDINGS)]
    if not files:
        raise DataError(f"{folder}: a folder without text; expected files that end in {', '.join(ENDINGS)}")
    infile.warn_of_unread(folder, [path.name for path in there if path not in files], ENDINGS)
    return files


def documents(path: Path) -> Iterator[Document]:
    """The documents of one file, without empty ones.

    A .jsonl holds an object a line with `text`, and perhaps `title`. A .txt is one document, titled by its name, unless
    it begins with `<doc `: then it is a file of wikiextractor. Raises `DataError` with file and line.
    """
    path = Path(path)
    name = path.name.removesuffix(".xz")
    if name.endswith(".jsonl"):
        found = _of_lines(path)
    else:
        text = reading.read_text(path)
        found = _of_wikiextractor(path, text) if text.startswith("<doc ") else [Document(Path(name).stem, text)]
    for document in found:
        if text := document.text.strip():
            yield Document(document.title, text)


def normalised(title: str) -> str:
    """A title as it is compared: underscores are spaces, case and Unicode's forms do not matter."""
    return " ".join(unicodedata.normalize("NFKC", title).replace("_", " ").casefold().split())


def read_titles(paths: Sequence[Path]) -> frozenset[str]:
    """Normalised titles from files: the titles of the articles of a SQuAD file (.json), or one title a line.

    Raises `DataError` for a file that is missing, malformed or without titles.
    """
    titles: set[str] = set()
    for path in map(Path, paths):
        if path.name.removesuffix(".xz").endswith(".json"):
            articles = reading.field(reading.read_json(path), "data", list, str(path))
            found = [
                reading.field(article, "title", str, f"{path}: data[{number}]")
                for number, article in enumerate(articles)
            ]
        else:
            found = [line for line in reading.read_text(path).split("\n") if line.strip()]
        if not found:
            raise DataError(f"{path}: no titles; expected a SQuAD file or one title a line")
        titles.update(map(normalised, found))
    return frozenset(titles)


def _of_lines(path: Path) -> Iterator[Document]:
    for number, value in reading.read_jsonl(path):
        where = f"{path}:{number}"
        text = reading.field(value, "text", str, where)
        yield Document(reading.field(value, "title", str, where) if "title" in value else "", text)


def _of_wikiextractor(path: Path, text: str) -> Iterator[Document]:
    begun, ended = (len(re.findall(mark, text, re.MULTILINE)) for mark in (r"^<doc id=", r"^</doc>"))
    found = 0
    for match in _DOC.finditer(text):
        found += 1
        yield Document(html.unescape(match["title"]), html.unescape(match["text"]))
    if not begun == ended == found:
        raise DataError(
            f"{path}: {begun:,} lines begin with '<doc id=', {ended:,} with '</doc>', {found:,} fit together"
        )
