"""Generated retrieval: span copies, associative recall (MQAR), needles, and cloze from train sets.

Text alone gives a small model no retrieval within a few hundred million tokens. Each source makes rows: token ids, and a
role for each. `DRAWN` tokens are random, and nothing before them predicts them; `TEXT` is natural text, or wording that
can be learned; `ANSWER` tokens follow from what stands before them. A source's `loss` names what counts in the loss:
`answers`, `predictable` (text and answers, the default) or `all`. Natural text counts wherever it stands, so that a
haystack is not wasted. Drawn tokens do not: a uuid costs 120 bits and teaches nothing.

Rows are made in token space where that is possible. Haystacks and fillers come from the text that is not held out.
"""

from __future__ import annotations

import functools
import re
import string
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from foveate.evaluation.errors import UserError, unknown
from foveate.training.templates import NOISE, RULER, TEMPLATES, Template
from foveate.training.tokens import TokenStore

DRAWN, TEXT, ANSWER = 0, 1, 2
LOSSES: Mapping[str, tuple[int, ...]] = {
    "answers": (ANSWER,),
    "predictable": (TEXT, ANSWER),
    "all": (DRAWN, TEXT, ANSWER),
}
KINDS = ("number", "word", "uuid")


def setting(default: Any, text: str) -> Any:
    """A field of a source with its help."""
    return field(default=default, metadata={"help": text})


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
    def halves(self) -> tuple[np.ndarray, np.ndarray]:
        """Two disjoint halves of the ids: keys and values of associative recall."""
        mixed = np.random.default_rng(0).permutation(self.plain)
        return mixed[: len(mixed) // 2], mixed[len(mixed) // 2 :]

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
        if self.share < 0:
            raise UserError(f"mixture.{self.kind}.share must be at least 0, got {self.share:g}")
        if self.loss not in LOSSES:
            raise unknown("loss", str(self.loss), LOSSES, f"mixture.{self.kind}")

    def row(self, store: TokenStore, vocabulary: Vocabulary, draw: Draw) -> Row:
        raise NotImplementedError

    def check(self, store: TokenStore) -> None:
        """Raises `UserError` if the folder of text lacks what the source needs."""

    def _range(self, name: str, least: int = 1) -> None:
        value = getattr(self, name)
        if not (len(value) == 2 and least <= value[0] <= value[1]):
            raise UserError(
                f"mixture.{self.kind}.{name} must be [low, high] with {least} <= low <= high, got {list(value)}"
            )

    def _shares(self, *names: str) -> None:
        for name in names:
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"mixture.{self.kind}.{name} must be in [0, 1], got {getattr(self, name):g}")
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


@dataclass(frozen=True)
class Copies(Source):
    """Spans that come again further on. A first few tokens of the copy are the cue, the others the answer."""

    kind: ClassVar[str] = "copies"

    gap: tuple[int, int] = setting((300, 3500), "tokens between a span and its copy, as far as the row is long enough")
    span: tuple[int, int] = setting((16, 64), "tokens of a span")
    cue: int = setting(4, "first tokens of a copy that are no answer")
    drawn: float = setting(0.25, "share of the spans that are random tokens, which no text tells")
    fill: float = setting(0.3, "share of the row that copies take up, about")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._range("gap")
        self._range("span", 2)
        self._shares("drawn")
        self._shares("fill")
        if not 1 <= self.cue < self.span[0]:
            raise UserError(
                f"mixture.copies.cue must be from 1 to {self.span[0] - 1} (less than a span), got {self.cue}"
            )

    def row(self, store: TokenStore, vocabulary: Vocabulary, draw: Draw) -> Row:
        rng, length = draw.rng, draw.length
        ids, roles = _filler(store, rng, length), np.full(length, TEXT, np.int8)
        free = np.ones(length, bool)  # positions that belong to no span and no copy
        low, high = self._reach(length)
        span_mean = min(sum(self.span) / 2, max(2, length / 8))
        stride = span_mean / max(self.fill, 1e-6)
        position = low + self.span[0]
        while (position := position + int(rng.exponential(max(1.0, stride - span_mean)))) < length:
            size = min(int(rng.integers(self.span[0], self.span[1] + 1)), length - position)
            farthest = min(high, position - size)
            if size <= self.cue or farthest < low:
                position += 1
                continue
            source = max(0, position - size - int(np.exp(rng.uniform(np.log(low), np.log(farthest + 1)))))
            if not free[source : source + size].all():
                position += 1
                continue
            if rng.random() < self.drawn:
                ids[source : source + size] = rng.choice(vocabulary.plain, size)
                roles[source : source + size] = DRAWN
            ids[position : position + size] = ids[source : source + size]
            roles[position : position + self.cue] = DRAWN
            roles[position + self.cue : position + size] = ANSWER
            free[source : source + size] = free[position : position + size] = False
            position += size
        return Row(ids, roles)

    def _reach(self, length: int) -> tuple[int, int]:
        """The shortest and longest gaps in a row of this length."""
        return min(self.gap[0], max(1, length // 4)), self.gap[1]


@dataclass(frozen=True)
class Recall(Source):
    """Multi-query associative recall (Arora et al. 2023): pairs of tokens, then all keys again, each to be answered.

    A row has one to eight parts with pairs of their own, text between the pairs and the queries.
    """

    kind: ClassVar[str] = "recall"

    pairs: tuple[int, int] = setting((8, 256), "fewest and most pairs of a part, drawn on a logarithmic scale")
    grows: float = setting(0.3, "share of the training over which the most grows from the fewest; 0: none")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._range("pairs")
        self._shares("grows")

    def row(self, store: TokenStore, vocabulary: Vocabulary, draw: Draw) -> Row:
        rng, length = draw.rng, draw.length
        grown = min(1.0, draw.progress / self.grows) if self.grows else 1.0
        parts = 2 ** int(rng.integers(0, 4))
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
            filler = _filler(store, rng, length - 4 * count)
            taken = used.copy()
            taken[filler] = True
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
        before = int(rng.integers(0, len(filler) // 4 + 1))
        asked = rng.permutation(pairs)
        drawn = np.full(2 * count, DRAWN, np.int8)
        answers = np.tile(np.array([DRAWN, ANSWER], np.int8), count)
        text = np.full(len(filler), TEXT, np.int8)
        row = Row(
            np.concatenate([filler[:before], pairs.ravel(), filler[before:], asked.ravel()]),
            np.concatenate([text[:before], drawn, text[before:], answers]),
        )
        used[row.ids] = True
        return row


@dataclass(frozen=True)
class Needles(Source):
    """Facts hidden in a haystack, each asked for at the end: RULER's tasks in its own and in nineteen other wordings.

    Keys are two words or a uuid. The words come from the folder of text, which leaves out those of evaluation's keys,
    so that no key of a test occurs.
    """

    kind: ClassVar[str] = "needles"

    keys: tuple[int, int] = setting((1, 8), "fewest and most needles of a row")
    values: tuple[str, ...] = setting(KINDS, "kinds of values: number, word, uuid")
    uuid_keys: float = setting(0.15, "share of the rows whose keys are uuids")
    noise: float = setting(0.2, "share of the rows whose haystack is RULER's noise")
    distractors: float = setting(0.15, "share of the rows whose haystack is needles with other keys")
    ruler: float = setting(0.05, "share of the rows in RULER's wording; 0.05 is one of twenty")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._range("keys")
        self._shares("uuid_keys")
        self._shares("ruler")
        self._shares("noise", "distractors")
        if not self.values:
            raise UserError(f"mixture.needles.values must name at least one of {', '.join(KINDS)}")
        for kind in self.values:
            if kind not in KINDS:
                raise unknown("kind of value", str(kind), KINDS, "mixture.needles")

    def check(self, store: TokenStore) -> None:
        if len(store.words) < 100:
            raise UserError(
                f"{store.folder}: {len(store.words)} words for the keys of needles, at least 100 are needed; "
                "prepare more text"
            )

    def row(self, store: TokenStore, vocabulary: Vocabulary, draw: Draw) -> Row:
        rng, length = draw.rng, draw.length
        template = RULER if rng.random() < self.ruler else TEMPLATES[1 + int(rng.integers(len(TEMPLATES) - 1))]
        kind = self.values[int(rng.integers(len(self.values)))]
        key_kind = "uuid" if rng.random() < self.uuid_keys else "word"
        place = rng.random()
        count = int(rng.integers(self.keys[0], self.keys[1] + 1))
        keys = _distinct(count, lambda: _drawn(key_kind, rng, store.words))
        values = _distinct(count, lambda: _drawn(kind, rng, store.words))
        opening = vocabulary.encode_parts([(template.introduction.format(kind=kind), TEXT)])
        while True:
            asked = [
                vocabulary.encode_parts(_asked(template, kind, keys[i], values[i])) for i in rng.permutation(count)
            ]
            lines = place < self.noise + self.distractors
            needles = [
                vocabulary.encode_parts(_needle(template, kind, key, value, lines)) for key, value in zip(keys, values)
            ]
            room = length - len(opening.ids) - sum(len(row.ids) for row in (*asked, *needles)) - 1
            if room >= 0:
                break
            if count == 1:
                raise UserError(
                    f"mixture.needles: rows of {length} tokens are too short for one needle; "
                    f"at least {length - room} are needed"
                )
            count -= 1
            keys, values = keys[:count], values[:count]
        if place < self.noise:
            hay = _lines(vocabulary.encode_parts([(f"{NOISE}\n", TEXT)]), room)
        elif lines:
            hay = self._others(vocabulary, template, kind, key_kind, (keys, values), room, rng, store.words)
        else:
            text = _filler(store, rng, room)
            hay = Row(text, np.full(room, TEXT, np.int8)), np.flatnonzero(vocabulary.stops[text]) + 1
        context = _inserted(*hay, needles, rng)
        end = Row(np.array([vocabulary.end], np.int64), np.array([TEXT], np.int8))
        return Row(*map(np.concatenate, zip(opening, *context, *asked, end)))

    @staticmethod
    def _others(
        vocabulary: Vocabulary,
        template: Template,
        kind: str,
        key_kind: str,
        taken: tuple[list[str], list[str]],
        room: int,
        rng: np.random.Generator,
        words: Sequence[str],
    ) -> tuple[Row, np.ndarray]:
        """A haystack of needles with other keys and values, and where its lines end."""
        keys, values = map(set, taken)
        rows, total = [], 0
        while total < room:
            key, value = _drawn(key_kind, rng, words), _drawn(kind, rng, words)
            if key in keys or value in values:
                continue
            keys.add(key)
            values.add(value)
            rows.append(vocabulary.encode_parts(_needle(template, kind, key, value, True)))
            total += len(rows[-1].ids)
        if not rows:
            return Row(np.empty(0, np.int64), np.empty(0, np.int8)), np.empty(0, np.int64)
        ids, roles = map(np.concatenate, zip(*rows))
        cut = total - room  # the first line is cut, as text before a window is
        ends = np.cumsum([len(row.ids) for row in rows]) - cut
        return Row(ids[cut:], roles[cut:]), ends[ends >= 0]


@dataclass(frozen=True)
class Cloze(Source):
    """Passages of train sets, then questions on some of them, or sentences to be completed. Answers are in the text."""

    kind: ClassVar[str] = "cloze"

    questions: tuple[int, int] = setting((2, 8), "fewest and most questions of a row, as far as their passages fit")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._range("questions")

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
        before = Row(_filler(store, rng, room), np.full(room, TEXT, np.int8))
        kept = list(passages.values())
        kept = [kept[i] for i in rng.permutation(len(kept))]
        end = Row(np.array([vocabulary.end], np.int64), np.array([TEXT], np.int8))
        return Row(*map(np.concatenate, zip(before, *kept, *asked, end)))


SOURCES: Mapping[str, type[Source]] = {source.kind: source for source in (Text, Copies, Recall, Needles, Cloze)}


@functools.lru_cache(maxsize=4)
def _epoch(tokens: int, length: int, order: tuple[int, ...]) -> tuple[int, np.ndarray]:
    """Where the windows of an epoch begin, and the order in which they are read."""
    rng = np.random.default_rng([*order, length])
    return int(rng.integers(length)), rng.permutation(tokens // length)


def _filler(store: TokenStore, rng: np.random.Generator, length: int) -> np.ndarray:
    return store.train.window(int(rng.integers(len(store.train))), length)


def _flags(ids: Sequence[int], size: int) -> np.ndarray:
    flags = np.zeros(size, bool)
    flags[list(ids)] = True
    return flags


def _distinct(count: int, draw: Any) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw()] = None
    return list(found)


def _drawn(kind: str, rng: np.random.Generator, words: Sequence[str]) -> str:
    """Two words, a number of seven digits, or a uuid (version 4)."""
    if kind == "word":
        first, second = rng.integers(0, len(words), 2)
        return f"{words[first]}-{words[second]}"
    if kind == "number":
        return str(int(rng.integers(1_000_000, 10_000_000)))
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def _filled(template: str, roles: Mapping[str, int], **values: str) -> list[tuple[str, int]]:
    """The parts of a filled-in template with their roles, text where `roles` names none."""
    parts = []
    for literal, name, _, _ in string.Formatter().parse(template):
        parts.append((literal, TEXT))
        if name:
            parts.append((values[name], roles.get(name, TEXT)))
    return parts


def _needle(template: Template, kind: str, key: str, value: str, line: bool) -> list[tuple[str, int]]:
    """A needle, on a line of its own or as a sentence after another."""
    parts = _filled(template.needle, {"key": DRAWN, "value": DRAWN}, kind=kind, key=key, value=value)
    return [*parts, ("\n", TEXT)] if line else [(" ", TEXT), *parts]


def _asked(template: Template, kind: str, key: str, value: str) -> list[tuple[str, int]]:
    """A question with its answer. The key is drawn in the question and follows from it in the prefix."""
    question = _filled(template.question, {"key": DRAWN}, kind=kind, key=key)
    prefix = _filled(template.prefix, {}, kind=kind, key=key)
    space = "" if template.prefix.endswith('"') else " "
    return [*question, *prefix, (space, TEXT), (value, ANSWER), (".\n", ANSWER)]


def _lines(line: Row, room: int) -> tuple[Row, np.ndarray]:
    """A haystack of one line, over and over, and where its lines end; the first is cut."""
    size = len(line.ids)
    count = -(-room // size)
    cut = count * size - room
    ends = np.arange(1, count + 1) * size - cut
    return Row(np.tile(line.ids, count)[cut:], np.tile(line.roles, count)[cut:]), ends


def _inserted(hay: Row, ends: np.ndarray, needles: Sequence[Row], rng: np.random.Generator) -> list[Row]:
    """The haystack in pieces, with the needles between them, each at the end of a sentence or at the beginning."""
    places = np.concatenate([[0], ends])
    wanted = rng.integers(0, len(hay.ids) + 1, len(needles))
    chosen = places[np.minimum(np.searchsorted(places, wanted), len(places) - 1)]
    pieces, last = [], 0
    for number in np.argsort(chosen, kind="stable"):
        at = int(chosen[number])
        pieces += [Row(hay.ids[last:at], hay.roles[last:at]), needles[number]]
        last = at
    return [*pieces, Row(hay.ids[last:], hay.roles[last:])]
