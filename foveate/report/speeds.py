"""Speed rows as tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table

from foveate.report.table import size, time

Row = Mapping[str, Any]
_FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("gb_per_s", "GB/s", lambda rate: f"{rate:,.1f}"),
    ("tflop_per_s", "TFLOP/s", lambda rate: f"{rate:,.2f}"),
    ("peak_bytes", "peak", size),
)
"""Fields, their columns and cells; a table leaves out a column that would be empty."""


def speeds(rows: Sequence[Row]) -> Group:
    """One table for each phase of the bench, one line for each row: case, time, factor over the baseline, rates, peak.

    What all cases of a table have in common stands in its title.
    """
    phases: dict[Any, list[Row]] = {}
    for row in rows:
        phases.setdefault(row["case"].get("phase"), []).append(row)
    return Group(*map(_table, phases.values()))


def _table(rows: Sequence[Row]) -> Table:
    first = next(iter(rows[0]["case"]))  # which names a row that is alone
    common = {
        key: value
        for key, value in rows[0]["case"].items()
        if all(row["case"].get(key) == value for row in rows) and (len(rows) > 1 or key != first)
    }
    title = f"{rows[0]['bench']} · " + " · ".join(f"{key} {value}" for key, value in common.items())
    table = Table(
        title=f"{title}\n{rows[0]['device']}", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    own = list(dict.fromkeys(key for row in rows for key in row["case"] if key not in common))
    figures = [one for one in _FIGURES if any(row[one[0]] is not None for row in rows)]
    texts = {key: [str(row["case"].get(key, "–")) for row in rows] for key in own}
    for key in own:
        table.add_column(key, min_width=_longest_word([key, *texts[key]]), overflow="fold")
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("speed-up", justify="right", no_wrap=True)
    table.add_column("over", min_width=_longest_word([row["baseline"] for row in rows]), overflow="fold")
    for _, name, _ in figures:
        table.add_column(name, justify="right", no_wrap=True)
    for number, row in enumerate(rows):
        table.add_row(
            *(texts[key][number] for key in own),
            time(row["ms"]),
            f"{row['speedup']:.2f}×",
            row["baseline"],
            *("–" if row[field] is None else cell(row[field]) for field, _, cell in figures),
        )
    return table


def _longest_word(texts: Sequence[str]) -> int:
    """Columns that a text needs so that no word is broken."""
    return max(len(word) for text in texts for word in text.split() or [""])
