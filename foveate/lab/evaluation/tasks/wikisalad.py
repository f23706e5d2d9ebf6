"""WikiSalad: questions on interleaved Wikipedia segments, from the four published files of the LuKA paper.

Protocol of that evaluation: a system prompt, the salad and one question as the user's message, greedy decoding, fresh
state for every question. Every question of an example is one item; `limit` counts examples, as the paper does. The
prompt often lacks the evidence (unanswerable questions, or an answer outside the three sentences quoted): `ceiling` is
the share of questions with a gold answer in the prompt, and belongs beside the score.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foveate.errors import DataError
from foveate.io import reading
from foveate.lab.evaluation.metrics import Mean, contains_match, exact_match, f1
from foveate.lab.evaluation.salad import SETS
from foveate.lab.evaluation.tasks import register
from foveate.lab.evaluation.tasks.base import Item, Output, Task, question_setting
from foveate.prompting import Message, question_of

TEMPLATE = "{context}\n\nQuestion: {question}\nAnswer:"
SYSTEM = (
    "You are a helpful assistant that answers questions based on the given context. "
    "Answer in a few words or a short phrase. Do not include explanations."
)


@dataclasses.dataclass(frozen=True)
class ContextQuestions(Task):
    """Questions on a context, one at a time. Score: lenient exact match as published (`em_paper`)."""

    metrics = {key: Mean(key) for key in ("em_paper", "em", "f1")}
    main = "em_paper"
    least = {"max_new_tokens": 1}

    max_new_tokens: int = 32  # longest answer (the paper: 100)
    question: str = question_setting()

    def grade(self, item: Item, output: Output) -> dict[str, float]:
        said = output.text.strip()
        return {
            "em_paper": contains_match(said, item.answers),
            "em": exact_match(said, item.answers),
            "f1": f1(said, item.answers),
        }

    def ceiling(self, items: list[Item]) -> float:
        return 100.0 * sum(item.meta["evidence"] for item in items) / len(items)

    def ask(self, tokenizer: Any, name: str, context: str, question: str, answers: Sequence[str], **meta: Any) -> Item:
        """The item that asks a question on a context; its `meta` tells whether the context holds an answer."""
        evidence = any(answer in context for answer in answers)
        more = {"answers": tuple(answers), "meta": {"evidence": evidence, "question": question.strip(), **meta}}
        prompt, asked = messages(context, question), question_of(TEMPLATE, question=question)
        return self.posed(tokenizer, name, prompt, asked, **more)


@register
class WikiSalad(ContextQuestions):
    """Questions on interleaved Wikipedia segments. Score: lenient exact match as published (`em_paper`)."""

    name = "wikisalad"
    splits = tuple(SETS)

    def files(self, data: Path) -> list[Path]:
        content, source = f"WikiSalad, {self.split}", "foveate salad makes it from SQuAD 2.0's train-v2.0.json"
        return [reading.find_data_file(reading.subfolder(data, "wikisalad"), SETS[self.split].file, content, source)]

    def items(self, data: Path, tokenizer: Any, limit: int, seed: int) -> list[Item]:
        (path,) = self.files(data)
        examples = reading.read_json(path)
        if not isinstance(examples, list) or not examples:
            raise DataError(f"{path}: expected a list of examples")
        return [
            self.ask(
                tokenizer, f"{number}.{index}", example["prompt"], question["question"], question["answers"]["text"]
            )
            for number, example in enumerate(examples[:limit])
            for index, question in enumerate(_questions(path, number, example))
        ]


def messages(context: str, question: str) -> tuple[Message, ...]:
    """The prompt of that evaluation."""
    return (
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": TEMPLATE.format(context=context, question=question)},
    )


def _questions(path: Path, number: int, example: Any) -> list[dict[str, Any]]:
    """The questions of an example, its form checked."""
    where = f"{path}: example {number} (counted from 0)"
    if not isinstance(example, dict) or not isinstance(example.get("prompt"), str):
        raise DataError(f"{where}: expected an object with a text 'prompt'")
    questions = example.get("questions")
    if not isinstance(questions, list) or not questions:
        raise DataError(f"{where}: expected a list 'questions'")
    for index, question in enumerate(questions):
        answers = question.get("answers", {}) if isinstance(question, dict) else {}
        texts = answers.get("text") if isinstance(answers, dict) else None
        fine = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
        if not fine or not isinstance(question.get("question"), str):
            raise DataError(f"{where}: question {index} needs a text 'question' and a list 'answers.text'")
    return questions
