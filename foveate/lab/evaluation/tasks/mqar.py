"""Multi-query associative recall (Zoology, Arora et al. 2024): pairs of a key and a value, then all keys again.

In token space, so that it asks the same of any tokenizer: a key and a value are one token each. The ordinary tokens of
the vocabulary are halved once, by a fixed draw, into keys and values; no key of an item occurs in the text around its
pairs. A prompt is text, the pairs, more text and the first key that is asked for; its value and the other keys with
theirs are fed in decode, in an order of their own, and each value that the model finds the likeliest token is right.
Zoology asks near keys more often than far ones and has no text; here every pair is asked for once.

The mixture `recall` of `foveate.hybrids.training` makes rows of this form from the same halves, of other pairs and of
its own text.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from foveate.errors import UserError
from foveate.hybrids.training.halves import halves
from foveate.hybrids.training.haystack import Library
from foveate.io import reading
from foveate.lab.evaluation.metrics import Mean
from foveate.lab.evaluation.tasks import register
from foveate.lab.evaluation.tasks.base import Item, Output, Task
from foveate.lab.evaluation.tasks.niah import CHARS_PER_TOKEN
from foveate.prompting import leading_ids


@register
class AssociativeRecall(Task):
    """Values of keys, all pairs in one prompt. Score: queries whose value is the likeliest token, percent."""

    name = "mqar"
    splits = ("books",)
    metrics = {"accuracy": Mean("accuracy")}
    main = "accuracy"
    least = {"pairs": 1}

    length: int = 1024  # prompt tokens, up to the first key asked for
    pairs: int = 64  # keys with their values, and queries

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least("length", 2 * self.pairs + 2)

    def files(self, data: Path) -> list[Path]:
        return reading.novel_files(data)

    def items(self, data: Path, tokenizer: Any, limit: int, seed: int) -> list[Item]:
        library = Library(reading.read_novels(data))
        keys, values = halves(tokenizer)
        return [self._item(tokenizer, library, keys, values, index, seed) for index in range(limit)]

    def grade(self, item: Item, output: Output) -> dict[str, float]:
        right = output.hits[::2]  # values; between them are the keys
        return {"accuracy": sum(right) / len(right)}

    def said(self, item: Item, output: Output) -> str:
        return f"{sum(output.hits[::2])} of {self.pairs} right"

    def _item(
        self, tokenizer: Any, library: Library, keys: list[int], values: list[int], index: int, seed: int
    ) -> Item:
        rng = random.Random(f"mqar/{seed}/{index}")
        first = leading_ids(tokenizer)
        room = self.length - len(first) - 2 * self.pairs - 1
        text = library.window(rng.random(), CHARS_PER_TOKEN * room)
        between = tokenizer.encode(text, add_special_tokens=False)[: max(room, 0)]
        if len(between) != room:
            raise UserError(
                f"task 'mqar': a length of {self.length:,} with {self.pairs:,} pairs needs {room:,} tokens of text, "
                f"and the novels give {len(between):,}; use a shorter length"
            )
        free = sorted(set(keys) - set(between))
        if len(free) < self.pairs:
            raise UserError(
                f"task 'mqar': {self.pairs:,} pairs need as many keys, and {len(free):,} tokens of the vocabulary can "
                "be keys without standing in the text; ask for fewer pairs or a shorter length"
            )
        pairs = [(key, rng.choice(values)) for key in rng.sample(free, self.pairs)]
        asked = rng.sample(pairs, self.pairs)
        before = rng.randint(0, room // 4)
        flat = [token for pair in pairs for token in pair]
        queries = [token for pair in asked for token in pair]
        ids = [*first, *between[:before], *flat, *between[before:], *queries]
        return Item(
            id=f"{index}",
            prompt=tokenizer.decode(ids[: self.length]),
            prompt_ids=tuple(ids[: self.length]),
            answers=tuple(tokenizer.decode([value]) for _, value in asked),
            target_ids=tuple(ids[self.length :]),
        )
