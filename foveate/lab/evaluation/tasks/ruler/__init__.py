"""RULER's 13 synthetic tasks at any length (Hsieh et al. 2024, arXiv:2404.06654, section 3 and table 5), one a split.

Wording, counts, answer lengths and metrics equal the published generator's in its version of 2025 (the one whose
definitions say `noise`). The differences:

- The essays are the novels of the data folder, since Paul Graham's are not at hand.
- `length` is the whole prompt, chat template and answer prefix included, and each item is fitted to it by whole units:
  to the word of an essay, a line, a word of a list, a document. RULER counts the answer's tokens in, steps by up to 25
  lines or 500 words, and fits the first item only.
- Every item draws everything anew, from a generator of its own; keys, values and names are distinct. RULER shuffles all
  items of a length alike, and its keys may repeat.
- The one-shot examples of `vt` and `cwe` stand before the question in the same message, with any chat template.
- No space stands between a chat template and the answer prefix. RULER puts one there; after plain text both do.
- `qa_1` and `qa_2` draw their questions from all over the file; RULER takes them in the order of the file.

As published there is no stop string: answers end with the model's end token or at the limit, and a model that goes on
after its answer is not punished by the metric.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from pathlib import Path
from typing import Any

from foveate.errors import DataError, UserError, require
from foveate.lab.evaluation.metrics import Mean, string_match, string_match_part
from foveate.lab.evaluation.tasks import register
from foveate.lab.evaluation.tasks.base import Item, Output, Task, question_setting
from foveate.lab.evaluation.tasks.niah import longest
from foveate.lab.evaluation.tasks.ruler.counting import CommonWords, FrequentWords
from foveate.lab.evaluation.tasks.ruler.draft import Draft, Draw, Kind
from foveate.lab.evaluation.tasks.ruler.needles import Needles
from foveate.lab.evaluation.tasks.ruler.questions import Questions
from foveate.lab.evaluation.tasks.ruler.tracking import VariableTracking
from foveate.prompting import Message

_KINDS: dict[str, Kind] = {
    "niah_single_1": Needles(haystack="noise"),
    "niah_single_2": Needles(haystack="essay"),
    "niah_single_3": Needles(haystack="essay", value_kind="uuid"),
    "niah_multikey_1": Needles(haystack="essay", keys=4),
    "niah_multikey_2": Needles(haystack="needles"),
    "niah_multikey_3": Needles(haystack="needles", key_kind="uuid", value_kind="uuid"),
    "niah_multivalue": Needles(haystack="essay", values=4),
    "niah_multiquery": Needles(haystack="essay", keys=4, queries=4),
    "vt": VariableTracking(hops=4),
    "cwe": CommonWords(),
    "fwe": FrequentWords(),
    "qa_1": Questions(dataset="squad"),
    "qa_2": Questions(dataset="hotpotqa"),
}
_SHORTEST = 256
_BEGINNING = 3


@register
class Ruler(Task):
    """RULER: needles, variable tracking, word counting, questions. Score: the references found in the answer.

    `begun` asks for the first three characters of each alone: small models find a number and then miscopy it.
    """

    name = "ruler"
    splits = tuple(_KINDS)
    metrics = {name: Mean(name) for name in ("string_match", "begun")}
    main = "string_match"
    least = {"beyond": 0, "length": _SHORTEST, "max_new_tokens": 0}

    length: int = 4096  # tokens of the whole prompt
    max_new_tokens: int = 0  # longest answer; 0: RULER's of the split
    question: str = question_setting()
    beyond: int = dataclasses.field(default=0, metadata={"later": True})
    """`niah_single_*` and `niah_multikey_*`: least tokens from the needle to the prompt's end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beyond and not self.split.startswith(("niah_single", "niah_multikey")):
            raise UserError(f"task 'ruler': beyond is for niah_single_* and niah_multikey_*, not for {self.split}")
        allowed = f"below half of the length, {self.length}"
        require(self.beyond < self.length // 2, "task 'ruler': beyond", allowed, self.beyond)

    def files(self, data: Path) -> list[Path]:
        if not Path(data).is_dir():
            raise DataError(f"{data}: no such folder")
        return _KINDS[self.split].files(Path(data))

    def items(self, data: Path, tokenizer: Any, limit: int, seed: int) -> list[Item]:
        self.files(data)
        draw = _KINDS[self.split].drawer(Path(data), tokenizer, self.length, seed)
        drawn = (self._drawn(tokenizer, draw, seed, index) for index in range(limit))
        return list(itertools.takewhile(lambda item: item is not None, drawn))

    def grade(self, item: Item, output: Output) -> dict[str, float]:
        match = string_match_part if self.split.startswith("qa") else string_match
        begun = [answer[:_BEGINNING] for answer in item.answers]
        return {"string_match": match(output.text, item.answers), "begun": match(output.text, begun)}

    def _drawn(self, tokenizer: Any, draw: Draw, seed: int, index: int) -> Item | None:
        """An item, drawn anew while its needle is too near; None where the data have no more."""
        rng = random.Random(f"ruler/{self.split}/{seed}/{index}")
        while draft := draw(rng, index):
            item = self._item(tokenizer, draft, f"{index}")
            if not self.beyond:
                return item
            text = item.prompt[-1]["content"]
            after = tokenizer.encode(text[text.rindex(item.answers[0]) :], add_special_tokens=False)
            if len(after) >= self.beyond:
                return item

    def _item(self, tokenizer: Any, draft: Draft, name: str) -> Item:
        def prompt(size: int) -> tuple[Message, ...]:
            return ({"role": "user", "content": draft.text(size)},)

        def ids_of(size: int) -> list[int]:
            return self.encoded(tokenizer, prompt(size), *asked)[0]

        asked = draft.question, draft.answer_prefix
        spare = max(int(draft.step), self.length // 800)
        size, ids = longest(draft.sizes, self.length, ids_of, draft.step, spare, draft.least)
        if draft.source and size == draft.sizes[-1] and len(ids) < 0.99 * self.length:
            raise UserError(
                f"{draft.source} give a prompt of {len(ids):,} tokens at most; a length of {self.length:,} needs more"
            )
        longest_answer = self.max_new_tokens or _KINDS[self.split].new_tokens
        more = {"answers": draft.answers, "max_new_tokens": longest_answer, "meta": draft.meta}
        return self.posed(tokenizer, name, prompt(size), *asked, **more)
