"""Multiple choice by likelihood: PIQA, SIQA, BoolQ, ARC, WinoGrande, HellaSwag and SciQ, as lm-eval-harness asks them.

Every answer is scored teacher-forced after its prompt, with no example before it. The model's choice is the likeliest
answer (`acc`), or the likeliest by log-likelihood over characters (`acc_norm`). Prompts are lm-eval-harness's, made
from the files of llm-foundry. Its SIQA has two of the three answers, so that chance is 50 % there and not 33 %.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from foveate.errors import DataError
from foveate.io import reading
from foveate.lab.evaluation.metrics import Mean
from foveate.lab.evaluation.tasks import register
from foveate.lab.evaluation.tasks.base import Item, Option, Output, Task, drawn, some
from foveate.prompting import encode_continued

_FOUNDRY = "https://github.com/mosaicml/llm-foundry, scripts/eval/local_data"
_SIQA = re.compile(r"Context: (.*)\nQuestion: (.*)\nChoices:\nA\. (.*)\nB\. (.*)\nAnswer:", re.DOTALL)


class _Question(NamedTuple):
    """Prompts and their answers, one pair an option, and the right one."""

    prompts: tuple[str, ...]
    answers: tuple[str, ...]
    gold: int


class _Set(NamedTuple):
    """A data set: its file, what an object of it holds, where it is to be had, how it is read and scored."""

    file: str
    content: str
    source: str
    read: Callable[[Any, str], _Question]
    main: str = "acc"


def _texts(value: Any, name: str, where: str, least: int = 2) -> tuple[str, ...]:
    texts = reading.field(value, name, list, where)
    if len(texts) < least or not all(isinstance(text, str) and text.strip() for text in texts):
        raise DataError(f"{where}: expected {least} or more texts, none of them empty, in '{name}'")
    return tuple(texts)


def _question(prompt: str, answers: tuple[str, ...], gold: int, where: str, name: str = "gold") -> _Question:
    if not 0 <= gold < len(answers):
        raise DataError(f"{where}: '{name}' must be from 0 to {len(answers) - 1}, not {gold}")
    return _Question((prompt,) * len(answers), answers, gold)


def _asked(ending: str, drop: str = "") -> Callable[[Any, str], _Question]:
    """Reads objects with a `query`, which goes on with `ending`, `choices` and `gold`; `drop` leads some queries."""

    def read(value: Any, where: str) -> _Question:
        query = reading.field(value, "query", str, where).strip().removeprefix(drop)
        return _question(
            query + ending, _texts(value, "choices", where), reading.field(value, "gold", int, where), where
        )

    return read


def _siqa(value: Any, where: str) -> _Question:
    match = _SIQA.fullmatch(reading.field(value, "query", str, where))
    if match is None:
        raise DataError(f"{where}: expected 'query' to hold a context, a question and the choices A and B")
    context, question, *answers = match.groups()
    gold = reading.field(value, "gold", int, where)
    return _question(f"Q: {context} {question}\nA:", tuple(answers), gold, where)


def _winogrande(value: Any, where: str) -> _Question:
    prompts = _texts(value, "context_options", where)
    rest, gold = reading.field(value, "continuation", str, where), reading.field(value, "gold", int, where)
    one = _question("", (rest,) * len(prompts), gold, where)
    return one._replace(prompts=prompts)


def _hellaswag(value: Any, where: str) -> _Question:
    label, begun, cut = (reading.field(value, name, str, where) for name in ("activity_label", "ctx_a", "ctx_b"))
    prompt = _without_brackets(f"{label}: {begun} {cut.capitalize()}")
    answers = tuple(map(_without_brackets, _texts(value, "endings", where)))
    return _question(prompt, answers, reading.field(value, "label", int, where), where, "label")


def _sciq(value: Any, where: str) -> _Question:
    support, question, *answers = (
        reading.field(value, name, str, where)
        for name in ("support", "question", "distractor1", "distractor2", "distractor3", "correct_answer")
    )
    return _question(f"{support.lstrip()}\nQuestion: {question}\nAnswer:", tuple(answers), 3, where)


def _without_brackets(text: str) -> str:
    """WikiHow's text without its marks, as lm-eval-harness cleans it."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


_CHOICES = "an object a line, with 'query' (text), 'choices' (texts) and 'gold' (number)"


def _of_foundry(folder: str, name: str, read: Callable[[Any, str], _Question], main: str = "acc") -> _Set:
    return _Set(f"{name}.jsonl", _CHOICES, f"{_FOUNDRY}/{folder}/{name}.jsonl", read, main)


_SETS = {
    "piqa": _of_foundry("commonsense_reasoning", "piqa", _asked("\nAnswer:")),
    "siqa": _of_foundry("commonsense_reasoning", "siqa", _siqa),
    "boolq": _of_foundry("reading_comprehension", "boolq", _asked("\nAnswer:", "Passage: ")),
    "arc_easy": _of_foundry("world_knowledge", "arc_easy", _asked("\nAnswer:")),
    "arc_challenge": _of_foundry("world_knowledge", "arc_challenge", _asked("\nAnswer:"), "acc_norm"),
    "winogrande": _of_foundry("language_understanding", "winogrande", _winogrande)._replace(
        content="an object a line, with 'context_options' (texts), 'continuation' (text) and 'gold' (number)"
    ),
    "hellaswag": _Set(
        "hellaswag_val_1000.jsonl",
        "an object a line, with 'activity_label', 'ctx_a', 'ctx_b' (texts), 'endings' (texts) and 'label' (number)",
        "https://github.com/rowanz/hellaswag, data/hellaswag_val.jsonl or lines of it",
        _hellaswag,
        "acc_norm",
    ),
    "sciq": _Set(
        "sciq.jsonl",
        "an object a line, with the texts 'support', 'question', 'distractor1' to 'distractor3' and 'correct_answer'",
        "https://huggingface.co/datasets/allenai/sciq, its test split as JSON Lines",
        _sciq,
    ),
}


@register
class MultipleChoice(Task):
    """Multiple choice by likelihood. Score: right answers, percent; by length for `arc_challenge` and `hellaswag`."""

    name = "choice"
    splits = tuple(_SETS)
    metrics = {name: Mean(name) for name in ("acc", "acc_norm")}

    @property
    def main(self) -> str:  # type: ignore[override]
        """The metric that is usual for the split."""
        return _SETS[self.split].main

    def files(self, data: Path) -> list[Path]:
        one = _SETS[self.split]
        return [reading.find_data_file(reading.subfolder(data, "commonsense"), one.file, one.content, one.source)]

    def items(self, data: Path, tokenizer: Any, limit: int, seed: int) -> list[Item]:
        (path,) = self.files(data)
        records = list(reading.read_jsonl(path))
        some(records, "questions", path)
        chosen = drawn(records, limit, f"choice/{self.split}/{seed}")
        read = _SETS[self.split].read
        return [_item(tokenizer, read(value, f"{path}:{line}"), line) for line, value in chosen]

    def grade(self, item: Item, output: Output) -> dict[str, float]:
        per_character = [nll / len(text) for nll, text in zip(output.option_nlls, item.meta["options"])]
        gold = item.meta["gold"]
        return {
            "acc": float(_likeliest(output.option_nlls) == gold),
            "acc_norm": float(_likeliest(per_character) == gold),
        }

    def said(self, item: Item, output: Output) -> str:
        return item.meta["names"][_likeliest(output.option_nlls)]


def _item(tokenizer: Any, question: _Question, line: int) -> Item:
    pairs = [encode_continued(tokenizer, *pair) for pair in zip(question.prompts, (f" {a}" for a in question.answers))]
    options = tuple(Option(tuple(prompt), tuple(target)) for prompt, target in pairs)
    same = len(set(question.answers)) < len(question.answers)  # WinoGrande's choices differ in their prompts
    names = question.prompts if same else question.answers
    return Item(
        id=f"{line}",
        prompt=question.prompts[0],
        prompt_ids=options[0].prompt_ids,
        answers=(names[question.gold],),
        options=options,
        meta={"gold": question.gold, "options": question.answers, "names": names},
    )


def _likeliest(nlls: Any) -> int:
    """The first of the options with the smallest negative log-likelihood."""
    return min(range(len(nlls)), key=lambda number: nlls[number])
