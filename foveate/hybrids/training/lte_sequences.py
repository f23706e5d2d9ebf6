"""Sequences that a frozen model reads so that its attention shows what tokens are worth: a document, then questions.

Documents are stretches of the user's text with made-up facts set between its sentences: codes under one to eight keys
(numbers, words, uuids), and pairs of facts that only together answer a question. Questions with their answers come in
random order, and repeats of stretches of the document stand between them, so that any token may be asked for. Half of
the sequences are a conversation in the model's chat template, if it has one. Keys and names are made of words of the
text, and no wording is an evaluation task's wording.
"""

from __future__ import annotations

import dataclasses
import random
import re
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from foveate.errors import UserError, require
from foveate.hybrids.training.haystack import Library, insert, sentence_starts
from foveate.io import reading
from foveate.prompting import leading_ids

_CODES = (
    ("The {kind} that belongs to {key} is {value}.", "Which {kind} belongs to {key}?", "{value}"),
    ("Remember that the {kind} of {key} reads {value}.", "What does the {kind} of {key} read?", "It reads {value}."),
    ("{key} was registered under the {kind} {value}.", "Give the {kind} under which {key} was registered.", "{value}"),
    ("Note: {key} = {value}.", "What was noted for {key}?", "{key} = {value}"),
    ("On the label of {key} someone had written {value}.", "What was written on the label of {key}?", "{value}"),
    ("To open {key}, enter {value}.", "What has to be entered to open {key}?", "Enter {value}."),
)
_PAIRS = (
    ("{a} is employed by {b}.", "The head office of {b} is in {c}.", "Where is the head office of {a}'s employer?"),
    ("The teacher of {a} was {b}.", "{b} was born in {c}.", "Where was the teacher of {a} born?"),
    ("{a} keeps a key to {b}.", "In {b} there is a {c}.", "What is there in the place that {a} has a key to?"),
)
_REPEATS = (
    'Repeat what follows the words "{begin}".',
    'How does the passage that begins "{begin}" go on?',
    'Quote the text after "{begin}".',
)
_WORD = re.compile(r"\b[a-z]{4,9}\b")
_SHARE = 0.25
"""Most tokens after the document, as a share of the sequence."""
_SHORTEST = 256


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Token ids, and where the document begins and ends among them."""

    ids: tuple[int, ...]
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class _Turn:
    question: str
    answer: str


class Sequences:
    """Sequences by their number, each a function of the text, the seed and the number alone.

    Args:
        folder: plain text, as :func:`foveate.io.reading.read_novels` reads it.
        tokenizer: of the model.
        length: most tokens of a sequence.
        seed: of the random draws.

    Raises:
        UserError: for text that is too short, or a length below 256.
    """

    def __init__(self, folder: Path, tokenizer: Any, length: int, seed: int):
        require(length >= _SHORTEST, "length", f"at least {_SHORTEST} tokens", length)
        self.files = reading.novel_files(folder)
        self._library = Library(reading.read_novels(folder))
        self._tokenizer, self._length, self._seed = tokenizer, length, seed
        sample = self._library.text[:20000]
        self._chars = len(sample) / max(1, len(self._encode(sample)))
        if len(self._library.text) < self._chars * length:
            raise UserError(f"{folder}: the text is shorter than one sequence of {length} tokens")
        self._words = sorted(set(_WORD.findall(self._library.text[:2_000_000])))
        if len(self._words) < 50:
            raise UserError(f"{folder}: the text has {len(self._words)} different words; keys are made of 50 or more")

    def draw(self, name: str) -> Drawn:
        """The sequence of this name."""
        rng = random.Random(f"lte/{self._seed}/{name}")
        facts, turns = self._facts(rng)
        room = (1 - _SHARE) * self._length
        text = self._library.window(rng.random(), int(room * self._chars * 1.2))
        places = [rng.random() for _ in facts]
        chat = bool(self._tokenizer.chat_template) and rng.random() < 0.5
        chars = int(room * self._chars)
        while True:
            document = insert(text[:chars], facts, places)
            ids, begin, end = self._assembled(document, turns, chat, random.Random(rng.getrandbits(64)))
            if end <= room + _SHORTEST // 4 or chars < 64:
                return Drawn(tuple(ids), begin, end)
            chars = int(chars * 0.98 * room / end)

    def _assembled(
        self, document: str, turns: Sequence[_Turn], chat: bool, rng: random.Random
    ) -> tuple[list[int], int, int]:
        """The ids of a document with the questions and repeats that fit after it, and the places at which the
        document begins and ends."""
        turns = [*turns, *self._repeats(document, rng)]
        rng.shuffle(turns)
        before, after = self._frame(document, turns, chat)
        head = self._encode(before) if chat else leading_ids(self._tokenizer) + self._encode(before)
        body = self._encode(document)
        ids = [*head, *body, *self._encode(after)]
        return ids[: self._length], len(head), len(head) + len(body)

    def _frame(self, document: str, turns: Sequence[_Turn], chat: bool) -> tuple[str, str]:
        """What stands before and after the document."""
        if not chat:
            return "", "\n\n" + "\n".join(f"{turn.question} {turn.answer}" for turn in turns)
        mark = "\x00"
        messages = []
        for number, turn in enumerate(turns):
            asked = f"{mark}\n\n{turn.question}" if number == 0 else turn.question
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": turn.answer}]
        before, after = self._tokenizer.apply_chat_template(messages, tokenize=False).split(mark)
        return before, after

    def _facts(self, rng: random.Random) -> tuple[list[str], list[_Turn]]:
        """Statements for the document, and questions about them with their answers."""
        facts, turns = [], []
        fact, question, answer = rng.choice(_CODES)
        kind = rng.choice(("number", "word", "uuid"))
        for _ in range(rng.randint(1, 8)):
            given = {"kind": kind, "key": self._name(rng), "value": self._value(kind, rng)}
            facts.append(fact.format(**given))
            turns.append(_Turn(question.format(**given), answer.format(**given)))
        for _ in range(rng.randint(1, 3)):
            one, other, question = rng.choice(_PAIRS)
            given = {"a": self._name(rng).title(), "b": self._name(rng).title(), "c": rng.choice(self._words).title()}
            facts += [one.format(**given), other.format(**given)]
            turns.append(_Turn(question.format(**given), given["c"]))
        return facts, turns

    def _repeats(self, document: str, rng: random.Random) -> Iterator[_Turn]:
        """Stretches of the document to be repeated, more than there is room for."""
        starts = [0, *sentence_starts(document)]
        for start in rng.sample(starts, min(len(starts), 12)):
            words = document[start : start + 600].split(" ")
            if len(words) > 20:
                begin, rest = " ".join(words[:8]), " ".join(words[8 : 8 + rng.randint(10, 60)])
                yield _Turn(rng.choice(_REPEATS).format(begin=begin), rest)

    def _name(self, rng: random.Random) -> str:
        return f"{rng.choice(self._words)} {rng.choice(self._words)}"

    def _value(self, kind: str, rng: random.Random) -> str:
        if kind == "number":
            return f"{rng.randint(10_000, 99_999_999)}"
        if kind == "uuid":
            return str(uuid.UUID(int=rng.getrandbits(128), version=4))
        return "-".join(rng.choice(self._words) for _ in range(2))

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False) if text else []
