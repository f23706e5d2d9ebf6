"""What something was to reach, beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from foveate.report.markdown import markdown_table

Row = Mapping[str, Any]
Judge = Callable[[Sequence[Row]], "tuple[str, bool] | None"]
"""From rows what was measured, and whether it is enough; None if it was not."""
NONE = "–"


class Goal(NamedTuple):
    what: str
    paper: str
    """The paper's number."""
    goal: str
    judge: Judge


def table(goals: Iterable[Goal], rows: Sequence[Row]) -> str:
    """A line for each goal: the paper's number, the goal, what was measured, and whether the goal is met."""
    lines = [("", "paper", "goal", "measured", "met")]
    for goal in goals:
        found = goal.judge(rows)
        measured, met = ("not yet", NONE) if found is None else (found[0], "yes" if found[1] else "no")
        lines.append((goal.what, goal.paper, goal.goal, measured, met))
    return markdown_table(lines)
