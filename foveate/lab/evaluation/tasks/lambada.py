"""LAMBADA (Paperno et al. 2016): the last word of a passage that only the whole passage tells.

Scored as lm-eval-harness scores `lambada_openai`: the word is right if each of its tokens is the likeliest one, and the
perplexity is of the word, not of its tokens.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from foveate.io import reading
from foveate.lab.evaluation.metrics import Mean
from foveate.lab.evaluation.tasks import register
from foveate.lab.evaluation.tasks.base import Item, Output, Task, drawn, some
from foveate.prompting import encode_continued

_FILE = "lambada_openai.jsonl"
_SOURCE = "https://github.com/mosaicml/llm-foundry, scripts/eval/local_data/language_understanding/lambada_openai.jsonl"


@register
class Lambada(Task):
    """The last word of a passage of a novel. Score: share of the words whose tokens are all the likeliest, percent."""

    name = "lambada"
    splits = ("openai",)
    metrics = {"accuracy": Mean("right"), "perplexity": lambda values: np.exp(values["nll"].mean(axis=-1))}
    main = "accuracy"

    def files(self, data: Path) -> list[Path]:
        folder = reading.subfolder(data, "commonsense")
        content = "an object a line, with the texts 'context' and 'continuation'"
        return [reading.find_data_file(folder, _FILE, content, _SOURCE)]

    def items(self, data: Path, tokenizer: Any, limit: int, seed: int) -> list[Item]:
        (path,) = self.files(data)
        records = list(reading.read_jsonl(path))
        some(records, "passages", path)
        items = []
        for line, value in drawn(records, limit, f"lambada/{seed}"):
            texts = (reading.field(value, name, str, f"{path}:{line}") for name in ("context", "continuation"))
            context, word = map(str.strip, texts)
            prompt, target = encode_continued(tokenizer, context, f" {word}")
            items.append(Item(f"{line}", context, tuple(prompt), answers=(word,), target_ids=tuple(target)))
        return items

    def grade(self, item: Item, output: Output) -> dict[str, float]:
        return {"right": float(all(output.hits)), "nll": output.nll}

    def said(self, item: Item, output: Output) -> str:
        return f"{'right' if all(output.hits) else 'wrong'}, perplexity {math.exp(min(output.nll, 700)):.2f}"
