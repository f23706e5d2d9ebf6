"""Compare rows that were measured again with the older ones of `results/`: `recheck.sh` measures ten.

    python -m benchmarks.recheck runs/recheck.jsonl NEW.jsonl...

Items pair up, so that a change of the code shows as a mean difference with its 95 % interval. The table has the old and
the new score, that difference, how many items changed, and whether the interval leaves out zero; if one does, the
command ends with 1.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import typer

from foveate.errors import DataError
from foveate.lab.evaluation import tasks
from foveate.lab.evaluation.metrics import paired_bootstrap
from foveate.lab.report.markdown import columns, context_length, interval, score
from foveate.lab.report.rows import Row, read
from foveate.lab.results.measurements import SCHEMA

RESULTS = Path(__file__).parent / "results"
FILES = ("kascade-accuracy.jsonl", "luka-niah.jsonl", "luka-wikisalad.jsonl")
_SHOWN = ("score", "low", "high", "dense_score", "commit", "device", "batch_size")


def compare(new: Sequence[Row], old: Sequence[Row]) -> list[dict[str, Any]]:
    """A line for each new row but dense's: scores, paired difference, items that changed.

    Raises:
        DataError: for a row without exactly one older row of its method, model and items.
    """
    lines = []
    for row in (row for row in new if row["method"] != "dense"):
        found = [one for one in old if _cell(one) == _cell(row)]
        if len(found) != 1:
            raise DataError(f"{len(found)} rows of {row['spec']} on the items of {row['task']} {row['split']}")
        lines.append(_line(found[0], row))
    return lines


def _cell(row: Row) -> tuple[Any, ...]:
    return row["model"], row["spec"], row["run"]["weights"], row["run"]["items"]


def _line(old: Row, new: Row) -> dict[str, Any]:
    aggregate = tasks.get(new["task"]).metrics[tasks.get(new["task"]).main]
    mine, theirs = ({name: np.array(row["item_values"][name]) for name in old["item_values"]} for row in (new, old))
    change = paired_bootstrap(aggregate, mine, theirs, new["seed"])
    changed = [any(mine[name][item] != theirs[name][item] for name in theirs) for item in range(new["n"])]
    return {
        "schema": SCHEMA,
        "cell": new["spec"].partition(":")[0],
        **{name: new[name] for name in ("spec", "model", "task", "split", "length", "n")},
        "old": {name: old[name] for name in _SHOWN},
        "new": {name: new[name] for name in _SHOWN},
        "change": dataclasses.asdict(change),
        "items_changed": sum(changed),
        "differs": not change.low <= 0 <= change.high,
        "versions": new["versions"],
    }


def table(lines: Sequence[Row]) -> str:
    """A Markdown table of the comparisons of old rows with new ones."""
    return columns(
        lines,
        {
            "method": lambda line: f"`{line['spec']}`",
            "comparison": lambda line: f"{line['task']} {line['split']}, {context_length(line['length'])} tokens",
            "old [95 %]": lambda line: score(line["old"]),
            "new [95 %]": lambda line: score(line["new"]),
            "new - old, paired [95 %]": lambda line: interval(line["change"], 1, "+"),
            "items changed": lambda line: f"{line['items_changed']} of {line['n']}",
            "differs": lambda line: "yes" if line["differs"] else "no",
        },
    )


def main(out: Path, new: list[Path]) -> None:
    """Compare new rows with those of `results/`, and write a line for each."""
    lines = compare(read(new), read([RESULTS / name for name in FILES]))
    out.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    typer.echo(table(lines))
    if any(line["differs"] for line in lines):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
