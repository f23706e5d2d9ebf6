"""Perplexity of a text's continuation, read in decode: what a method costs in likelihood rather than in answers.

A window of a novel, or of WikiText-2's test set, is a prompt of `length` tokens and a continuation that is fed teacher-
forced, each token a decode step of the method under test. A prompt of one token leaves everything to decode, as in
LuKA's ablations. Bits per byte make models with different vocabularies comparable.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np

from foveate.errors import UserError
from foveate.io import reading
from foveate.lab.evaluation.metrics import Values
from foveate.lab.evaluation.tasks import register
from foveate.lab.evaluation.tasks.base import Item, Output, Task
from foveate.prompting import leading_ids

_WIKITEXT = "wiki.test.raw"
_SOURCE = "https://huggingface.co/datasets/Salesforce/wikitext, wikitext-2-raw-v1"
_CHARS_PER_TOKEN = 8  # more than enough for English prose; a window that turns out short is read again, longer


def nats_a_token(values: Values) -> np.ndarray:
    """Nats a token."""
    return values["nll"].sum(axis=-1) / values["tokens"].sum(axis=-1)


@register
class Perplexity(Task):
    """Likelihood of a text's continuation, fed in decode. Score: 100 / perplexity."""

    name = "perplexity"
    splits = ("books", "wikitext")
    metrics = {
        "inverse_perplexity": lambda values: 100.0 * np.exp(-nats_a_token(values)),
        "perplexity": lambda values: np.exp(nats_a_token(values)),
        "nll": nats_a_token,
        "bits_per_byte": lambda values: values["nll"].sum(axis=-1) / values["bytes"].sum(axis=-1) / math.log(2),
    }
    main = "inverse_perplexity"
    least = {"length": 1, "continuation": 1}

    length: int = 2048  # prompt tokens before the continuation
    continuation: int = 512  # tokens scored

    def files(self, data: Path) -> list[Path]:
        if self.split == "books":
            return reading.novel_files(data)
        return [reading.find_data_file(reading.subfolder(data, "wikitext2"), _WIKITEXT, "the raw test set", _SOURCE)]

    def items(self, data: Path, tokenizer: Any, limit: int, seed: int) -> list[Item]:
        if self.split == "books":
            novels = reading.read_novels(data)
        else:
            novels = [
                reading.Novel(path.name.removesuffix(".xz"), reading.read_text(path)) for path in self.files(data)
            ]
        return [self._item(tokenizer, novels, index, seed) for index in range(limit)]

    def grade(self, item: Item, output: Output) -> dict[str, float]:
        return {"nll": output.nll, "tokens": float(len(item.target_ids)), "bytes": float(item.meta["bytes"])}

    def said(self, item: Item, output: Output) -> str:
        return f"perplexity {math.exp(output.nll / len(item.target_ids)):.2f}"

    def _item(self, tokenizer: Any, novels: list[reading.Novel], index: int, seed: int) -> Item:
        novel = novels[index % len(novels)]
        first = leading_ids(tokenizer)
        wanted = self.length - len(first) + self.continuation
        draw = random.Random(f"perplexity/{seed}/{index}").random()
        chars = min(len(novel.text), _CHARS_PER_TOKEN * wanted)
        while True:
            start = int(draw * (len(novel.text) - chars))
            while 0 < start < len(novel.text) and not novel.text[start - 1].isspace():  # where a word begins
                start += 1
            window = novel.text[start : start + chars]
            coded = tokenizer(window, add_special_tokens=False, return_offsets_mapping=True)
            ids, offsets = coded["input_ids"], coded["offset_mapping"]
            if len(ids) >= wanted:
                break
            if chars == len(novel.text):
                raise UserError(
                    f"the text '{novel.name}' has {len(ids):,} tokens; length + continuation need {wanted:,}"
                )
            chars = min(len(novel.text), 2 * chars)
        cut = wanted - self.continuation
        begin, end = (offsets[cut - 1][1] if cut else 0), offsets[wanted - 1][1]
        return Item(
            id=f"{novel.name}.{start}",
            prompt=window[:begin],
            prompt_ids=tuple(first + ids[:cut]),
            target_ids=tuple(ids[cut:wanted]),
            meta={"novel": novel.name, "start": start, "bytes": len(window[begin:end].encode())},
        )
