"""LongProc (Ye et al. 2025, arXiv 2501.05414): procedures carried out step by step, in answers of 500 to 8,000 tokens.

Decoding is long and every step builds on the one before, so errors of sparse decode steps add up. Two of the six tasks
are here. In `tom_tracking` a model tracks where an agent, an object and the agent's belief are after each step of a
story. In `countdown` it searches, depth first, how to reach a number from four others. `pseudo_to_code` would need to
run the programs that a model writes, which foveate never does.

`exact` is the published measure: the whole trace is right, or the solution is a valid one. `partial` is the share of
the reference's lines before the first that differs. The published countdown prompt shows two worked examples that its
code makes; here they are the worked solutions of the last two records, which are never asked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foveate.errors import DataError
from foveate.hybrids.training.haystack import Library
from foveate.io import reading
from foveate.lab.evaluation.metrics import Mean
from foveate.lab.evaluation.tasks import register
from foveate.lab.evaluation.tasks.after_novel import length_setting, lengthened, novels_of
from foveate.lab.evaluation.tasks.base import Item, Output, Task, some

_LONGEST = {"0.5k": 1024, "2k": 3072, "8k": 9216}
_FIELDS = {
    "tom_tracking": {"story": str, "question": str, "solution": str},
    "countdown": {"nums": list, "target": int, "demonstration": str},
}
_PLACES = {"tom_tracking": ("story", "question"), "countdown": ("demonstration", "nums", "target")}
_SPLITS = (*(f"tom_tracking_{size}" for size in _LONGEST), *(f"countdown_{size}" for size in _LONGEST))
_SOURCE = "https://github.com/princeton-pli/LongProc, data/"
_EXAMPLES = 2
_EQUATION = re.compile(r"(\d+)\s*([-+*/])\s*(\d+)\s*=\s*(\d+)")


@register
class LongProc(Task):
    """Procedures carried out step by step. Score: answers that are right as a whole (`exact`)."""

    name = "longproc"
    splits = _SPLITS
    metrics = {"exact": Mean("exact"), "partial": Mean("partial"), "answer_tokens": Mean("answer_tokens", scale=1.0)}
    main = "exact"
    least = {"max_new_tokens": 1, "length": 0}

    max_new_tokens: int = 0  # longest answer; 0: 1024, 3072 or 9216, by the split
    length: int = length_setting()

    def __post_init__(self) -> None:
        if self.max_new_tokens == 0:
            object.__setattr__(self, "max_new_tokens", _LONGEST.get(self.split.rpartition("_")[2], 1024))
        super().__post_init__()

    @property
    def _kind(self) -> str:
        return self.split.rpartition("_")[0]

    def files(self, data: Path) -> list[Path]:
        folder = reading.subfolder(data, "longproc")
        return [
            reading.find_data_file(folder, f"{self.split}.json", "a list of LongProc's records", _SOURCE),
            reading.find_data_file(folder, f"{self._kind}.prompts.yaml", "LongProc's prompt", f"{_SOURCE}{self._kind}"),
            *(reading.novel_files(data) if self.length else ()),
        ]

    def items(self, data: Path, tokenizer: Any, limit: int, seed: int) -> list[Item]:
        path, template, *_ = self.files(data)
        library = novels_of(data, self.length)
        records = reading.read_json(path)
        if not isinstance(records, list):
            raise DataError(f"{path}: expected a list of records, got {type(records).__name__}")
        for number, record in enumerate(records):
            where = f"{path}: record {number}"
            values = {name: reading.field(record, name, kind, where) for name, kind in _FIELDS[self._kind].items()}
            if not all(type(number) is int for number in values.get("nums", ())):
                raise DataError(f"{where}: 'nums' must be whole numbers, got {values['nums']!r}")
            solved = next(reversed(values))
            if not _trace(values[solved]):
                raise DataError(f"{where}: '{solved}' has no step, a line that begins with a hyphen")
        shown = records[-_EXAMPLES:] if self._kind == "countdown" else []
        asked = records[: len(records) - len(shown)][:limit]
        some(asked, "records to ask", path)
        prompt = _template(template, _PLACES[self._kind])
        return [
            self._item(tokenizer, number, record, prompt, shown, library, seed) for number, record in enumerate(asked)
        ]

    def grade(self, item: Item, output: Output) -> dict[str, float]:
        (reference,) = item.answers
        wanted, given = _trace(reference), _trace(output.text)
        right = _solves(output.text, *item.meta["problem"]) if self._kind == "countdown" else given == wanted
        same = next((n for n, (a, b) in enumerate(zip(wanted, given)) if a != b), min(len(wanted), len(given)))
        return {"exact": float(right), "partial": same / len(wanted), "answer_tokens": float(output.tokens)}

    def _item(
        self,
        tokenizer: Any,
        number: int,
        record: Mapping[str, Any],
        prompt: str,
        shown: list[Mapping[str, Any]],
        library: Library | None,
        seed: int,
    ) -> Item:
        if self._kind == "countdown":
            examples = "\n\n".join(
                f"# Example\nNumbers: {one['nums']}\nTarget: {one['target']}\n\n{_worked(one)}" for one in shown
            )
            text = prompt.format(demonstration=examples, nums=record["nums"], target=record["target"])
            reference, meta = _worked(record), {"problem": (record["nums"], record["target"])}
        else:
            text = prompt.format(story=record["story"], question=record["question"])
            reference, meta = record["solution"], {}
        key = f"{self.name}/{self.split}/{seed}/{number}"
        asked = lengthened(tokenizer, [{"role": "user", "content": text}], library, self.length, key)
        return self.posed(tokenizer, f"{number}", asked, answers=(reference,), meta=meta)


def _template(path: Path, places: tuple[str, ...]) -> str:
    """The prompt of a file of LongProc, with these places to be filled. Raises `DataError` for another file."""
    import yaml

    try:
        found = yaml.safe_load(reading.read_text(path))
    except yaml.YAMLError as error:
        raise DataError(f"{path}: malformed YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict) or not isinstance(found.get("USER_PROMPT"), str):
        raise DataError(f"{path}: has no USER_PROMPT")
    try:
        found["USER_PROMPT"].format(**dict.fromkeys(places, ""))
    except (LookupError, ValueError, AttributeError):
        filled = " and ".join(f"{{{place}}}" for place in places)
        raise DataError(f"{path}: USER_PROMPT must have the places {filled}, and no other braces but doubled") from None
    return found["USER_PROMPT"]


def _worked(record: Mapping[str, Any]) -> str:
    """A worked solution with the heading that the prompt asks for."""
    text = record["demonstration"].replace("</Search Procedure>\n", "")
    return text.replace("<Search Procedure>\n", "# Search Procedure\n").strip()


def _trace(text: str) -> list[list[str]]:
    """The steps of an answer, lines that begin with a hyphen (in a search, after a bar): words without articles."""
    lines = [line.strip().removeprefix("|").strip() for line in text.splitlines()]
    steps = [line[1:].lower() for line in lines if line.startswith("-")]
    words = [re.findall(r"[a-z0-9]+|[=!+*/()-]+", step) for step in steps]
    return [[word for word in step if word not in ("a", "an", "the")] for step in words]


def _solves(text: str, numbers: list[int], target: int) -> bool:
    """Whether the text's solution is three equations that use every number once and end at the target."""
    _, _, rest = text.partition("<Solution>")
    solution, closed, _ = rest.partition("</Solution>")
    lines = [line.strip() for line in solution.strip().splitlines()]
    free, last = list(numbers), None
    if not closed or len(lines) != len(numbers) - 1:
        return False
    for line in lines:
        if not (found := _EQUATION.fullmatch(line)):
            return False
        a, sign, b, last = int(found[1]), found[2], int(found[3]), int(found[4])
        made = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[sign]
        if made != last:
            return False
        for number in (a, b):
            if number not in free:
                return False
            free.remove(number)
        free.append(last)
    return last == target
