"""A user's own documents: questions with answers, questions alone, or texts to go on with.

Questions with answers are graded. Without answers nothing is right or wrong: `compare` then measures how closely a
method follows dense attention (:class:`~foveate.lab.evaluation.tasks.fidelity.Fidelity`).
"""

from __future__ import annotations

import hashlib
import os
import random
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from foveate.errors import DataError, FoveateWarning, UserError
from foveate.io import infile, reading
from foveate.lab.evaluation import grading
from foveate.lab.evaluation.metrics import Mean
from foveate.lab.evaluation.tasks import register
from foveate.lab.evaluation.tasks.base import Item, Output, Task, question_setting
from foveate.prompting import leading_ids

SYSTEM = "Answer the question on the given document. Give the answer alone, without an explanation."
_TEXTS, _RECORDS = (".txt", ".md"), (".jsonl",)
_KINDS = ", ".join((*_TEXTS, *_RECORDS))


class Document(NamedTuple):
    """A text, or a context with a question."""

    name: str
    text: str
    question: str = ""
    answers: tuple[str, ...] = ()


@register
class Documents(Task):
    """Your own texts (.txt, .md) and records (.jsonl: `context`, and, if you have them, `question` and `answer`).

    A text is cut into windows of `length` tokens, and the model continues the text after each window. A context is read
    whole, with its question. Score: share of the questions whose answer the model gives (`found`), as
    :mod:`foveate.lab.evaluation.grading` decides. The halves `tune` and `test` share no item.
    """

    name = "documents"
    splits = ("all", "tune", "test")
    metrics = {"found": Mean("found"), "f1": Mean("f1")}
    main = "found"
    least = {"length": 16, "max_new_tokens": 1}

    length: int = 4096  # tokens of a text's window
    max_new_tokens: int = 64  # longest answer
    question: str = question_setting()

    def files(self, data: Path) -> list[Path]:
        data = Path(data)
        if data.is_file():
            files = [data]
        elif data.is_dir():
            files, _ = _walk(data)
        else:
            raise DataError(f"{data}: no such file or folder; source: your own texts (docs/guide/data.md)")
        if not files or _kind(files[0]) not in _TEXTS + _RECORDS:
            raise DataError(
                f"{data}: no documents found; expected files of {_KINDS}, plain or .xz; "
                "source: your own (docs/guide/data.md)"
            )
        return files

    def least_positions(self, data: Path) -> int:
        """See :meth:`Task.least_positions`. Records are read whole; only the answer's length is known before."""
        texts = any(_kind(path) in _TEXTS for path in self.files(data))
        return super().least_positions(data) if texts else self.max_new_tokens

    def reads(self, data: Path, out: Path) -> bool:
        return Path(data).is_dir() and _kind(out) in _RECORDS and out.resolve().is_relative_to(Path(data).resolve())

    def needs_dense(self, data: Path) -> bool:
        return not any(document.answers for document in self._documents(data))

    def items(self, data: Path, tokenizer: Any, limit: int, seed: int) -> list[Item]:
        found = [item for item in self._all(data, tokenizer) if self.split in ("all", _half(item))]
        if not found:
            raise UserError(
                f"{data}: all items are in the other half than '{self.split}'; give more documents, or of "
                f"texts a smaller length than {self.length}"
            )
        return random.Random(f"documents/{self.split}/{seed}").sample(found, min(limit, len(found)))

    def grade(self, item: Item, output: Output) -> dict[str, float]:
        found = grading.gives(output.text, item.answers)
        return {"found": float(found), "f1": grading.overlap(output.text, item.answers)}

    def _documents(self, data: Path) -> list[Document]:
        """All documents; a warning names empty files. Raises `DataError` where all are empty, and where some questions
        have answers and others none."""
        files = self.files(data)
        if Path(data).is_dir():
            unread = [path.relative_to(data).as_posix() for path in _walk(Path(data))[1]]
            infile.warn_of_unread(data, unread, _TEXTS + _RECORDS)
        names = {path: path.name if path == Path(data) else path.relative_to(data).as_posix() for path in files}
        read = {path: _read(path, name) for path, name in names.items()}
        if empty := [path for path in files if not read[path]]:
            if len(empty) == len(files):
                raise DataError(f"{empty[0]}: an empty document")
            others = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
            warnings.warn(f"left out as empty: {empty[0]}{others}", FoveateWarning, stacklevel=1)
        found = [one for of_file in read.values() for one in of_file]
        unsure = [(one.name, answer) for one in found for answer in one.answers if grading.undecided(answer)]
        if unsure:
            name, answer = unsure[0]
            others = f", and {len(unsure) - 1} more such answers" if len(unsure) > 1 else ""
            warnings.warn(
                f"{name}: no rule tells for certain whether a text gives the answer {answer!r}, "
                f"{grading.undecided(answer)}{others}: read some of what is said",
                FoveateWarning,
                stacklevel=1,
            )
        asked = [one for one in found if one.question]
        without = [one.name for one in found if not one.answers]
        if without and len(without) < len(found):
            rule = "either every document has a question with an answer, or none has an answer"
            raise DataError(f"{data}: {without[0]} has no answer, but others have; {rule}")
        if asked and len(asked) < len(found):
            alone = next(one.name for one in found if not one.question)
            raise DataError(f"{data}: {alone} has no question, but others have; put them into different folders")
        return found

    def _all(self, data: Path, tokenizer: Any) -> Iterator[Item]:
        for document in self._documents(data):
            if document.question:
                yield self._asked(tokenizer, document)
            else:
                yield from self._windows(tokenizer, document)

    def _asked(self, tokenizer: Any, document: Document) -> Item:
        user = {"role": "user", "content": f"{document.text}\n\n{document.question}"}
        prompt = ({"role": "system", "content": SYSTEM}, user) if document.answers else (user,)
        more = {"answers": document.answers, "meta": {"question": document.question}}
        return self.posed(tokenizer, document.name, prompt, document.question, **more)

    def _windows(self, tokenizer: Any, document: Document) -> Iterator[Item]:
        """Consecutive windows of a text; its last one only if it is half a window, or the only one."""
        if not getattr(tokenizer, "is_fast", True):
            raise UserError(
                "texts are cut into windows by a fast tokenizer, and the model's is none (no tokenizer.json)"
            )
        first = leading_ids(tokenizer)
        coded = tokenizer(document.text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets, size = coded["input_ids"], coded["offset_mapping"], self.length - len(first)
        for start in range(0, len(ids), size):
            window = ids[start : start + size]
            if start and 2 * len(window) < size:
                return
            begin, end = offsets[start][0], offsets[start + len(window) - 1][1]
            name, text = f"{document.name}@{begin}", document.text[begin:end]
            yield Item(name, text, (*first, *window), max_new_tokens=self.max_new_tokens)


def _walk(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files of documents in a folder and its subfolders, and the other ones but hidden ones; both sorted.

    Raises `DataError` for what may not be read.
    """
    documents, others = [], []

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: {error.strerror}; its documents cannot be read") from None

    for place, _, names in os.walk(folder, onerror=refuse):
        for path in map(Path(place).joinpath, names):
            try:
                wanted = _kind(path) in _TEXTS + _RECORDS and path.is_file()
            except OSError as error:
                refuse(error)
            if wanted:
                documents.append(path)
            elif not any(part.startswith(".") for part in path.relative_to(folder).parts):
                others.append(path)
    return sorted(documents), sorted(others)


def _kind(path: Path) -> str:
    return Path(path.name.removesuffix(".xz")).suffix.lower()


def _half(item: Item) -> str:
    """The half of the documents that an item is in, whatever its file is called."""
    return ("tune", "test")[hashlib.sha256(str(item.prompt).encode()).digest()[0] % 2]


def _read(path: Path, name: str) -> Sequence[Document]:
    if _kind(path) in _TEXTS:
        text = reading.strip_gutenberg(reading.read_text(path))
        return [Document(name, text)] if text else []
    return [_record(value, f"{path}:{number}", f"{name}:{number}") for number, value in reading.read_jsonl(path)]


def _record(value: Any, where: str, name: str) -> Document:
    context = reading.field(value, "context", str, where)
    question = value.get("question", "")
    answers = value.get("answer", ())
    answers = (answers,) if isinstance(answers, str) else tuple(answers) if isinstance(answers, list) else answers
    if not context.strip():
        raise DataError(f"{where}: 'context' is empty")
    if not isinstance(question, str) or (answers and not question.strip()):
        raise DataError(f"{where}: 'question' must be text, and an 'answer' needs one")
    if not isinstance(answers, tuple) or not all(isinstance(one, str) and grading.tokens(one) for one in answers):
        raise DataError(f"{where}: 'answer' must be text, or a list of texts, with a word, number or symbol in each")
    return Document(name, context, question.strip(), answers)
