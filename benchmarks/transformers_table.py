"""The table of :mod:`benchmarks.transformers_tests`."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.table_kinds import pivot
from foveate.lab.report.markdown import NONE, markdown_table, titled
from foveate.lab.report.rows import Row, grouped


def table(rows: Sequence[Row]) -> str:
    """How many of the tests that Transformers does not skip pass, and why others do not."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        ran = sum(len(row[name]) for name in ("passed", "refused", "failed"))
        passed = len(row["passed"])
        plain = f" ({passed + len(row['plain']['passed'])})" if row["refused"] else ""
        cells.setdefault(row["method"], {})[row["model"]] = f"{passed}{plain} of {ran}"
    counts = pivot(["attached"], cells, dict.fromkeys(row["model"] for row in rows))
    title = "Tests that pass as they are (and without attention weights and padding), of those that are not skipped"
    return f"{titled(title, rows, counts)}\n\n{_reasons(rows)}"


def _reasons(rows: Sequence[Row]) -> str:
    ended = [
        (f"{how}: {reason}", test, test in row["plain"]["passed"])
        for row in rows
        for how in ("refused", "failed")
        for test, reason in (row[how] | row["plain"][how]).items()
    ]
    lines = [("reason", "tests that pass without attention weights and padding", "tests that do not")]
    for reason, own in grouped(ended, lambda one: one[0]).items():
        names = [sorted({test for _, test, passes in own if passes == wanted}) for wanted in (True, False)]
        lines.append((reason, f"{len(names[0])}", ", ".join(f"`{name}`" for name in names[1]) or NONE))
    return markdown_table(lines)
