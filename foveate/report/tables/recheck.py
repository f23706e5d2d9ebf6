"""The table of cells that were measured again: `benchmarks/recheck.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foveate.report.markdown import markdown_table


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of the lines."""
    rows = [
        ("method", "comparison", "old [95 %]", "new [95 %]", "new - old, paired [95 %]", "items changed", "differs")
    ]
    for line in lines:
        sides = (f"{side['score']:.1f} [{side['low']:.1f}, {side['high']:.1f}]" for side in (line["old"], line["new"]))
        change = line["change"]
        rows.append(
            (
                f"`{line['spec']}`",
                f"{line['task']} {line['split']}, {line['length']:,} tokens",
                *sides,
                f"{change['value']:+.1f} [{change['low']:+.1f}, {change['high']:+.1f}]",
                f"{line['items_changed']} of {line['n']}",
                "yes" if line["differs"] else "no",
            )
        )
    return markdown_table(rows)
