"""What a task is: items to ask, how an answer is graded, and how grades become metrics."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from foveate.errors import UserError, require, unknown
from foveate.lab.evaluation.metrics import Aggregate
from foveate.prompting import Message, Prompt, encode, encode_turns

T = TypeVar("T")
QUESTION = ("with", "after")
"""How a question is read: with its context, or after it as a second turn, so that methods evict before they see it."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How an answer's tokens are drawn: at a `temperature` above 0, from the fewest that have `top_p` of the mass.

    The draws are a function of `seed`: they are the same for every method, and in every batch.
    """

    temperature: float
    top_p: float
    seed: str


@dataclasses.dataclass(frozen=True)
class Option:
    """One of the answers that an item lets the model weigh: a prompt `[L]` and its continuation `[T]`, tokenised."""

    prompt_ids: tuple[int, ...]
    target_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Item:
    """One question put to a model.

    `prompt_ids` `[L]` is what the model reads: the prompt with its template and answer prefix, tokenised. If
    `context_tokens` is above 0, that many first tokens are a turn of their own. A method finishes this turn, and evicts
    at its end, before it reads the question. Otherwise all tokens are read at once. An item with `target_ids` `[T]` is
    scored teacher-forced (T decode steps), and so is each of its `options`, if it has them. An item with neither is
    answered greedily, or by `sampling`, up to `max_new_tokens` tokens or the first `stop` string.
    """

    id: str
    prompt: str | tuple[Message, ...]
    prompt_ids: tuple[int, ...]
    answers: tuple[str, ...] = ()
    answer_prefix: str = ""
    max_new_tokens: int = 0
    stop: str = ""
    target_ids: tuple[int, ...] = ()
    options: tuple[Option, ...] = ()
    sampling: Sampling | None = None
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    context_tokens: int = 0

    @property
    def texts(self) -> tuple[Option, ...]:
        """What is scored teacher-forced: the options, or the prompt with its target; nothing of a question."""
        if self.target_ids:
            return (Option(self.prompt_ids, self.target_ids),)
        return self.options

    @property
    def positions(self) -> int:
        """Positions that the model needs for prompt and answer."""
        scored = max((len(text.prompt_ids) + len(text.target_ids) for text in self.texts), default=0)
        return max(scored, len(self.prompt_ids) + self.max_new_tokens)


@dataclasses.dataclass(frozen=True)
class Output:
    """A model's result for an item: its text and number of `tokens`, the end token included; or the summed negative
    log-likelihood (nats) of the target tokens, and for each of them whether the model finds it the likeliest; or that
    likelihood for each option.

    If the tokens are an answer that another method has given, two numbers compare the methods along it. `divergence` is
    the summed KL divergence (nats) between this method's distributions and the distributions from which the answer was
    chosen; `agreed` is the number of tokens at which both methods choose alike.
    """

    text: str = ""
    nll: float = 0.0
    hits: tuple[bool, ...] = ()
    option_nlls: tuple[float, ...] = ()
    tokens: int = 0
    divergence: float = 0.0
    agreed: int = 0


@dataclasses.dataclass(frozen=True)
class Task:
    """A kind of item and its grading; the fields are the task's settings.

    A new task is one file in this folder: a class derived from `Task` and decorated by `tasks.register`.
    """

    name: ClassVar[str]
    splits: ClassVar[tuple[str, ...]]
    metrics: ClassVar[Mapping[str, Aggregate]]
    main: ClassVar[str]  # the metric that is the row's `score`, in 0..100
    least: ClassVar[Mapping[str, int]] = {}  # the least value of settings that are numbers
    follows_dense_answers: ClassVar[bool] = False
    """Whether methods go along dense attention's answers instead of giving their own."""
    own_data: ClassVar[Path | None] = None
    """The folder of data that comes with foveate, read where none is given."""

    split: str = ""

    def __post_init__(self) -> None:
        """Raises `UserError` for a setting that cannot be."""
        if not self.split:
            object.__setattr__(self, "split", self.splits[0])
        if self.split not in self.splits:
            raise unknown("split", self.split, self.splits, f"task '{self.name}'")
        if getattr(self, "question", "with") not in QUESTION:
            raise unknown("question", self.question, QUESTION, f"task '{self.name}'")
        for name, smallest in self.least.items():
            self.at_least(name, smallest)

    def at_least(self, name: str, smallest: int) -> None:
        """Raises `UserError` if the setting `name` is below `smallest`."""
        value = getattr(self, name)
        require(value >= smallest, f"task '{self.name}': {name}", f"at least {smallest}", value)

    def settings(self) -> dict[str, Any]:
        """All settings as JSON-able values, without those at their default that came later."""
        later = {field.name: field.default for field in dataclasses.fields(self) if field.metadata.get("later")}
        values = dataclasses.asdict(self).items()
        return {name: value for name, value in values if name not in later or value != later[name]}

    def arguments(self) -> list[str]:
        """The task as arguments of `foveate compare`."""
        settings = ",".join(f"{key}={value}" for key, value in self.settings().items())
        return [f"--task {self.name}:{settings}"]

    def least_positions(self, data: Path) -> int:
        """Positions that the model needs for a prompt and its answer by the settings alone, before any is read."""
        return sum(getattr(self, name, 0) for name in ("length", "continuation", "max_new_tokens"))

    def files(self, data: Path) -> list[Path]:
        """The files of the data folder that the items are made of. Raises `DataError` if they are missing."""
        raise NotImplementedError

    def reads(self, data: Path, out: Path) -> bool:
        """Whether the task would take the rows in ``out`` for data."""
        return False

    def needs_dense(self, data: Path) -> bool:
        """Whether the data holds no answers, so that methods can only be compared with dense attention's answers."""
        return False

    def items(self, data: Path, tokenizer: Any, limit: int, seed: int) -> list[Item]:
        """The first `limit` items (or examples, if the task counts these), a function of the arguments alone; fewer
        where the data holds no more.

        Raises `DataError` for malformed data and `UserError` if there is none.
        """
        raise NotImplementedError

    def encoded(
        self, tokenizer: Any, prompt: Prompt, question: str = "", answer_prefix: str = ""
    ) -> tuple[list[int], int]:
        """Ids of a prompt that ends with this question, and how many are a turn before it (0: none)."""
        if getattr(self, "question", "with") == "with":
            return encode(tokenizer, prompt, answer_prefix), 0
        return encode_turns(tokenizer, prompt, question, answer_prefix)

    def posed(
        self, tokenizer: Any, name: str, prompt: Prompt, question: str = "", answer_prefix: str = "", **more: Any
    ) -> Item:
        """An item that is answered; its prompt ends with the question."""
        ids, before = self.encoded(tokenizer, prompt, question, answer_prefix)
        more = {"max_new_tokens": self.max_new_tokens, "answer_prefix": answer_prefix} | more
        return Item(name, prompt, tuple(ids), context_tokens=before, **more)

    def grade(self, item: Item, output: Output) -> dict[str, float]:
        """The item's values, from which the metrics aggregate; the same keys for every item."""
        raise NotImplementedError

    def said(self, item: Item, output: Output) -> str:
        """The output in words, for a reader."""
        return output.text

    def ceiling(self, items: list[Item]) -> float:
        """The best `score` that a reader of the prompts alone could reach, 0..100."""
        return 100.0


def question_setting() -> Any:
    """The setting `question` of tasks that ask about a context, one of :data:`QUESTION`; rows leave out its default."""
    return dataclasses.field(default="with", kw_only=True, metadata={"later": True})


def some(records: Sequence[Any], what: str, path: Path) -> None:
    """Check that a file holds records. Raises `UserError` that names the file and `what` they are if it holds none."""
    if not records:
        raise UserError(f"{path}: holds no {what}")


def drawn(records: Sequence[T], limit: int, key: str) -> list[T]:
    """The first `limit` of the records in an order that is a function of `key`."""
    return random.Random(key).sample(records, len(records))[:limit]


def items_digest(items: Sequence[Item]) -> str:
    """A fingerprint of the items' prompts, answers and options (16 hex digits)."""
    total = hashlib.sha256()
    for item in items:
        asked = [item.id, item.prompt_ids, item.target_ids, item.answers, item.stop]
        options = [[option.prompt_ids, option.target_ids] for option in item.options]
        total.update(json.dumps([*asked, options] if options else asked).encode())
        total.update(f"{item.context_tokens}".encode() if item.context_tokens else b"")
    return total.hexdigest()[:16]
