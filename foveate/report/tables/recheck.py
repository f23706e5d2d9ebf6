"""The table of cells that were measured again: `benchmarks/recheck.py`."""

from __future__ import annotations

from collections.abc import Sequence

from foveate.report.markdown import columns, interval, score
from foveate.report.rows import Row


def table(lines: Sequence[Row]) -> str:
    """A Markdown table of the comparisons of old rows with new ones."""
    return columns(
        lines,
        {
            "method": lambda line: f"`{line['spec']}`",
            "comparison": lambda line: f"{line['task']} {line['split']}, {line['length']:,} tokens",
            "old [95 %]": lambda line: score(line["old"]),
            "new [95 %]": lambda line: score(line["new"]),
            "new - old, paired [95 %]": lambda line: interval(line["change"], 1, "+"),
            "items changed": lambda line: f"{line['items_changed']} of {line['n']}",
            "differs": lambda line: "yes" if line["differs"] else "no",
        },
    )
