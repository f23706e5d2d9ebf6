"""RULER's retrieval tasks: needles in noise, in essays (here novels) or among other needles (section 3.1)."""

from __future__ import annotations

import dataclasses
import math
import random
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from foveate.errors import UserError
from foveate.hybrids.training.haystack import Library, insert
from foveate.io import reading
from foveate.lab.evaluation.tasks.niah import (
    ANSWER_PREFIX,
    CHARS_PER_TOKEN,
    DEPTHS,
    NEEDLE,
    TEMPLATE,
    distinct,
    word_ends,
)
from foveate.lab.evaluation.tasks.ruler.draft import (
    NOISE,
    NOISE_TOKENS,
    Draft,
    Draw,
    Kind,
    at_random,
    read_words,
    word_files,
)
from foveate.prompting import question_of

PLURAL_TEMPLATE = (
    "Some special magic {kind}s are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind}s afterwards.\n{context}\n"
    "What are all the special magic {kind}s for {key} mentioned in the provided text?"
)
PLURAL_ANSWER_PREFIX = "The special magic {kind}s for {key} mentioned in the provided text are"
_NEEDLE_TOKENS = 14  # fewest tokens of a needle: its words and stops
_SAMPLE = 20_000  # characters of a novel that tell how many tokens a character has


class _Haystack(NamedTuple):
    """`context(size)` returns a haystack of this size, needles included. The other fields are as in a draft."""

    context: Callable[[int], str]
    sizes: Sequence[int]
    step: float
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Needles(Kind):
    """`keys` needles with `values` values each. The question asks for `queries` of the keys.

    `haystack`: noise, essay, or needles (with other keys and values). Keys are a word or a uuid, values a number or a
    uuid. In an essay the needles stand at different ones of RULER's 40 depths, elsewhere before random lines.
    """

    new_tokens = 128

    haystack: str
    key_kind: str = "word"
    value_kind: str = "number"
    keys: int = 1
    values: int = 1
    queries: int = 1

    def files(self, data: Path) -> list[Path]:
        return [
            *(reading.novel_files(data) if self.haystack == "essay" else ()),
            *(word_files(data) if self.key_kind == "word" else ()),
        ]

    def drawer(self, data: Path, tokenizer: Any, length: int, seed: int) -> Draw:
        words = read_words(data)[:2] if self.key_kind == "word" else ()
        others = length // _NEEDLE_TOKENS if self.haystack == "needles" else 0  # an upper bound of those needed
        possible = math.prod(len(set(part)) for part in words)
        if words and possible < 2 * (self.keys + others):  # at least half stay free, so that drawing ends soon
            raise UserError(f"the word lists make {possible:,} keys; a length of {length:,} needs more words")
        library = Library(reading.read_novels(data)) if self.haystack == "essay" else None

        def draw(rng: random.Random, index: int) -> Draft:
            keys = distinct(self.keys, lambda: _draw(self.key_kind, rng, *words))
            values = distinct(self.keys * self.values, lambda: _draw(self.value_kind, rng))
            needles = [self._needle(keys[number // self.values], value) for number, value in enumerate(values)]
            rng.shuffle(needles)
            asked = rng.sample(range(self.keys), self.queries)
            answers = tuple(value for key in asked for value in values[key * self.values : (key + 1) * self.values])
            if library:
                hay = _essay(library.window(rng.random(), CHARS_PER_TOKEN * length), needles, rng, tokenizer)
            elif self.haystack == "noise":
                hay = _lines([NOISE] * (length // NOISE_TOKENS), needles, rng, tokenizer)
            else:
                other_keys = distinct(others, lambda: _draw(self.key_kind, rng, *words), taken=keys)
                other_values = distinct(others, lambda: _draw(self.value_kind, rng), taken=values)
                hay = _lines([*map(self._needle, other_keys, other_values)], needles, rng, tokenizer)
            return self._draft(hay, [keys[key] for key in asked], answers)

        return draw

    def _draft(self, hay: _Haystack, asked: Sequence[str], answers: tuple[str, ...]) -> Draft:
        template, prefix = (TEMPLATE, ANSWER_PREFIX) if len(answers) == 1 else (PLURAL_TEMPLATE, PLURAL_ANSWER_PREFIX)
        *others, last = asked
        query = f"{', '.join(others)}, and {last}" if others else last
        return Draft(
            text=lambda size: template.format(kind=self.value_kind, key=query, context=hay.context(size)),
            sizes=hay.sizes,
            step=hay.step,
            answer_prefix=prefix.format(kind=self.value_kind, key=query),
            answers=answers,
            question=question_of(template, kind=self.value_kind, key=query),
            source=hay.source,
            meta={"keys": list(asked)},
        )

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.value_kind, key=key, value=value)


def _essay(window: str, needles: list[str], rng: random.Random, tokenizer: Any) -> _Haystack:
    sample = window[:_SAMPLE]
    step = len(tokenizer.encode(sample, add_special_tokens=False)) / len(sample)
    places = [depth / 100 for depth in rng.sample(DEPTHS, len(needles))]
    return _Haystack(lambda size: insert(window[:size], needles, places), word_ends(window), step, "the novels")


def _lines(lines: list[str], needles: list[str], rng: random.Random, tokenizer: Any) -> _Haystack:
    where = rng.getrandbits(64)
    step = len(tokenizer.encode(f"{lines[0]}\n", add_special_tokens=False))
    sizes = range(len(needles), len(lines) + 1)
    return _Haystack(lambda size: "\n".join(at_random(where, lines[:size], needles)), sizes, step)


def _draw(kind: str, rng: random.Random, adjectives: Sequence[str] = (), nouns: Sequence[str] = ()) -> str:
    """A word (adjective-noun), a number of 7 digits or a uuid (version 4)."""
    if kind == "word":
        return f"{rng.choice(adjectives)}-{rng.choice(nouns)}"
    if kind == "number":
        return f"{rng.randint(1_000_000, 9_999_999)}"
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))
