"""The base of RULER's kinds of tasks: prompts whose length is still open, and word lists.

The lists are the lists of the package wonderwords, in the folder `ruler` of a data folder; else foveate's own words.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from foveate.errors import DataError
from foveate.hybrids.training.words import ADJECTIVES, NOUNS
from foveate.io import reading

_LISTS = ("adjectivelist.txt", "nounlist.txt", "verblist.txt")
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""A line of the noise haystack."""
NOISE_TOKENS = 20  # fewest tokens of such a line: its words


@dataclasses.dataclass(frozen=True)
class Draft:
    """An item before it is fitted: `text(size)` is the user's message with that much haystack, the same at every call.

    `sizes` are the allowed ones, rising; one more of the size adds about `step` tokens to the prompt. `least` is what
    stands in a prompt of the smallest size, in words, and `source` what bounds the largest, if anything does. The
    message ends with the `question`.
    """

    text: Callable[[int], str]
    sizes: Sequence[int]
    step: float
    answer_prefix: str
    answers: tuple[str, ...]
    question: str
    least: str = "question and needles"
    source: str = ""
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)


Draw: TypeAlias = Callable[[random.Random, int], Draft | None]
"""The draft of an item by a generator and the item's index; None beyond the last that the data can give."""


class Kind:
    """A kind of RULER task with its settings."""

    new_tokens: ClassVar[int]  # the longest answer, as published

    def files(self, data: Path) -> list[Path]:
        """The files of the data folder that drafts are made of. Raises `DataError` if one that is needed is missing."""
        return []

    def drawer(self, data: Path, tokenizer: Any, length: int, seed: int) -> Draw:
        """Reads the data and returns what draws an item's draft. Raises `DataError` for malformed data."""
        raise NotImplementedError


def at_random(where: int, lines: Sequence[str], pieces: Sequence[str]) -> list[str]:
    """`lines` with the `pieces`, in their order, before different lines; `where` seeds the draw of the places.

    Raises ValueError if there are fewer lines than pieces.
    """
    places = sorted(random.Random(where).sample(range(len(lines)), len(pieces)))
    mixed = list(lines)
    for place, piece in reversed(list(zip(places, pieces))):
        mixed.insert(place, piece)
    return mixed


def word_files(data: Path) -> list[Path]:
    """The three lists in `data/ruler`, plain or .xz; none if there is no such folder.

    Raises `DataError` naming the list that the folder lacks.
    """
    folder = data / "ruler"
    what = ("a word a line", "the Python package wonderwords")
    return [reading.find_data_file(folder, name, *what) for name in _LISTS] if folder.is_dir() else []


def read_words(data: Path) -> tuple[list[str], list[str], list[str]]:
    """Adjectives, nouns and verbs, one a line in the lists; without lists our own, and no verbs.

    Raises `DataError` for a list that is missing, damaged or empty.
    """
    paths = word_files(data)
    if not paths:
        return ADJECTIVES, NOUNS, []
    lists = [[line.strip() for line in reading.read_text(path).split("\n") if line.strip()] for path in paths]
    for path, words in zip(paths, lists):
        if not words:
            raise DataError(f"{path}: no words; expected one a line")
    adjectives, nouns, verbs = lists
    return adjectives, nouns, verbs
