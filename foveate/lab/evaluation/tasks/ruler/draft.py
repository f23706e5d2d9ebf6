"""What a kind of RULER task gives: prompts whose length is still open."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias

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


class Kind(Protocol):
    """A kind of RULER task with its settings."""

    new_tokens: ClassVar[int]  # the longest answer, as published

    def files(self, data: Path) -> list[Path]:
        """The files of the data folder that drafts are made of. Raises `DataError` if one that is needed is missing."""

    def drawer(self, data: Path, tokenizer: Any, length: int, seed: int) -> Draw:
        """Reads the data and returns what draws an item's draft. Raises `DataError` for malformed data."""


def at_random(where: int, lines: Sequence[str], pieces: Sequence[str]) -> list[str]:
    """`lines` with the `pieces`, in their order, before different lines; `where` seeds the draw of the places.

    Raises ValueError if there are fewer lines than pieces.
    """
    places = sorted(random.Random(where).sample(range(len(lines)), len(pieces)))
    mixed = list(lines)
    for place, piece in reversed(list(zip(places, pieces))):
        mixed.insert(place, piece)
    return mixed
