"""Mathematics problems answered step by step: MATH-500 and AIME 2024, where decoding is long and the prompt short.

The prompt is Qwen2.5-Math's; an answer counts if what it has in \\boxed{} equals the published one, as Math-Verify
(Kydlíček, Hugging Face) sees it. With several `samples`, each is an item, and the score is pass@1: the mean over them.
Its interval is over items: it does not tell of other problems if each problem has many samples.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from foveate.errors import UserError, of_extra, require
from foveate.hybrids.training.haystack import Library
from foveate.io import reading
from foveate.lab.evaluation.metrics import Mean
from foveate.lab.evaluation.tasks import register
from foveate.lab.evaluation.tasks.after_novel import length_setting, lengthened, novels_of
from foveate.lab.evaluation.tasks.base import Item, Output, Sampling, Task, some

SYSTEM = r"Please reason step by step, and put your final answer within \boxed{}."
_LONGEST = {"math500": 1024, "aime24": 8192}
_SOURCES = {
    name: f"https://huggingface.co/datasets/HuggingFaceH4/{folder}, where the question is called 'problem'"
    for name, folder in {"math500": "MATH-500", "aime24": "aime_2024"}.items()
}
_ANSWER_CHARS = 500  # more than any answer has; what a model repeats without end would take Math-Verify too long


@register
class Mathematics(Task):
    """Mathematics problems, answered step by step. Score: right final answers (`correct`); `limit` counts problems."""

    name = "math"
    splits = tuple(_LONGEST)
    metrics = {"correct": Mean("correct"), "answer_tokens": Mean("answer_tokens", scale=1.0)}
    main = "correct"
    least = {"max_new_tokens": 1, "samples": 1, "length": 0}

    max_new_tokens: int = 0  # longest answer; 0: 1024 for math500, 8192 for aime24
    samples: int = 1  # answers to each problem
    temperature: float = 0.0  # of the samples; 0: greedy
    top_p: float = 1.0  # share of the mass that tokens are drawn from
    length: int = length_setting()

    def __post_init__(self) -> None:
        if self.max_new_tokens == 0:
            object.__setattr__(self, "max_new_tokens", _LONGEST.get(self.split or self.splits[0], 1))
        super().__post_init__()
        require(0 <= self.temperature < math.inf, f"task '{self.name}': temperature", "0 or more", self.temperature)
        require(0 < self.top_p <= 1, f"task '{self.name}': top_p", "above 0 and at most 1", self.top_p)
        if self.temperature == 0 and (self.samples > 1 or self.top_p < 1):
            raise UserError(f"task '{self.name}': samples and top_p need a temperature above 0")

    def files(self, data: Path) -> list[Path]:
        content = "a JSON object a line, with texts 'question' and 'answer'"
        folder = reading.subfolder(data, "aime")
        problems = reading.find_data_file(folder, f"{self.split}.jsonl", content, _SOURCES[self.split])
        return [problems, *(reading.novel_files(data) if self.length else ())]

    def items(self, data: Path, tokenizer: Any, limit: int, seed: int) -> list[Item]:
        _math_verify()
        path, library = self.files(data)[0], novels_of(data, self.length)
        problems = [
            tuple(reading.field(record, name, str, f"{path}:{line}") for name in ("question", "answer"))
            for line, record in reading.read_jsonl(path)
        ]
        some(problems, "problems", path)
        return [
            self._item(tokenizer, f"{number}/{sample}", *problem, seed, library)
            for number, problem in enumerate(problems[:limit])
            for sample in range(self.samples)
        ]

    def grade(self, item: Item, output: Output) -> dict[str, float]:
        return {"correct": float(is_right(output.text, item.answers[0])), "answer_tokens": float(output.tokens)}

    def _item(self, tokenizer: Any, name: str, question: str, answer: str, seed: int, library: Library | None) -> Item:
        key = f"{self.name}/{self.split}/{seed}/{name}"
        posed = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        prompt = lengthened(tokenizer, posed, library, self.length, key)
        drawn = Sampling(self.temperature, self.top_p, key)
        return self.posed(tokenizer, name, prompt, answers=(answer,), sampling=drawn if self.temperature else None)


def is_right(text: str, answer: str) -> bool:
    """Whether the last \\boxed{} of a text equals the answer (LaTeX without dollars); if it is empty or open, it does
    not, and neither does a text without one.

    For a number in a text that broke off is no answer. Raises `UserError` if Math-Verify is not installed.
    """
    library, boxed = _math_verify(), _last_boxed(text)
    if not boxed.strip():
        return False
    gold, given = (library.parse(rf"\boxed{{{part}}}") for part in (answer, boxed))
    return library.verify(gold, given)


def _last_boxed(text: str) -> str:
    """What the last \\boxed{} holds; nothing if there is none, or if it is not closed."""
    _, _, rest = text.rpartition(r"\boxed")
    rest, depth = rest.lstrip(), 0
    for brace in re.finditer(r"\\.|[{}]", rest[:_ANSWER_CHARS], re.DOTALL):  # not those after a backslash
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return rest[1 : brace.start()] if rest[0] == "{" else ""
    return ""


def _math_verify() -> Any:
    return of_extra("math_verify", "math", "task 'math' needs", "math-verify")
