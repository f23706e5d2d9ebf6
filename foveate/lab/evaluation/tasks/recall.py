"""Reading a fact off a passage: SQuAD, DROP, NaturalQuestions, TriviaQA, FDA and SWDE as Arora et al. (2024) ask them.

The prompt is the passage, ". " and the question, raw text without an example or a chat template; the answer has up to
48 tokens and ends with its line. It is right if it contains one of the answers, ignoring case. As in laLTE/laNSA only
inputs beyond `max_length` are cut: to a window of the passage with half of it before the answer's place and the rest
after it. That place is the first occurrence of an answer, and the beginning of the passages of DROP and TriviaQA. FDA
and SWDE are texts to be continued, asked as they stand; their last line, up to 200 characters, is always kept. What
differs from the published evaluation:

- SQuAD's and NaturalQuestions' questions are the data sets' own on their own paragraphs. The published SQuAD rewords
  them as statements to complete, and the published NaturalQuestions has longer passages.
- DROP has the questions whose answer stands in the passage; the others ask to count or to calculate.
- White space before an answer, a line's end among it, does not end the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from foveate.errors import DataError, UserError
from foveate.io import reading
from foveate.io.squad import find_squad, read_squad
from foveate.lab.evaluation.metrics import Mean, string_match_part
from foveate.lab.evaluation.tasks import register
from foveate.lab.evaluation.tasks.base import Item, Output, Task, drawn, some
from foveate.prompting import encode

_TRIVIAQA_MARKS = re.compile(r"\[(?:PAR|DOC|TLE)\]")
_TAIL = 200  # characters at the end of a text to be continued that hold what is asked
_DROP = re.compile(r"Passage: (.*)\nQuestion: (.*)\nAnswer:", re.DOTALL)


class _Record(NamedTuple):
    """A question on a passage; a long passage is kept around the first occurrence of a text in `near`."""

    id: str
    passage: str
    question: str
    answers: tuple[str, ...]
    near: tuple[str, ...] = ()
    continued: bool = False
    """Whether passage and question are one text, which is asked as it stands."""


def _squad(path: Path) -> Iterator[_Record]:
    for article in read_squad(path).articles:
        for paragraph in article.paragraphs:
            for question in paragraph.questions:
                if question.answers:
                    asked = _asked(question.text, f"{path}: question {question.id}")
                    yield _Record(question.id, paragraph.text, asked, question.texts, question.texts)


def _lines(read: Callable[[Any, str], Sequence[Any] | None]) -> Callable[[Path], Iterator[_Record]]:
    """Reads files of lines: `read` gives passage, question, answers and what is near, or None, of an object."""

    def records(path: Path) -> Iterator[_Record]:
        for line, value in reading.read_jsonl(path):
            if found := read(value, f"{path}:{line}"):
                passage, question, *more = found
                yield _Record(f"{line}", passage, _asked(question, f"{path}:{line}"), *more)

    return records


def _drop(value: Any, where: str) -> Sequence[Any] | None:
    match = _DROP.fullmatch(reading.field(value, "context", str, where))
    if match is None:
        raise DataError(f"{where}: expected 'context' to hold a passage, a question and 'Answer:'")
    answers = _answers(reading.field(value, "ref_text", str, where).split("|"), "ref_text", where)
    stands = any(re.search(rf"\b{re.escape(answer)}\b", match[1], re.IGNORECASE) for answer in answers)
    return (*match.groups(), answers) if stands else None


def _nq(value: Any, where: str) -> Sequence[Any]:
    passages = reading.field(value, "ctxs", list, where)
    gold = [one for one in passages if isinstance(one, dict) and one.get("isgold")]
    if not gold:
        raise DataError(f"{where}: expected a passage with 'isgold' in 'ctxs'")
    answers = _answers(reading.field(value, "answers", list, where), "answers", where)
    text = reading.field(gold[0], "text", str, f"{where}: ctxs")
    return text, reading.field(value, "question", str, where), answers, answers


def _triviaqa(value: Any, where: str) -> Sequence[Any]:
    passage, question = (reading.field(value, name, str, where) for name in ("context", "question"))
    answers = _answers(reading.field(value, "answers", list, where), "answers", where)
    return _TRIVIAQA_MARKS.sub("", passage), question, answers


def _continued(value: Any, where: str) -> Sequence[Any]:
    text = _asked(reading.field(value, "text", str, where), where).strip()
    answers = _answers([reading.field(value, "value", str, where)], "value", where)
    end = max(text.rfind("\n"), len(text) - _TAIL, 0)
    return text[:end], text[end:], answers, answers, True


def _asked(question: str, where: str) -> str:
    if not question.strip():
        raise DataError(f"{where}: the question is empty")
    return question


def _answers(texts: Sequence[Any], name: str, where: str) -> tuple[str, ...]:
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise DataError(f"{where}: expected texts, none of them empty, in '{name}'")
    return tuple(dict.fromkeys(text.strip() for text in texts))


class _Set(NamedTuple):
    """A data set: its folder and file, what a line holds, where it is to be had, and how it is read."""

    folder: str
    file: str
    content: str
    source: str
    read: Callable[[Path], Iterator[_Record]]

    def find(self, data: Path) -> Path:
        if not self.file:
            return find_squad(data)
        return reading.find_data_file(reading.subfolder(data, self.folder), self.file, self.content, self.source)


_SETS = {
    "squad": _Set("squad", "", "", "", _squad),
    "drop": _Set(
        "drop",
        "drop_v0_dev.jsonl",
        "an object a line, with the texts 'context' and 'ref_text'",
        "https://openaipublic.blob.core.windows.net/simple-evals/drop_v0_dev.jsonl.gz, unpacked",
        _lines(_drop),
    ),
    "nq": _Set(
        "nq",
        "nq-open-oracle.jsonl",
        "an object a line, with 'question' (text), 'answers' (texts) and 'ctxs' (passages)",
        "https://github.com/nelson-liu/lost-in-the-middle, qa_data/nq-open-oracle.jsonl.gz, unpacked",
        _lines(_nq),
    ),
    "triviaqa": _Set(
        "evaporate",
        "triviaqa.jsonl",
        "an object a line, with 'context', 'question' (texts) and 'answers' (texts)",
        "https://huggingface.co/datasets/hazyresearch/based_triviaqa, its validation split as JSON Lines",
        _lines(_triviaqa),
    ),
} | {
    name: _Set(
        "evaporate",
        f"{name}.jsonl",
        "an object a line, with the texts 'text', which is to be continued, and 'value'",
        f"https://huggingface.co/datasets/hazyresearch/{folder}, its validation split as JSON Lines",
        _lines(_continued),
    )
    for name, folder in {"fda": "based-fda", "swde": "based-swde-v2"}.items()
}


@register
class Recall(Task):
    """A fact that stands in a passage. Score: answers that contain it, percent."""

    name = "recall"
    splits = tuple(_SETS)
    metrics = {"contains": Mean("contains")}
    main = "contains"
    least = {"max_new_tokens": 1}

    max_length: int = 4096  # most tokens of prompt and answer; a longer passage is cut
    max_new_tokens: int = 48  # longest answer (published: 48)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least("max_length", self.max_new_tokens + 1)

    def files(self, data: Path) -> list[Path]:
        return [_SETS[self.split].find(data)]

    def items(self, data: Path, tokenizer: Any, limit: int, seed: int) -> list[Item]:
        (path,) = self.files(data)
        records = list(_SETS[self.split].read(path))
        some(records, "questions that can be asked", path)
        return [self._item(tokenizer, one) for one in drawn(records, limit, f"recall/{self.split}/{seed}")]

    def grade(self, item: Item, output: Output) -> dict[str, float]:
        return {"contains": string_match_part(output.text, item.answers)}

    def _item(self, tokenizer: Any, record: _Record) -> Item:
        passage = _bare(record)
        prompt = _prompt(record, passage)
        ids, room = encode(tokenizer, prompt), self.max_length - self.max_new_tokens
        if len(ids) > room:
            prompt, ids = _cut(tokenizer, record, passage, len(ids), room)
        how = {"max_new_tokens": self.max_new_tokens, "stop": "\n"}
        return Item(record.id, prompt, tuple(ids), record.answers, **how)


def _prompt(record: _Record, passage: str) -> str:
    if record.continued:
        return passage + record.question
    return f"{passage.strip().strip('.')}. {record.question.strip()}"


def _bare(record: _Record) -> str:
    """The passage without the question at its end, which some files have put there."""
    if record.continued:
        return record.passage
    passage, question = record.passage.strip(), record.question.strip().lower()
    while passage.lower().endswith(question):
        passage = passage[: -len(question)].rstrip()
    return passage


def _cut(tokenizer: Any, record: _Record, passage: str, tokens: int, room: int) -> tuple[str, list[int]]:
    """The prompt with a window of the passage, and its ids, `room` at most.

    Raises `UserError` if the question alone is longer.
    """
    spans = tokenizer(passage, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    places = [place for text in record.near if (place := passage.lower().find(text.lower())) >= 0]
    place = min(places, default=0)
    at = sum(end <= place for _, end in spans)
    window = room - (tokens - len(spans))
    while window > 0:
        start = max(0, at - window // 2)
        end = min(len(spans), start + window)
        prompt = _prompt(record, passage[spans[start][0] : spans[end - 1][1]])
        ids = encode(tokenizer, prompt)
        if len(ids) <= room:
            return prompt, ids
        window -= len(ids) - room  # tokens at the ends of a window may differ from the tokens of the whole text
    raise UserError(
        f"task 'recall': question {record.id} leaves no room for its passage within {room:,} tokens of prompt; use a "
        "larger max_length"
    )
