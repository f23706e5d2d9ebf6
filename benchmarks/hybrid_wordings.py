"""Whether hybrids find a needle however it is worded: `python -m benchmarks.hybrid_wordings --help`.

    python -m benchmarks.hybrid_wordings DATA OUT_FOLDER MODEL...

MODEL: folders of `foveate train`; DATA: a folder with ruler/ and books/ (docs/guide/data.md). The items are RULER's
numbers in novels, alone and among four keys, at least 400 tokens from the end of a prompt of 1,024. They are asked
three times: in RULER's own wording; in the nineteen other wordings that `foveate train` has; and in ten that it does
not have. Writes OUT_FOLDER/hybrids-wordings.jsonl, of all models that were asked into this folder, and goes on where
it was stopped (OUT_FOLDER/wordings). Ten minutes of a CPU core for each model.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from foveate.errors import UserError, unknown
from foveate.hybrids.models import HybridConfig
from foveate.hybrids.training.templates import RULER, TEMPLATES, Template
from foveate.io import outfile
from foveate.lab.evaluation import runner
from foveate.lab.evaluation.tasks import Item
from foveate.lab.evaluation.tasks.ruler import Ruler

UNTAUGHT = (
    Template("", "Note the {kind} {value}: it was given to {key}.", "\nThe {kind} given to {key} was", ""),
    Template("", "They painted {value} on the door of {key}.", "\nOn the door of {key} they painted", ""),
    Template("", "To reach {key}, dial {value}.", "\nQuestion: What must be dialled to reach {key}?", " Answer: dial"),
    Template("", "Whoever asks for {key} is sent to {value}.", "\nTo where is one who asks for {key} sent?", " To"),
    Template("", "File {value} is about {key}.", "\nWhich file is about {key}?", " File"),
    Template(
        "One line of this text is about a train.\n",
        "Train {value} stops at {key}.",
        "\nWhich train stops at {key}?",
        " Train",
    ),
    Template("", "({key}, {value}) was entered in the table.", "\nThe pair entered in the table was ({key},", ""),
    Template("", "{key} weighs {value} grams.", "\nHow many grams does {key} weigh?", " It weighs"),
    Template(
        "", "The {kind} on the badge of {key} was {value}.", "\nWhat {kind} did the badge of {key} show?", " It showed"
    ),
    Template("", "{value} people live in {key}.", "\nHow many people live in {key}?", " The people who live there are"),
)
"""Wordings that no training has: ten with other verbs, and with the value before and after the key."""
WORDINGS = {"ruler": (RULER,), "taught": TEMPLATES[1:], "untaught": UNTAUGHT}
SPLITS = ("niah_single_2", "niah_multikey_1")
LENGTH, FAR = 1024, 430
"""Tokens of a prompt, and the least from a needle to its end in RULER's wording; others are 30 shorter at most."""
_PARTS = {"kind": r"(?P<kind>\w+)", "key": r"(?P<key>.+?)", "value": r"(?P<value>\S+)"}
_RULER_NEEDLE = re.compile(RULER.needle.replace(".", r"\.").format(**_PARTS))


@dataclasses.dataclass(frozen=True)
class Reworded(Ruler):
    """RULER's needles in novels, with their sentences and the question worded otherwise; graded as RULER's are."""

    name = "reworded"
    splits = SPLITS

    wording: str = "ruler"
    """One of :data:`WORDINGS`. An item has the wording that its number comes to, one after the other."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wording not in WORDINGS:
            raise unknown("wording", self.wording, WORDINGS, f"task '{self.name}'")

    def items(self, data: Path, tokenizer: Any, limit: int, seed: int) -> list[Item]:
        of = WORDINGS[self.wording]
        found = super().items(data, tokenizer, limit, seed)
        return [self._reworded(tokenizer, item, of[number % len(of)]) for number, item in enumerate(found)]

    def _reworded(self, tokenizer: Any, item: Item, template: Template) -> Item:
        """The item in the words of a template; its question and prefix end the message."""
        _, text = item.prompt[-1]["content"].split("\n", 1)
        context, _ = text.rsplit("\n", 1)
        kind = _RULER_NEEDLE.search(context)["kind"]
        context = _RULER_NEEDLE.sub(lambda needle: template.needle.format(**needle.groupdict()), context)
        parts = (part.format(kind=kind, key=item.meta["keys"][0]) for part in (template.introduction, *template[2:]))
        introduction, question, prefix = parts
        message = {"role": "user", "content": f"{introduction}{context}{question}{prefix}"}
        more = {"answers": item.answers, "max_new_tokens": item.max_new_tokens, "meta": item.meta}
        return self.posed(tokenizer, item.id, (message,), **more)


def main(
    data: Path,
    out: Path,
    models: Annotated[list[Path], typer.Argument()],
    limit: Annotated[int, typer.Option(help="items of a split and wording")] = 100,
    batch_size: int = 25,
) -> None:
    """Ask each model in all wordings."""
    of = {path: HybridConfig.from_pretrained(path).mixers for path in models}
    parts = out / "wordings"
    parts.mkdir(parents=True, exist_ok=True)
    for path, mixers in of.items():
        chosen, _ = runner.parse_methods(["dense" if "attn" in mixers else "own"])
        for wording in WORDINGS:
            for split in SPLITS:
                task = Reworded(split=split, wording=wording, length=LENGTH, beyond=FAR, max_new_tokens=16)
                file = parts / f"{path.name}-{wording}-{split}.jsonl"
                plan = runner.Comparison(path, task, data, chosen, limit, file, batch_size=batch_size)
                for row in runner.run(runner.prepare(plan)):
                    print(f"{path.name:22} {row['score']:6.1f}  {wording} {split}", flush=True)
    rows = "".join(path.read_text(encoding="utf-8") for path in sorted(parts.glob("*.jsonl")))
    outfile.write(out / "hybrids-wordings.jsonl", rows.encode())


if __name__ == "__main__":
    try:
        typer.run(main)
    except UserError as error:
        sys.exit(f"error: {error}")
