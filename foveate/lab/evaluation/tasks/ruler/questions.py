"""RULER's question answering: a question on its own documents among others of the data set (section 3.4).

`squad`: the paragraph of the question, then the other paragraphs of its article, then paragraphs of other articles.
`hotpotqa`: the ten paragraphs that come with the question, then other questions' paragraphs. All are shuffled together.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from foveate.errors import DataError, UserError
from foveate.io import reading
from foveate.io.multihop import read_records
from foveate.io.squad import find_squad, read_squad
from foveate.lab.evaluation.tasks.ruler.draft import Draft, Draw, Kind
from foveate.prompting import encode, question_of

TEMPLATE = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n{context}\n\n"
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "Question: {question}"
)
ANSWER_PREFIX = "Answer:"
_DOCUMENT = "Document {number}:\n{text}"
_TRIES = 1000  # documents tried for the room that is left by those taken


class Question(NamedTuple):
    """A question, its answers, its own documents and those to be added first, as indices."""

    text: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Questions(Kind):
    """Questions on documents; `dataset` is squad or hotpotqa."""

    new_tokens = 32

    dataset: str

    def files(self, data: Path) -> list[Path]:
        return [find_squad(data) if self.dataset == "squad" else find_hotpotqa(data)]

    def drawer(self, data: Path, tokenizer: Any, length: int, seed: int) -> Draw:
        (path,) = self.files(data)
        questions, documents = (read_squad_questions if self.dataset == "squad" else read_hotpotqa)(path)
        stop = len(tokenizer.encode(".", add_special_tokens=False))
        order = random.Random(f"ruler/{self.dataset}/{seed}").sample(questions, len(questions))

        @functools.cache
        def tokens(document: int) -> int:  # with its heading and the break before it, after the end of a sentence
            text = f".\n\n{_DOCUMENT.format(number=100, text=documents[document])}"
            return len(tokenizer.encode(text, add_special_tokens=False)) - stop

        if (most := _total(map(tokens, range(len(documents))), length)) < length:
            raise UserError(f"{path}: documents of {most:,} tokens in all; a length of {length:,} needs more")

        def draw(rng: random.Random, index: int) -> Draft | None:
            if index >= len(order):
                return None
            question = order[index]
            empty = ({"role": "user", "content": TEMPLATE.format(context="", question=question.text)},)
            room = length - len(encode(tokenizer, empty, ANSWER_PREFIX))
            chosen = _choose(question, len(documents), tokens, room, rng)
            places = {document: rng.random() for document in chosen}
            totals = list(itertools.accumulate(map(tokens, chosen)))

            def text(size: int) -> str:
                taken = chosen[: bisect.bisect_right(totals, size)]
                numbered = (
                    _DOCUMENT.format(number=number, text=documents[document])
                    for number, document in enumerate(sorted(taken, key=places.__getitem__), start=1)
                )
                return TEMPLATE.format(context="\n\n".join(numbered), question=question.text)

            return Draft(
                text=text,
                sizes=totals[len(question.documents) - 1 :],
                step=1.0,  # the size is the number of tokens, roughly
                answer_prefix=ANSWER_PREFIX,
                answers=question.answers,
                question=question_of(TEMPLATE, question=question.text),
                least=f"the question '{question.text}' and its documents",
            )

        return draw


def find_hotpotqa(data: Path) -> Path:
    """The HotpotQA file of a data folder: the first by name, those with "train" in theirs last.

    Looks into `data/multihop`, if there is one, else into `data`, for .json or .jsonl, plain or .xz, with "hotpot" in
    the name. Raises `DataError` if there is none.
    """
    folder = reading.subfolder(data, "multihop")
    endings = (".json", ".jsonl", ".json.xz", ".jsonl.xz")
    found = [path for path in folder.iterdir() if "hotpot" in path.name.lower() and path.name.endswith(endings)]
    if not found:
        raise DataError(
            f"{folder}: no HotpotQA file found; expected .json or .jsonl, plain or .xz, with 'hotpot' in its name, "
            "such as hotpot_dev_distractor_v1.json; source: https://hotpotqa.github.io (docs/guide/data.md)"
        )
    return min(found, key=lambda path: ("train" in path.name, path.name))


def read_squad_questions(path: Path) -> tuple[list[Question], list[str]]:
    """The answerable questions of a SQuAD file and the texts of all its paragraphs. Raises `DataError`."""
    articles = read_squad(path).articles
    documents = _Documents()
    questions = []
    for article in articles:
        own = [documents.number(paragraph.text) for paragraph in article.paragraphs]
        for number, paragraph in zip(own, article.paragraphs):
            near = tuple(dict.fromkeys(other for other in own if other != number))
            asked = [question for question in paragraph.questions if question.answers]
            questions += [Question(question.text, question.texts, (number,), near) for question in asked]
    return questions, list(documents)


def read_hotpotqa(path: Path) -> tuple[list[Question], list[str]]:
    """The questions of a HotpotQA file (distractor setting) and the texts of all its paragraphs, each under its title.

    Raises `DataError`, with the place in the file, for malformed content, and for a question without paragraphs.
    """
    documents = _Documents()
    questions = []
    for record in read_records(path):
        if not record.passages:
            raise DataError(f"{path}: question {record.id} comes without paragraphs; the distractor setting has them")
        own = tuple(documents.number(passage.text) for passage in record.passages)
        questions.append(Question(record.question, record.answers, own))
    return questions, list(documents)


class _Documents(dict[str, int]):
    """Different texts, numbered in their order."""

    def number(self, text: str) -> int:
        return self.setdefault(text, len(self))


def _total(sizes: Iterable[int], enough: int) -> int:
    """The sum of the sizes, or of the first that are enough."""
    total = 0
    for size in sizes:
        total += size
        if total >= enough:
            break
    return total


def _choose(question: Question, count: int, tokens: Callable[[int], int], room: int, rng: random.Random) -> list[int]:
    """The question's own documents, then near and then far documents in random order, while they fit into `room`.

    When a document does not fit, some of the following ones are tried, to fill the room better.
    """
    chosen = list(question.documents)
    room -= sum(map(tokens, chosen))
    near = rng.sample(question.near, len(question.near))
    taken = {*chosen, *near}
    far = (other for other in rng.sample(range(count), count) if other not in taken)
    tries = _TRIES
    for document in (*near, *far):
        if tokens(document) <= room:
            chosen.append(document)
            room -= tokens(document)
        elif not (tries := tries - 1):
            break
    return chosen
