"""Reading questions over several passages, in the forms of HotpotQA, 2WikiMultihopQA and MuSiQue.

Errors name the file and the place in it, as in `[3].context[2]`, or the line.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from foveate.errors import DataError
from foveate.io import reading


class Passage(NamedTuple):
    """A paragraph under its title, which is the first line of `text`; `gold` if the answer rests on it."""

    text: str
    gold: bool


class Record(NamedTuple):
    """A question, its answer with the aliases after it, and the passages to read, none of them twice."""

    id: str
    question: str
    answers: tuple[str, ...]
    passages: tuple[Passage, ...]


def read_records(path: Path) -> list[Record]:
    """The records of a file, plain or .xz: JSON Lines if its name ends so, else one JSON list.

    A record without context, or one that MuSiQue marks as not answerable, has no passages. Raises `DataError`, with the
    place in the file, for malformed content, and for an id that occurs twice.
    """
    records: dict[str, Record] = {}
    for where, value in _values(Path(path)):
        record = _record(value, where)
        if record.id in records:
            raise DataError(f"{where}: the id '{record.id}' stands twice")
        records[record.id] = record
    return list(records.values())


def _values(path: Path) -> Iterator[tuple[str, Any]]:
    """Each record with its place in the file."""
    if path.name.removesuffix(".xz").endswith(".jsonl"):
        return ((f"{path}:{line}", value) for line, value in reading.read_jsonl(path))
    if not isinstance(document := reading.read_json(path), list):
        raise DataError(f"{path}: expected a list of records")
    return ((f"{path}: [{number}]", value) for number, value in enumerate(document))


def _record(value: Any, where: str) -> Record:
    question, answer = (reading.field(value, name, str, where) for name in ("question", "answer"))
    aliases = reading.field(value, "answer_aliases", list, where) if "answer_aliases" in value else []
    if not all(isinstance(alias, str) for alias in aliases):
        raise DataError(f"{where}: expected texts in 'answer_aliases'")
    passages: dict[str, bool] = {}
    for text, gold in _passages(value, where):
        passages[text] = passages.get(text, False) or gold
    return Record(
        id=reading.field(value, "id" if "id" in value else "_id", str, where),
        question=question.strip(),
        answers=tuple(dict.fromkeys([answer, *aliases])),
        passages=tuple(Passage(text, gold) for text, gold in passages.items()),
    )


def _passages(value: Any, where: str) -> Iterator[tuple[str, bool]]:
    """The text of each passage and whether it is gold: MuSiQue has `paragraphs`, the other two have `context`."""
    if "paragraphs" in value and value.get("answerable", True):
        for number, part in enumerate(reading.field(value, "paragraphs", list, where)):
            place = f"{where}.paragraphs[{number}]"
            title, text = (reading.field(part, name, str, place) for name in ("title", "paragraph_text"))
            yield f"{title}\n{text.strip()}", reading.field(part, "is_supporting", bool, place)
    elif "context" in value:
        facts = reading.field(value, "supporting_facts", list, where)
        gold = [fact[0] for fact in facts if isinstance(fact, list) and fact]
        for number, part in enumerate(reading.field(value, "context", list, where)):
            match part:
                case [str(title), [*sentences]] if all(isinstance(sentence, str) for sentence in sentences):
                    yield f"{title}\n{' '.join(map(str.strip, sentences))}", title in gold
                case _:
                    raise DataError(f"{where}.context[{number}]: expected a title and a list of sentences")
