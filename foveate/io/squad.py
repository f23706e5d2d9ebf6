"""Reading SQuAD's JSON format, versions 1.1 and 2.0: articles, their paragraphs, and the questions on each paragraph.

Errors name the file and the place in it, as in `data[3].paragraphs[0].qas[2]`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from foveate.errors import DataError
from foveate.io import reading

_SOURCE = "https://rajpurkar.github.io/SQuAD-explorer/, such as dev-v2.0.json"
_VERSIONS = {"1.1": "1.1", "v1.1": "1.1", "2.0": "2.0", "v2.0": "2.0"}


class Answer(NamedTuple):
    """An answer, and the character of its paragraph where it begins (not checked by the reader)."""

    text: str
    start: int


class Question(NamedTuple):
    """A question on a paragraph; without answers it is one that the paragraph does not answer (SQuAD 2.0 only)."""

    id: str
    text: str
    answers: tuple[Answer, ...]

    @property
    def is_impossible(self) -> bool:
        return not self.answers

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of the answers, each once."""
        return tuple(dict.fromkeys(answer.text for answer in self.answers))


class Paragraph(NamedTuple):
    text: str
    questions: tuple[Question, ...]


class Article(NamedTuple):
    """An article; titles are Wikipedia's, with underscores for spaces."""

    title: str
    paragraphs: tuple[Paragraph, ...]


class Squad(NamedTuple):
    """A whole file; `version` is "1.1" or "2.0"."""

    version: str
    articles: tuple[Article, ...]


def find_squad(data: Path, name: str = "") -> Path:
    """The SQuAD file of a data folder: `name` (.xz may be left out), else the first .json or .json.xz by name.

    Looks into `data/squad`, if there is one, else into `data`; without a `name`, files with "v2" and "dev" in theirs go
    first. Raises `DataError` if there is none.
    """
    folder = reading.subfolder(data, "squad")
    if name:
        return reading.find_data_file(folder, name, "SQuAD 1.1 or 2.0", _SOURCE)
    found = [path for path in folder.iterdir() if path.is_file() and path.name.endswith((".json", ".json.xz"))]
    if not found:
        place = Path(data) / "squad"
        raise DataError(
            f"{data}: no SQuAD file found; expected .json or .json.xz in {place}; "
            f"source: {_SOURCE} (docs/guide/data.md)"
        )
    return min(found, key=lambda path: (not ("v2" in path.name and "dev" in path.name), path.name))


def read_squad(path: Path) -> Squad:
    """The articles of a SQuAD file, plain or .xz. Raises `DataError`, with the place in the file, for malformed
    content."""
    document = reading.read_json(path)
    if not isinstance(document, dict) or "version" not in document or not isinstance(document.get("data"), list):
        raise DataError(f"{path}: not a SQuAD file: expected an object with 'version' and a list 'data'")
    version = str(document["version"])
    if version not in _VERSIONS:
        raise DataError(f"{path}: unknown SQuAD version '{version}'. Allowed: {', '.join(_VERSIONS)}")
    if not document["data"]:
        raise DataError(f"{path}: no articles")
    articles = (_article(article, f"{path}: data[{number}]") for number, article in enumerate(document["data"]))
    return Squad(_VERSIONS[version], tuple(articles))


def _article(article: Any, where: str) -> Article:
    title, paragraphs = reading.field(article, "title", str, where), reading.field(article, "paragraphs", list, where)
    parts = (_paragraph(part, f"{where}.paragraphs[{number}]") for number, part in enumerate(paragraphs))
    return Article(title, tuple(parts))


def _paragraph(paragraph: Any, where: str) -> Paragraph:
    text, questions = reading.field(paragraph, "context", str, where), reading.field(paragraph, "qas", list, where)
    return Paragraph(text, tuple(_question(part, f"{where}.qas[{number}]") for number, part in enumerate(questions)))


def _question(question: Any, where: str) -> Question:
    answers = reading.field(question, "answers", list, where)
    if "is_impossible" in question and reading.field(question, "is_impossible", bool, where) == bool(answers):
        raise DataError(f"{where}: 'is_impossible' contradicts the {len(answers)} 'answers'")
    name, text = (reading.field(question, field, str, where) for field in ("id", "question"))
    found = []
    for number, answer in enumerate(answers):
        place = f"{where}.answers[{number}]"
        found.append(
            Answer(reading.field(answer, "text", str, place), reading.field(answer, "answer_start", int, place))
        )
    return Question(name, text, tuple(found))
