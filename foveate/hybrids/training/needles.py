"""Needles: facts hidden in a haystack, each asked for at the end of its row."""

from __future__ import annotations

import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foveate.errors import UserError, unknown
from foveate.hybrids.training.settings import setting
from foveate.hybrids.training.sources import ANSWER, DRAWN, TEXT, Draw, Row, Source, Vocabulary, filler
from foveate.hybrids.training.templates import NOISE, RULER, TEMPLATES, Template
from foveate.hybrids.training.tokens import TokenStore

KINDS = ("number", "word", "uuid")
_SHORTEST = 512
"""Fewest tokens of a part of a row."""


@dataclass(frozen=True)
class Needles(Source):
    """Facts hidden in a haystack, each asked for at the end: RULER's tasks in its own and in nineteen other wordings.

    Keys are two words or a uuid. The words come from the folder of text. It leaves out the words of evaluation's keys,
    so that no key of a test occurs.
    """

    kind: ClassVar[str] = "needles"

    keys: tuple[int, int] = setting((1, 8), "fewest and most needles of a row")
    values: tuple[str, ...] = setting(KINDS, "kinds of values: number, word, uuid")
    uuid_keys: float = setting(0.15, "share of the rows whose keys are uuids")
    noise: float = setting(0.2, "share of the rows whose haystack is RULER's noise")
    distractors: float = setting(0.15, "share of the rows whose haystack is needles with other keys")
    ruler: float = setting(0.05, "share of the rows in RULER's wording; 0.05 is one of twenty")
    shorter: float = setting(0.5, "share of the rows that are cut into two or four, each with its own needles")
    grows: float = setting(0.0, "share of the training over which `shorter` falls from 1: first needles are near")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_range("keys")
        for name in ("uuid_keys", "ruler", "shorter", "grows"):
            self.require_shares(name)
        self.require_shares("noise", "distractors")
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
        near = max(0.0, 1 - draw.progress / self.grows) if self.grows else 0.0
        parts = 2 ** int(rng.integers(1, 3)) if rng.random() < self.shorter + (1 - self.shorter) * near else 1
        if length < parts * _SHORTEST:
            parts = 1
        lengths = [length // parts] * (parts - 1)
        rows = [self._problem(store, vocabulary, rng, size) for size in (*lengths, length - sum(lengths))]
        return Row(*map(np.concatenate, zip(*rows)))

    def _problem(self, store: TokenStore, vocabulary: Vocabulary, rng: np.random.Generator, length: int) -> Row:
        """One haystack with its needles and questions."""
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
            text = filler(store, rng, room)
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


def _distinct(count: int, draw: Callable[[], str]) -> list[str]:
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
