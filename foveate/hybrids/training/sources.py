"""What sources of training rows share: roles of tokens, what a row is drawn from, and the rows of plain text.

A row is token ids, and a role for each. `DRAWN` tokens are random, and nothing before them predicts them; `TEXT` is
natural text, or wording that can be learned; `ANSWER` tokens follow from what stands before them. A source's `loss`
names what counts in the loss: `answers`, `predictable` (text and answers, the default) or `all`. Natural text counts
wherever it stands, so that a haystack is not wasted. Drawn tokens do not: a uuid costs 120 bits and teaches nothing.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from foveate.errors import UserError, require, unknown
from foveate.hybrids.training.halves import halved
from foveate.hybrids.training.settings import setting
from foveate.hybrids.training.tokens import TokenStore

DRAWN, TEXT, ANSWER = 0, 1, 2
LOSSES: Mapping[str, tuple[int, ...]] = {
    "answers": (ANSWER,),
    "predictable": (TEXT, ANSWER),
    "all": (DRAWN, TEXT, ANSWER),
}


class Row(NamedTuple):
    """Token ids, int64 `[T]`, and their roles, int8 `[T]`."""

    ids: np.ndarray
    roles: np.ndarray


class Draw(NamedTuple):
    """What a row depends on beside the source's settings.

    `index` counts the rows of this source, `order` seeds the order in which text is read, `progress` in [0, 1] is the
    share of the training that is done.
    """

    rng: np.random.Generator
    length: int
    index: int
    order: tuple[int, ...]
    progress: float


class Vocabulary:
    """What the generators ask of a tokenizer."""

    def __init__(self, store: TokenStore):
        self.raw = store.tokenizer
        self.end = store.end
        pieces = {index: token for token, index in self.raw.get_vocab().items()}
        special = {int(index) for index in self.raw.get_added_tokens_decoder()}
        self.plain = np.array(sorted(pieces.keys() - special), np.int64)
        """Ids that stand for text."""
        stops = [index for index, piece in pieces.items() if re.search(r"[.!?][\"')”’]*(?:Ċ|\n)*$", piece)]
        breaks = [index for index, piece in pieces.items() if piece.endswith(("Ċ", "\n"))]
        self.stops = _flags([*stops, *breaks], max(pieces) + 1)
        """By id: whether a sentence or a line can end with it."""
        self.breaks = _flags(breaks, max(pieces) + 1)

    @functools.cached_property
    def digits(self) -> np.ndarray:
        """Ids that stand for a digit."""
        return np.array([index for digit in "0123456789" for index in self.encode(digit)[-1:]], np.int64)

    @functools.cached_property
    def halves(self) -> tuple[np.ndarray, np.ndarray]:
        """Two disjoint halves of the ids: keys and values of associative recall, the same as in evaluation."""
        return halved(self.plain)

    def encode(self, text: str) -> np.ndarray:
        return np.array(self.raw.encode(text, add_special_tokens=False).ids, np.int64)

    def encode_parts(self, parts: Sequence[tuple[str, int]]) -> Row:
        """Texts with their roles, tokenised as one text; a token that spans two has the role of the later one."""
        coded = self.raw.encode("".join(text for text, _ in parts), add_special_tokens=False)
        ids, offsets = np.array(coded.ids, np.int64), np.array(coded.offsets, np.int64).reshape(-1, 2)
        roles, begin = np.full(len(ids), TEXT, np.int8), 0
        for text, role in filter(lambda part: part[0], parts):
            roles[(offsets[:, 1] > begin) & (offsets[:, 0] < begin + len(text))] = role
            begin += len(text)
        return Row(ids, roles)


@dataclass(frozen=True)
class Source:
    """A kind of rows. Subclasses define `row`, and their settings as fields."""

    kind: ClassVar[str] = ""

    share: float = setting(0.0, "share of the rows")
    loss: str = setting("predictable", "what counts: answers, predictable (text and answers) or all")

    def __post_init__(self) -> None:
        require(self.share >= 0, f"mixture.{self.kind}.share", "at least 0", f"{self.share:g}")
        if self.loss not in LOSSES:
            raise unknown("loss", str(self.loss), LOSSES, f"mixture.{self.kind}")

    def row(self, store: TokenStore, vocabulary: Vocabulary, draw: Draw) -> Row:
        raise NotImplementedError

    def check(self, store: TokenStore) -> None:
        """Raises `UserError` if the folder of text lacks what the source needs."""

    def require_range(self, name: str, least: int = 1) -> None:
        low, high = getattr(self, name)
        allowed = f"[low, high] with {least} <= low <= high"
        require(least <= low <= high, f"mixture.{self.kind}.{name}", allowed, [low, high])

    def require_shares(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            require(0 <= value <= 1, f"mixture.{self.kind}.{name}", "in [0, 1]", f"{value:g}")
        if (total := sum(getattr(self, name) for name in names)) > 1:
            raise UserError(f"mixture.{self.kind}: {' and '.join(names)} must add up to 1 at most, got {total:g}")


@dataclass(frozen=True)
class Text(Source):
    """Windows of the text, documents one after the other, each ended by the end token; once in every epoch."""

    kind: ClassVar[str] = "text"

    def row(self, store: TokenStore, vocabulary: Vocabulary, draw: Draw) -> Row:
        epoch, number = divmod(draw.index, self.windows(store, draw.length))
        offset, order = _epoch(len(store.train), draw.length, (*draw.order, epoch))
        ids = store.train.window(offset + int(order[number]) * draw.length, draw.length)
        return Row(ids, np.full(draw.length, TEXT, np.int8))

    @staticmethod
    def windows(store: TokenStore, length: int) -> int:
        """Rows of an epoch. Raises `UserError` if the text is shorter than one."""
        if (count := len(store.train) // length) < 1:
            raise UserError(f"{store.folder}: {len(store.train):,} tokens of text, fewer than a row of {length:,}")
        return count


def filler(store: TokenStore, rng: np.random.Generator, length: int) -> np.ndarray:
    """A window of the text that is not held out."""
    return store.train.window(int(rng.integers(len(store.train))), length)


@functools.lru_cache(maxsize=4)
def _epoch(tokens: int, length: int, order: tuple[int, ...]) -> tuple[int, np.ndarray]:
    """Where the windows of an epoch begin, and the order in which they are read."""
    rng = np.random.default_rng([*order, length])
    return int(rng.integers(length)), rng.permutation(tokens // length)


def _flags(ids: Sequence[int], size: int) -> np.ndarray:
    flags = np.zeros(size, bool)
    flags[list(ids)] = True
    return flags
