"""Generated retrieval: span copies, associative recall (MQAR) and cloze; `SOURCES` are all, with text and needles.

Text alone gives a small model no retrieval within a few hundred million tokens. Rows are made in token space where that
is possible. Haystacks and fillers come from the text that is not held out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foveate.errors import UserError, require
from foveate.hybrids.training.needles import Needles
from foveate.hybrids.training.settings import setting
from foveate.hybrids.training.sources import ANSWER, DRAWN, TEXT, Draw, Row, Source, Text, Vocabulary, filler
from foveate.hybrids.training.tokens import TokenStore

_CUE = 4
"""First tokens of a copy, which are no answer."""
_FILL = 0.3
"""Share of a row that copies take up, about."""


@dataclass(frozen=True)
class Copies(Source):
    """Spans that come again further on. A first few tokens of the copy are the cue, the others the answer."""

    kind: ClassVar[str] = "copies"

    gap: tuple[int, int] = setting((300, 3500), "tokens between a span and its copy, as far as the row is long enough")
    span: tuple[int, int] = setting((16, 64), "tokens of a span")
    drawn: float = setting(0.25, "share of the spans that are random tokens, which no text tells")
    digits: float = setting(0.0, "share of the spans that are random digits, which small models miscopy")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_range("gap")
        self.require_range("span", _CUE + 1)
        self.require_shares("drawn", "digits")

    def row(self, store: TokenStore, vocabulary: Vocabulary, draw: Draw) -> Row:
        rng, length = draw.rng, draw.length
        ids, roles = filler(store, rng, length), np.full(length, TEXT, np.int8)
        free = np.ones(length, bool)  # positions that belong to no span and no copy
        low, high = min(self.gap[0], max(1, length // 4)), self.gap[1]
        span_mean = min(sum(self.span) / 2, max(2, length / 8))
        stride = span_mean / _FILL
        position = low + self.span[0]
        while (position := position + int(rng.exponential(max(1.0, stride - span_mean)))) < length:
            size = min(int(rng.integers(self.span[0], self.span[1] + 1)), length - position)
            farthest = min(high, position - size)
            if size <= _CUE or farthest < low:
                position += 1
                continue
            source = max(0, position - size - int(np.exp(rng.uniform(np.log(low), np.log(farthest + 1)))))
            if not free[source : source + size].all():
                position += 1
                continue
            if (place := rng.random()) < self.drawn + self.digits:
                ids[source : source + size] = rng.choice(
                    vocabulary.plain if place < self.drawn else vocabulary.digits, size
                )
                roles[source : source + size] = DRAWN
            ids[position : position + size] = ids[source : source + size]
            roles[position : position + _CUE] = DRAWN
            roles[position + _CUE : position + size] = ANSWER
            free[source : source + size] = free[position : position + size] = False
            position += size
        return Row(ids, roles)


@dataclass(frozen=True)
class Recall(Source):
    """Multi-query associative recall (Arora et al. 2023): pairs of tokens, then all keys again, each to be answered.

    A row has 1, 2, 4 … up to `parts` parts with pairs of their own, text between the pairs and the queries.
    """

    kind: ClassVar[str] = "recall"

    pairs: tuple[int, int] = setting((8, 256), "fewest and most pairs of a part, drawn on a logarithmic scale")
    grows: float = setting(0.3, "share of the training over which the most grows from the fewest; 0: none")
    parts: int = setting(8, "most parts of a row, each with pairs of its own; few parts ask from further away")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_range("pairs")
        self.require_shares("grows")
        require(self.parts >= 1, "mixture.recall.parts", "at least 1", self.parts)

    def row(self, store: TokenStore, vocabulary: Vocabulary, draw: Draw) -> Row:
        rng, length = draw.rng, draw.length
        grown = min(1.0, draw.progress / self.grows) if self.grows else 1.0
        parts = 2 ** int(rng.integers(0, self.parts.bit_length()))
        while parts > 1 and length // parts < 8 * self.pairs[0]:
            parts //= 2
        ends = np.linspace(0, length, parts + 1).astype(int)
        used = np.zeros(store.vocab_size, bool)
        rows = [self._part(store, vocabulary, rng, int(size), grown, used) for size in np.diff(ends)]
        return Row(*map(np.concatenate, zip(*rows)))

    def _part(
        self,
        store: TokenStore,
        vocabulary: Vocabulary,
        rng: np.random.Generator,
        length: int,
        grown: float,
        used: np.ndarray,
    ) -> Row:
        """`used` flags the ids that stand in the row already: as a key, one of them would have two values."""
        fewest, most = np.log(self.pairs[0]), np.log(self.pairs[1])
        count = round(float(np.exp(rng.uniform(fewest, fewest + grown * (most - fewest)))))
        count = min(count, length // 4)
        keys, values = vocabulary.halves
        while True:
            between = filler(store, rng, length - 4 * count)
            taken = used.copy()
            taken[between] = True
            free = keys[~taken[keys]]
            if 0 < count <= len(free):
                break
            if not len(free) or not count:
                raise UserError(
                    f"mixture.recall: rows of {length} tokens leave no key of a vocabulary of {store.vocab_size:,} free"
                )
            count = len(free) // 2 or 1
        chosen = rng.choice(free, count, replace=False)
        pairs = np.stack([chosen, values[rng.integers(0, len(values), count)]], axis=1)
        before = int(rng.integers(0, len(between) // 4 + 1))
        asked = rng.permutation(pairs)
        drawn = np.full(2 * count, DRAWN, np.int8)
        answers = np.tile(np.array([DRAWN, ANSWER], np.int8), count)
        text = np.full(len(between), TEXT, np.int8)
        row = Row(
            np.concatenate([between[:before], pairs.ravel(), between[before:], asked.ravel()]),
            np.concatenate([text[:before], drawn, text[before:], answers]),
        )
        used[row.ids] = True
        return row


@dataclass(frozen=True)
class Cloze(Source):
    """Passages of train sets, then questions on some of them, or sentences to be completed. Answers are in the text."""

    kind: ClassVar[str] = "cloze"

    questions: tuple[int, int] = setting((2, 8), "fewest and most questions of a row, as far as their passages fit")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_range("questions")

    def check(self, store: TokenStore) -> None:
        if store.questions is None:
            raise UserError(
                f"{store.folder}: mixture.cloze needs questions, and the text was prepared without; "
                "prepare it with questions, or set mixture.cloze.share to 0"
            )

    def row(self, store: TokenStore, vocabulary: Vocabulary, draw: Draw) -> Row:
        rng, room = draw.rng, draw.length - 1
        tokens, bounds = store.questions["tokens"], store.questions["bounds"]
        passages: dict[bytes, Row] = {}
        asked: list[Row] = []
        wanted = int(rng.integers(self.questions[0], self.questions[1] + 1))
        for number in rng.integers(0, len(bounds), 4 * wanted):
            b0, b1, b2, b3 = bounds[number]
            passage = tokens[b0:b1].astype(np.int64)
            known = passage.tobytes() in passages
            cost = (0 if known else b1 - b0) + b3 - b1
            if cost > room:
                continue
            room -= cost
            passages.setdefault(passage.tobytes(), Row(passage, np.full(b1 - b0, TEXT, np.int8)))
            roles = np.full(b3 - b1, TEXT, np.int8)
            roles[b2 - b1 :] = ANSWER
            asked.append(Row(tokens[b1:b3].astype(np.int64), roles))
            if len(asked) == wanted:
                break
        if not asked:
            least = int((bounds[:, 3] - bounds[:, 0]).min()) + 1
            raise UserError(
                f"mixture.cloze: rows of {draw.length} tokens are too short for passages and questions; "
                f"the shortest take {least}"
            )
        before = Row(filler(store, rng, room), np.full(room, TEXT, np.int8))
        kept = list(passages.values())
        kept = [kept[i] for i in rng.permutation(len(kept))]
        end = Row(np.array([vocabulary.end], np.int64), np.array([TEXT], np.int8))
        return Row(*map(np.concatenate, zip(before, *kept, *asked, end)))


SOURCES: Mapping[str, type[Source]] = {source.kind: source for source in (Text, Copies, Recall, Needles, Cloze)}
