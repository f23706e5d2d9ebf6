"""The table of cells that were measured again: `benchmarks/recheck.py`."""

from __future__ import annotations

from collections.abc import Sequence

from foveate.report.markdown import columns
from foveate.report.rows import Row


def table(lines: Sequence[Row]) -> str:
    """A Markdown table of the comparisons of old rows with new ones."""

    def score(side: Row) -> str:
        return f"{side['score']:.1f} [{side['low']:.1f}, {side['high']:.1f}]"

    return columns(
        lines,
        {
            "method": lambda line: f"`{line['spec']}`",
            "comparison": lambda line: f"{line['task']} {line['split']}, {line['length']:,} tokens",
            "old [95 %]": lambda line: score(line["old"]),
            "new [95 %]": lambda line: score(line["new"]),
            "new - old, paired [95 %]": lambda line: "{value:+.1f} [{low:+.1f}, {high:+.1f}]".format(**line["change"]),
            "items changed": lambda line: f"{line['items_changed']} of {line['n']}",
            "differs": lambda line: "yes" if line["differs"] else "no",
        },
    )
