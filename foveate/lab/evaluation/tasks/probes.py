"""Prompts made of a novel that comes with the package, for calibrating a model without any data.

Each asks for something that stands once in the text: an access code (a uuid) among others, a number of a list, the end
of a chain of assignments, or the continuation of a sentence. In a `ledger` there is no novel: all entries are alike,
and one is asked for. Wording and forms differ from RULER's and from question sets', so that these can still be
measured.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from foveate.errors import UserError
from foveate.io import reading
from foveate.lab.evaluation.metrics import Mean
from foveate.lab.evaluation.tasks import register
from foveate.lab.evaluation.tasks.base import Item, Output, Task
from foveate.lab.evaluation.tasks.niah import longest
from foveate.prompting import Message, encode

TEXT = Path(__file__).parents[1] / "text"
"""The folder of the novel: chapters 1 to 15 of Moby-Dick, from Project Gutenberg's text, in the public domain."""
_COLOURS = ("amber", "black", "blue", "brown", "copper", "green", "grey", "ivory", "red", "violet", "white", "yellow")
_PLACES = (
    *("archive", "boathouse", "cellar", "chapel", "foundry", "greenhouse", "harbour", "mill", "observatory", "stable"),
)
_FACTS, _HOPS, _SHELVES = 6, 3, 90
_TOKENS_PER_SENTENCE = 20
_SHORTEST_SENTENCE, _SHOWN = 14, 7  # words of a sentence that is asked for, and how many of them the question gives
_FIRST_WORDS = 100  # a sentence that is asked for begins within this many first words, which every prompt holds
SHORTEST = 512  # tokens of the shortest prompt


class Asked(NamedTuple):
    """What is put into a text, what is asked about it, how the answer begins, and how it goes on."""

    facts: list[str]
    question: str
    prefix: str
    answer: str
    sentences: int = 1  # first ones of the text that a prompt must hold
    text: Sequence[str] | None = None  # what they are put into; None: the novel


@register
class Probes(Task):
    """Things that stand once in a novel. Score: prompts whose answer is in what the model says (`found`)."""

    name = "probes"
    splits = ("codes", "numbers", "chain", "passage", "ledger")
    metrics = {"found": Mean("found")}
    main = "found"
    least = {"length": SHORTEST, "max_new_tokens": 1}
    own_data = TEXT

    length: int = 4096  # tokens of the whole prompt
    max_new_tokens: int = 32  # longest answer

    def files(self, data: Path) -> list[Path]:
        return reading.novel_files(data)

    def items(self, data: Path, tokenizer: Any, limit: int, seed: int) -> list[Item]:
        sentences = [one for novel in reading.read_novels(data) for one in _sentences(novel.text)]
        return [self._item(tokenizer, sentences, index, seed) for index in range(limit)]

    def grade(self, item: Item, output: Output) -> dict[str, float]:
        return {"found": float(_plain(item.answers[0]) in _plain(output.text))}

    def _item(self, tokenizer: Any, sentences: Sequence[str], index: int, seed: int) -> Item:
        rng = random.Random(f"probes/{self.split}/{seed}/{index}")
        start = rng.randrange(len(sentences))
        text = [*sentences[start:], *sentences[:start]]
        asked = _MAKERS[self.split](rng, text)
        text = text if asked.text is None else asked.text
        depths = sorted((rng.random(), fact) for fact in asked.facts)

        def prompt(count: int) -> list[Message]:
            parts, done = [], 0
            for depth, fact in depths:
                upto = int(depth * count)
                parts += [*text[done:upto], fact]
                done = upto
            content = f"{' '.join([*parts, *text[done:count]])}\n\n{asked.question}"
            return [{"role": "user", "content": content}]

        def encoded(count: int) -> list[int]:
            return encode(tokenizer, prompt(count), asked.prefix)

        count, ids = longest(range(asked.sentences, len(text)), self.length, encoded, step=_TOKENS_PER_SENTENCE)
        if len(ids) < 0.8 * self.length:
            raise UserError(
                f"the novel or ledger has text for {len(ids):,} tokens; ask for a shorter length than {self.length:,}"
            )
        how = {"answer_prefix": asked.prefix, "max_new_tokens": self.max_new_tokens}
        return Item(f"{self.split}.{index}", prompt(count)[0]["content"], tuple(ids), (asked.answer,), **how)


def _codes(rng: random.Random, text: Sequence[str]) -> Asked:
    places = _places(rng)
    facts = {place: str(uuid.UUID(int=rng.getrandbits(128), version=4)) for place in places}
    question = "Which code opens the door of the {}? Reply with the code alone."
    lines = [f"The door code of the {place} is {code}." for place, code in facts.items()]
    return Asked(lines, *_one_of(rng, facts, question, "The code is"))


def _numbers(rng: random.Random, text: Sequence[str]) -> Asked:
    places = _places(rng)
    facts = dict(zip(places, map(str, rng.sample(range(10_000, 1_000_000), _FACTS))))
    question = "By the accounts, how many bricks went to the {}? Reply with the number alone."
    lines = [f"In the year's accounts {number} bricks went to the {place}." for place, number in facts.items()]
    return Asked(lines, *_one_of(rng, facts, question, "The number is"))


def _one_of(rng: random.Random, facts: Mapping[str, str], question: str, prefix: str) -> tuple[str, str, str]:
    """What is asked about one of the places, how the answer begins, and the answer."""
    place = list(facts)[rng.randrange(_FACTS)]
    return question.format(place), prefix, facts[place]


def _chain(rng: random.Random, text: Sequence[str]) -> Asked:
    places = _places(rng)
    number = str(rng.randrange(10_000, 1_000_000))
    first, *others = places[: _HOPS + 1]
    facts = [f"The key of the {first} hangs on hook {number}."]
    facts += [f"The key of the {other} hangs where that of the {place} does." for place, other in zip(places, others)]
    facts.append(f"The key of the {places[_HOPS + 1]} hangs on hook {rng.randrange(10_000, 1_000_000)}.")
    question = f"On which hook does the key of the {others[-1]} hang? Reply with the number alone."
    return Asked(facts, question, "The hook is number", number)


def _passage(rng: random.Random, text: Sequence[str]) -> Asked:
    begins = itertools.accumulate(map(len, map(str.split, text)), initial=0)
    near = [index for index, begin in zip(range(len(text)), begins) if begin < _FIRST_WORDS]
    places = [index for index in near if len(text[index].split()) >= _SHORTEST_SENTENCE]
    chosen = rng.choice(places or [next(n for n, one in enumerate(text) if len(one.split()) >= _SHORTEST_SENTENCE)])
    words = text[chosen].split()
    shown, rest = " ".join(words[:_SHOWN]), " ".join(words[_SHOWN : 2 * _SHOWN])
    return Asked([], f'Go on with the sentence of the text that begins with "{shown}".', shown, rest, chosen + 1)


def _ledger(rng: random.Random, text: Sequence[str]) -> Asked:
    """Crates on shelves, half of the ledgers by uuids and half by numbers; keys share all words but one with others."""
    shelves = [(colour, place, shelf) for colour in _COLOURS for place in _PLACES for shelf in range(1, _SHELVES)]
    rng.shuffle(shelves)
    by_uuid = rng.random() < 0.5
    crates = (
        [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in shelves]
        if by_uuid
        else [str(number) for number in rng.sample(range(1_000_000, 10_000_000), len(shelves))]
    )
    lines = [
        f"Shelf {shelf} of the {colour} {place} holds crate {crate}."
        for (colour, place, shelf), crate in zip(shelves, crates)
    ]
    colour, place, shelf = shelves[0]
    what = "code" if by_uuid else "number"
    question = f"Which crate is on shelf {shelf} of the {colour} {place}? Reply with its {what} alone."
    return Asked(lines[:1], question, "The crate is", crates[0], text=lines[1:])


_MAKERS = {"codes": _codes, "numbers": _numbers, "chain": _chain, "passage": _passage, "ledger": _ledger}
USUAL = ("codes", "numbers", "chain", "passage")  # the splits of a calibration without data


def _places(rng: random.Random) -> list[str]:
    colours, places = rng.sample(_COLOURS, _FACTS), rng.sample(_PLACES, _FACTS)
    return [f"{colour} {place}" for colour, place in zip(colours, places)]


@functools.lru_cache(maxsize=4)
def _sentences(text: str) -> tuple[str, ...]:
    """The sentences of a text, without line ends."""
    return tuple(one.strip() for one in re.split(r"(?<=[.!?;])\s+", " ".join(text.split())) if one.strip())


def _plain(text: str) -> str:
    return " ".join(re.findall(r"[\w-]+", text.lower()))
