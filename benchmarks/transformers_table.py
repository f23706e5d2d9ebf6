"""The table of :mod:`benchmarks.transformers_tests`."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.table_kinds import pivot
from foveate.lab.report.markdown import NONE, markdown_table, titled
from foveate.lab.report.rows import Row


def table(rows: Sequence[Row]) -> str:
    """How many of the tests that Transformers does not skip pass, and why others do not."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        ran = sum(len(row[name]) for name in ("passed", "refused", "failed"))
        passed = len(row["passed"])
        plain = f" ({passed + len(row['plain']['passed'])})" if row["refused"] else ""
        cells.setdefault(f"`{row['method']}`", {})[row["model"]] = f"{passed}{plain} of {ran}"
    counts = pivot(["attached"], cells, dict.fromkeys(row["model"] for row in rows))
    title = (
        "Tests that pass as they are (and without attention weights and padding), among the tests that are not skipped"
    )
    return f"{titled(title, rows, counts)}\n\n{_reasons(rows)}"


def _reasons(rows: Sequence[Row]) -> str:
    """A line for each reason: how many tests pass plainly that are refused by it as they are, and which do not."""
    passing: dict[str, set[str]] = {}
    others: dict[str, set[str]] = {}
    for row in rows:
        plain = row["plain"]
        refused = row["refused"] | plain["refused"]
        failed = row["failed"] | plain["failed"]
        for test, reason in row["refused"].items():
            if test in plain["passed"]:
                passing.setdefault(f"refused: {reason}", set()).add(test)
        for how, ended in (("refused", refused), ("failed", failed)):
            for test in sorted(ended.keys() - set(plain["passed"]) - (failed.keys() if how == "refused" else set())):
                others.setdefault(f"{how}: {ended[test]}", set()).add(test)
    lines = [("reason", "tests that pass without attention weights and padding", "tests that do not")]
    for reason in {**passing, **others}:
        names = ", ".join(f"`{name}`" for name in sorted(others.get(reason, ())))
        lines.append((reason, f"{len(passing.get(reason, ()))}", names or NONE))
    return markdown_table(lines)
