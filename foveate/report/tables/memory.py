"""Methods that hold the same share of the context, side by side: what each keeps of the answers."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence

from foveate.report.markdown import made_with, markdown_table
from foveate.report.rows import Row
from foveate.results.errors import UserError

_BUDGET = re.compile(r"(top_k|window|min_k|sinks|file)=[^,]*,?")
"""Settings that say how much is held, and not what."""
Asked = tuple[str, str]
"""A split, and where its question stands."""


def table(rows: Sequence[Row]) -> str:
    """A table for each task and place of the question: a line for each method, a column for each share of the keys.

    A method is its spec without the settings of its budget. Its budgets are sorted by the share of the keys that it
    reads; a column's share is the median over the methods.

    Raises:
        UserError: for methods with other numbers of budgets on a task.
    """
    asked: dict[Asked, list[Row]] = {}
    for row in rows:
        split = row["split"] if row["task"] == "ruler" else row["task"]
        asked.setdefault((split, row["task_settings"].get("question", "with")), []).append(row)
    return "\n\n".join(_table(*which, some) for which, some in asked.items())


def _table(split: str, question: str, rows: Sequence[Row]) -> str:
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["keys_read_share"]):
        if row["method"] != "dense":
            found.setdefault(_kind(row["spec"]), []).append(row)
    counts = sorted({len(some) for some in found.values()})
    if len(counts) != 1:
        raise UserError(f"methods must have as many budgets each on {split}, not {counts}")
    budgets = list(zip(*found.values(), strict=True))
    lines = [["method", *(f"{statistics.median(row['keys_read_share'] for row in some):.0%}" for some in budgets)]]
    lines += [["dense", *[_score(row)] * len(budgets)] for row in rows if row["method"] == "dense"]
    order = dict.fromkeys(_kind(row["spec"]) for row in rows if row["method"] != "dense")
    lines += [[f"`{line}`", *map(_score, found[line])] for line in order]
    lengths = ", ".join(sorted({f"{row['task_settings']['length']:,}" for row in rows}))
    items = ", ".join(sorted({str(row["n"]) for row in rows}))
    place = {"with": "in the prompt", "after": "after eviction"}[question]
    title = f"{split}, {lengths} tokens, question {place}, n = {items}, scores [95 %] at a share of the keys"
    return f"{title} ({made_with(rows)}):\n\n{markdown_table(lines)}"


def _kind(spec: str) -> str:
    """A spec without the settings of its budget."""
    name, _, settings = spec.partition(":")
    return ":".join(filter(None, (name, _BUDGET.sub("", settings).strip(","))))


def _score(row: Row) -> str:
    return f"{row['score']:.1f} [{row['low']:.1f}, {row['high']:.1f}]"
