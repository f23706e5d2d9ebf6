"""RULER's aggregation tasks: which words of a list, or of a coded text, are the most frequent (section 3.3)."""

from __future__ import annotations

import dataclasses
import math
import random
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from foveate.errors import UserError
from foveate.lab.evaluation.tasks.niah import distinct
from foveate.lab.evaluation.tasks.ruler.draft import Draft, Draw, Kind, read_words, word_files
from foveate.prompting import question_of

COMMON_TEMPLATE = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list?"
)
COMMON_ANSWER_PREFIX = "Answer: The top 10 words that appear most often in the list are:"
FREQUENT_TEMPLATE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
FREQUENT_ANSWER_PREFIX = "Answer: According to the coded text above, the three most frequently appeared words are:"

_COMMON = 10
_FULL_LENGTH = 4096
_DOTS = "..."
_CODED_LETTERS = 6
_FEWEST_CODED = 53


class _Counts(NamedTuple):
    """How often a common and another word stands in the list; the same of the example, and its different words."""

    common: int
    other: int
    example_common: int
    example_other: int
    example_words: int


_FULL, _SMALL = _Counts(30, 3, 10, 3, 40), _Counts(6, 1, 3, 1, 20)


@dataclasses.dataclass(frozen=True)
class CommonWords(Kind):
    """Ten words, 30 times each, in a numbered list of words that stand there 3 times, after a small solved example.

    Below 4096 tokens, as published, they stand there 6 times and once.
    """

    new_tokens = 120

    def files(self, data: Path) -> list[Path]:
        return word_files(data)

    def drawer(self, data: Path, tokenizer: Any, length: int, seed: int) -> Draw:
        words = sorted({word for words in read_words(data) for word in words})
        counts = _FULL if length >= _FULL_LENGTH else _SMALL
        if len(words) < counts.example_words:
            raise UserError(f"the word lists have {len(words)} different words; the example of cwe needs more")
        lists = "RULER's word lists" if word_files(data) else "the built-in words (RULER's lists go into ruler/)"

        def draw(rng: random.Random, index: int) -> Draft:
            shown, drawn = rng.sample(words, counts.example_words), rng.sample(words, len(words))
            example = _list(shown, counts.example_common, counts.example_other, rng.getrandbits(64))
            solved = f"{COMMON_TEMPLATE.format(context=example)} {COMMON_ANSWER_PREFIX} {_numbered(shown[:_COMMON])}"
            order = rng.getrandbits(64)

            def text(size: int) -> str:
                context = _list(drawn[:size], counts.common, counts.other, order)
                return f"{solved}\n{COMMON_TEMPLATE.format(context=context)}"

            return Draft(
                text=text,
                sizes=range(_COMMON + 1, len(words) + 1),
                step=6 * counts.other,
                answer_prefix=COMMON_ANSWER_PREFIX,
                answers=tuple(drawn[:_COMMON]),
                question=question_of(COMMON_TEMPLATE),
                least="example, question and common words",
                source=lists,
            )

        return draw


@dataclasses.dataclass(frozen=True)
class FrequentWords(Kind):
    """Coded words of six letters, as frequent as a zeta distribution (alpha 2) has them; the most frequent is dots."""

    new_tokens = 50

    def drawer(self, data: Path, tokenizer: Any, length: int, seed: int) -> Draw:
        def draw(rng: random.Random, index: int) -> Draft:
            coded = distinct(length // 50 - 1, lambda: "".join(rng.choices(string.ascii_lowercase, k=_CODED_LETTERS)))
            order = rng.getrandbits(64)

            def text(size: int) -> str:
                context = [word for word, count in zip([_DOTS, *coded], zeta_counts(size)) for _ in range(count)]
                random.Random(order).shuffle(context)
                return FREQUENT_TEMPLATE.format(context=" ".join(context))

            return Draft(
                text=text,
                sizes=range(_FEWEST_CODED, 2 * length),  # more than half of them are dots, a token or more each
                step=2.5,
                answer_prefix=FREQUENT_ANSWER_PREFIX,
                answers=tuple(coded[:3]),
                question=question_of(FREQUENT_TEMPLATE),
                least="question and the shortest text",
            )

        return draw


def zeta_counts(size: int) -> list[int]:
    """How often the word of each rank, from 1, stands in a text of nominally `size` words: size / (zeta(2) rank²).

    Rounded down, ranks that come to nothing left out. From a size of 53 on, ranks 1 to 5 all differ.
    """
    total = size / (math.pi**2 / 6)
    return [int(total / rank**2) for rank in range(1, math.isqrt(int(total)) + 1)]


def _list(words: Sequence[str], common: int, other: int, order: int) -> str:
    """The numbered list of ten common words and the others, shuffled by the seed `order`."""
    entries = [*words[:_COMMON] * common, *words[_COMMON:] * other]
    random.Random(order).shuffle(entries)
    return _numbered(entries)


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))
