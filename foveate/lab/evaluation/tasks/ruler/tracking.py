"""RULER's variable tracking: a chain of assignments hidden line by line in noise (section 3.2).

A prompt begins with a solved example of at most 500 tokens, its variables of three letters instead of five.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import string
from pathlib import Path
from typing import Any

from foveate.lab.evaluation.tasks.niah import distinct
from foveate.lab.evaluation.tasks.ruler.draft import NOISE, NOISE_TOKENS, Draft, Draw, Kind, at_random
from foveate.prompting import question_of

TEMPLATE = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above."
)
ANSWER_PREFIX = (
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {value}, they are: "
)
"""Its last space is the published one; the example has it, too."""
_EXAMPLE_TOKENS = 500


@dataclasses.dataclass(frozen=True)
class VariableTracking(Kind):
    """One chain: a number assigned to a variable and handed on `hops` times. Asked for: all variables that have it."""

    new_tokens = 30

    hops: int = 4

    def drawer(self, data: Path, tokenizer: Any, length: int, seed: int) -> Draw:
        per_line = len(tokenizer.encode(f"{NOISE}\n", add_special_tokens=False))
        example_lines = self._example_lines(tokenizer)

        def draw(rng: random.Random, index: int) -> Draft:
            shown_value, value = distinct(2, lambda: f"{rng.randrange(10_000, 99_999)}")
            example = self._example(rng, shown_value, example_lines)
            names = _names(rng, self.hops + 1, 5)
            chain, where = _chain(names, value), rng.getrandbits(64)

            def text(size: int) -> str:
                context = "\n".join(at_random(where, [NOISE] * size, chain))
                return f"{example}\n\n{TEMPLATE.format(context=context, value=value)}"

            return Draft(
                text=text,
                sizes=range(len(chain), len(chain) + length // NOISE_TOKENS),
                step=per_line,
                answer_prefix=ANSWER_PREFIX.format(count=len(names), value=value),
                answers=tuple(names),
                question=question_of(TEMPLATE, value=value),
                least="example, question and chain",
                meta={"value": value},
            )

        return draw

    def _example(self, rng: random.Random, value: str, lines: int) -> str:
        names = _names(rng, self.hops + 1, 3)
        context = "\n".join(at_random(rng.getrandbits(64), [NOISE] * lines, _chain(names, value)))
        question = TEMPLATE.format(context=context, value=value)
        return f"{question} {ANSWER_PREFIX.format(count=len(names), value=value)} {' '.join(names)}"

    def _example_lines(self, tokenizer: Any) -> int:
        """The number of lines of noise for which the example has room, and at least the number that the chain needs."""
        fewest = self.hops + 1
        examples = {
            lines: self._example(random.Random(0), "12345", lines)
            for lines in range(fewest, max(fewest, _EXAMPLE_TOKENS // NOISE_TOKENS) + 1)
        }
        ids = tokenizer(list(examples.values()), add_special_tokens=False)["input_ids"]
        return max((lines for lines, row in zip(examples, ids) if len(row) <= _EXAMPLE_TOKENS), default=fewest)


def _names(rng: random.Random, count: int, letters: int) -> list[str]:
    return distinct(count, lambda: "".join(rng.choices(string.ascii_uppercase, k=letters)))


def _chain(names: list[str], value: str) -> list[str]:
    """The assignments, each a line. Assignments of a variable end with a space, as published."""
    return [f"VAR {names[0]} = {value}", *(f"VAR {new} = VAR {old} " for old, new in itertools.pairwise(names))]
