"""Short prompts asked after a passage of a novel, so that long answers are written over a long context.

The passage has nothing to do with what is asked: that a model answers worse after it is the model's own weakness, which
dense attention's score on the same items tells.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foveate.errors import UserError
from foveate.hybrids.training.haystack import Library
from foveate.io import reading
from foveate.lab.evaluation.tasks.niah import CHARS_PER_TOKEN, fit
from foveate.prompting import Message, encode

_BREAK = "\n\n---\n\n"
_FULLNESS = 0.97  # the least share of the length that a prompt has


def length_setting() -> Any:
    """The setting `length` of tasks with short prompts: tokens of a prompt, a passage of a novel before it; 0: none."""
    return dataclasses.field(default=0, kw_only=True, metadata={"later": True})


def novels_of(data: Path, length: int) -> Library | None:
    """The novels that prompts of this length begin with; None for 0. Raises `DataError` where there are none."""
    return Library(reading.read_novels(data)) if length else None


def lengthened(
    tokenizer: Any, messages: Sequence[Message], library: Library | None, length: int, key: str
) -> tuple[Message, ...]:
    """A prompt whose last message begins with a passage, so that it has about `length` tokens.

    The passage is a function of `key`. Raises `UserError` for prompts that are longer, and where the novels end.
    """
    if library is None:
        return tuple(messages)
    *before, last = messages
    window = library.window(random.Random(key).random(), CHARS_PER_TOKEN * length)

    def prompt(chars: int) -> tuple[Message, ...]:
        return (*before, {**last, "content": f"{window[:chars]}{_BREAK}{last['content']}"})

    chars, ids = fit(window, length, lambda chars: encode(tokenizer, prompt(chars)))
    if len(ids) < _FULLNESS * length:
        raise UserError(
            f"the novels give a prompt of {len(ids):,} tokens at most; a length of {length:,} needs more text"
        )
    return prompt(chars)
