"""Methods that hold the same share of the context, side by side: what each keeps of the answers."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence

from foveate.report.markdown import markdown_table, score, titled
from foveate.report.rows import Row, grouped
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
    return "\n\n".join(_table(*which, some) for which, some in grouped(rows, _asked).items())


def _asked(row: Row) -> Asked:
    split = row["split"] if row["task"] == "ruler" else row["task"]
    return split, row["task_settings"].get("question", "with")


def _table(split: str, question: str, rows: Sequence[Row]) -> str:
    others = [row for row in rows if row["method"] != "dense"]
    found = grouped(sorted(others, key=lambda row: row["keys_read_share"]), lambda row: _kind(row["spec"]))
    counts = sorted({len(some) for some in found.values()})
    if len(counts) != 1:
        raise UserError(f"methods must have as many budgets each on {split}, not {counts}")
    budgets = list(zip(*found.values(), strict=True))
    lines = [["method", *(f"{statistics.median(row['keys_read_share'] for row in some):.0%}" for some in budgets)]]
    lines += [["dense", *[score(row)] * len(budgets)] for row in rows if row["method"] == "dense"]
    order = dict.fromkeys(_kind(row["spec"]) for row in others)
    lines += [[f"`{line}`", *map(score, found[line])] for line in order]
    lengths = ", ".join(sorted({f"{row['task_settings']['length']:,}" for row in rows}))
    items = ", ".join(sorted({str(row["n"]) for row in rows}))
    place = {"with": "in the prompt", "after": "after eviction"}[question]
    title = f"{split}, {lengths} tokens, question {place}, n = {items}, scores [95 %] at a share of the keys"
    return titled(title, rows, markdown_table(lines))


def _kind(spec: str) -> str:
    """A spec without the settings of its budget."""
    name, _, settings = spec.partition(":")
    return ":".join(filter(None, (name, _BUDGET.sub("", settings).strip(","))))
