"""Questions with their passages from train sets, tokenised: the cloze source learns to answer them.

Each entry has a passage, a prompt and an answer. A prompt is either the question, or the sentence of the passage that
holds the answer, up to the answer: that is how EVAPORATE's tasks ask. Stored as `tokens [N]` and `bounds [entries, 4]`:
an entry's passage, prompt and answer are `tokens[b0:b1]`, `[b1:b2]` and `[b2:b3]`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foveate.errors import DataError
from foveate.io import reading
from foveate.io.multihop import read_records
from foveate.io.squad import read_squad

ASKED = "\n\nQuestion: {question}\nAnswer:"
_SENTENCE = re.compile(r"[.!?]\s")
_LONGEST_SENTENCE = 400  # characters before the answer


def read(paths: Sequence[Path]) -> Iterator[tuple[str, str, str]]:
    """Passage, prompt and answer of each question of SQuAD's or of multi-hop files. Raises `DataError`."""
    for path in map(Path, paths):
        found = False
        for entry in _squad(path) if _is_squad(path) else _multihop(path):
            found = True
            yield entry
        if not found:
            raise DataError(f"{path}: no questions with answers and passages")


def tokenise(entries: Iterator[tuple[str, str, str]], encode: Any) -> dict[str, np.ndarray]:
    """The stored form. `encode` turns a list of texts into lists of token ids."""
    flat = [part for passage, prompt, answer in entries for part in (f"\n\n{passage}", prompt, f" {answer}")]
    coded = encode(flat)
    ends = np.cumsum([0, *map(len, coded)])
    bounds = np.stack([ends[0:-1:3], ends[1::3], ends[2::3], ends[3::3]], axis=1)
    return {"tokens": np.concatenate([np.asarray(ids, np.int64) for ids in coded]), "bounds": bounds.astype(np.int64)}


def _is_squad(path: Path) -> bool:
    if path.name.removesuffix(".xz").endswith(".jsonl"):
        return False
    return isinstance(reading.read_json(path), dict)


def _squad(path: Path) -> Iterator[tuple[str, str, str]]:
    for article in read_squad(path).articles:
        for paragraph in article.paragraphs:
            for question in paragraph.questions:
                if not question.answers:
                    continue
                answer = question.answers[0]
                yield paragraph.text, ASKED.format(question=question.text.strip()), answer.text
                if sentence := _before(paragraph.text, answer.start):
                    yield paragraph.text, f"\n\n{sentence}", answer.text


def _before(text: str, start: int) -> str:
    """The sentence that holds an answer, up to the answer; empty if it begins with the answer, or is very long."""
    begin = max((match.end() for match in _SENTENCE.finditer(text, 0, start)), default=0)
    sentence = text[begin:start].rstrip()
    return sentence if 20 <= len(sentence) <= _LONGEST_SENTENCE and text[start - 1].isspace() else ""


def _multihop(path: Path) -> Iterator[tuple[str, str, str]]:
    for record in read_records(path):
        gold = [passage.text for passage in record.passages if passage.gold]
        if gold:
            yield "\n\n".join(gold), ASKED.format(question=record.question), record.answers[0]
