"""Needle in a haystack: a magic number hidden in a novel, worded as RULER's essay tasks (Hsieh et al. 2024, app. B).

`single` is RULER's niah_single_2 with novels as the essay; `multi` adds nine needles of the same form with other keys
(RULER's niah_multikey_1, with ten keys instead of four). The whole prompt, template and answer prefix included, is
fitted to `length` tokens: never above, and within 1 % below.
"""

from __future__ import annotations

import bisect
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from foveate.errors import UserError
from foveate.hybrids.training.haystack import Library, insert
from foveate.hybrids.training.words import ADJECTIVES, NOUNS
from foveate.io import reading
from foveate.lab.evaluation.metrics import Mean, string_match
from foveate.lab.evaluation.tasks import register
from foveate.lab.evaluation.tasks.base import Item, Output, Task, question_setting
from foveate.prompting import Message, question_of

NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
TEMPLATE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What is the special magic {kind} for {key} mentioned in the provided text?"
)
ANSWER_PREFIX = "The special magic {kind} for {key} mentioned in the provided text is"  # `kind`: number, word or uuid

DEPTHS = tuple(round(100 * step / 39) for step in range(40))
"""RULER's 40 depths, in percent; here of the text (there of its sentences), to the nearest start of a sentence."""
_FIRST, _STRIDE = 20, 23  # any run of items is spread over the depths, 40 in a row visit each once
_NEEDLES = {"single": 1, "multi": 10}
_SHORTEST = 256
CHARS_PER_TOKEN = 8  # more than enough for English prose


@register
class NeedleInAHaystack(Task):
    """A magic number hidden in a novel, asked for with an answer prefix. Score: the number is in the answer."""

    name = "niah"
    splits = tuple(_NEEDLES)
    metrics = {key: Mean(key) for key in ("string_match", "number_match")}
    main = "string_match"
    least = {"max_new_tokens": 1}

    length: int = 4096  # tokens of the whole prompt
    max_new_tokens: int = 16  # longest answer (RULER: 128)
    question: str = question_setting()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least("length", _SHORTEST * (2 if self.split == "multi" else 1))

    def files(self, data: Path) -> list[Path]:
        return reading.novel_files(data)

    def items(self, data: Path, tokenizer: Any, limit: int, seed: int) -> list[Item]:
        library = Library(reading.read_novels(data))
        return [self._item(tokenizer, library, index, seed) for index in range(limit)]

    def grade(self, item: Item, output: Output) -> dict[str, float]:
        said = re.findall(r"\d+", output.text)  # RULER's metric takes 12345677 for 1234567, this one does not
        return {"string_match": string_match(output.text, item.answers), "number_match": float(item.answers[0] in said)}

    def _item(self, tokenizer: Any, library: Library, index: int, seed: int) -> Item:
        rng = random.Random(f"niah/{seed}/{index}")
        depth = depth_of(index)
        keys = distinct(_NEEDLES[self.split], lambda: f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}")
        needles = [NEEDLE.format(kind="number", key=key, value=rng.randint(1_000_000, 9_999_999)) for key in keys]
        places = [depth / 100, *(rng.random() for _ in needles[1:])]
        prefix = ANSWER_PREFIX.format(kind="number", key=keys[0])
        window = library.window(rng.random(), CHARS_PER_TOKEN * self.length)

        def prompt(chars: int) -> tuple[Message, ...]:
            context = insert(window[:chars], needles, places)
            return ({"role": "user", "content": TEMPLATE.format(kind="number", context=context, key=keys[0])},)

        asked = question_of(TEMPLATE, kind="number", key=keys[0]), prefix
        chars, ids = fit(window, self.length, lambda chars: self.encoded(tokenizer, prompt(chars), *asked)[0])
        if len(ids) < 0.99 * self.length:
            raise UserError(
                f"the novels give a prompt of {len(ids):,} tokens at most; a length of {self.length:,} needs more text"
            )
        answer = needles[0].rstrip(".").rsplit(" ", 1)[1]
        more = {"answers": (answer,), "stop": "\n", "meta": {"key": keys[0], "depth": depth}}
        return self.posed(tokenizer, f"{index}", prompt(chars), *asked, **more)


def depth_of(index: int) -> int:
    """The depth of an item's needle by the item's number, in percent."""
    return DEPTHS[(_FIRST + _STRIDE * index) % len(DEPTHS)]


def fit(text: str, length: int, encoded: Callable[[int], list[int]]) -> tuple[int, list[int]]:
    """The longest prefix of `text` for which `encoded(characters)` has at most `length` tokens, within 1 % of it.

    Returns (characters, token ids); the ids are fewer only if the text does not suffice. Cuts between words, and inside
    one only where a word is more than that 1 %. Guesses by the characters per token seen so far, bisecting where a
    guess leads out of bounds. Raises `UserError` if even an empty text is too long.
    """
    chars, best = longest(word_ends(text), length, encoded)
    while len(best) < 0.99 * length and chars < len(text):
        ids = encoded(chars + 1)
        if len(ids) > length:
            break
        chars, best = chars + 1, ids
    return chars, best


def word_ends(text: str) -> list[int]:
    """The lengths to which `text` can be cut between words: 0, and the characters up to the end of each word."""
    return [0, *(match.start() for match in re.finditer(r"(?<=\S)(?:\s|$)", text))]


def longest(
    sizes: Sequence[int],
    length: int,
    encoded: Callable[[int], list[int]],
    step: float = 0.25,
    spare: int = 0,
    least: str = "question and needles",
) -> tuple[int, list[int]]:
    """The largest of `sizes` (rising) for which `encoded(size)` has at most `length` tokens, or one within 0.25 %.

    Returns (size, token ids). Guesses by the tokens that one more of the size has added so far, `step` at first,
    bisecting where a guess leads out of bounds. Guesses that aim at `spare` tokens below the length are fewer, and
    within that is near enough. Raises `UserError` if even the smallest size, which is `least`, is too long.
    """
    empty = encoded(sizes[0])
    if len(empty) >= length:
        raise UserError(f"a length of {length:,} tokens is too short: {least} alone take {len(empty):,}")
    low, high, best = 0, len(sizes), empty  # sizes[low] fits, sizes[high] does not
    aim, near = length - spare, max(length // 400, spare - 1)
    cut = min(bisect.bisect_left(sizes, sizes[0] + (aim - len(empty)) / step), high - 1)
    while low < high - 1 and length - len(best) > near:
        if not low < cut < high:
            cut = (low + high) // 2
        ids = encoded(sizes[cut])
        if len(ids) <= length:
            low, best = cut, ids
        else:
            high = cut
        per_token = (sizes[cut] - sizes[0]) / max(1, len(ids) - len(empty))
        cut = bisect.bisect_left(sizes, sizes[cut] + per_token * (aim - len(ids)))
    return sizes[low], best


def distinct(count: int, draw: Callable[[], str], taken: Sequence[str] = ()) -> list[str]:
    """`count` different draws, in their order, none of them in `taken`."""
    found: dict[str, None] = {}
    while len(found) < count:
        drawn = draw()
        if drawn not in taken:
            found[drawn] = None
    return list(found)
