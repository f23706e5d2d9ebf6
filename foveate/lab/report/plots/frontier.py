"""Score against what decoding reads, as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from foveate.errors import UserError, unknown
from foveate.lab.report import lines, pooled
from foveate.lab.report.plots import figure
from foveate.lab.report.plots.figure import Point
from foveate.lab.report.rows import Row

BUDGETS = (*("top_k", "min_k", "expand", "epsilon", "top_p", "max_refined"), *("window", "tail"))
"""Settings that say how much is read: along a line of the frontier they differ."""


class _Read(NamedTuple):
    """How much a decode step reads, as an axis."""

    name: str
    words: str  # in the title
    unit: str
    scale: float  # of the unit in the rows' own
    ticks: Sequence[float]
    finer: Sequence[float]  # ticks where the others are too few


_MEGABYTES = [10.0**power for power in range(-3, 7)]
_READ = {
    "keys_read_share": _Read(
        "keys read in decode",
        "the share of keys that decoding reads",
        "%",
        100,
        (0.5, 1, 2.5, 5, 10, 25, 50, 100),
        (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 60, 100),
    ),
    "kv_bytes_per_step": _Read(
        "bytes read in a decode step, a sequence",
        "the bytes of keys and values that a decode step reads",
        "MB",
        1e-6,
        [first * power for power in _MEGABYTES for first in (1, 2, 5)],
        [first * power for power in _MEGABYTES for first in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)],
    ),
}
"""What a frontier can be drawn against: fields of the rows."""


def frontier(
    rows: Sequence[Row],
    out: Path,
    along: Sequence[str] = (),
    recommended: str | None = None,
    margin: float | None = None,
    over_splits: bool = False,
    against: str = "keys_read_share",
) -> list[str]:
    """Score against what decoding reads: a panel for each task, a line for each method.

    Keys that are read to choose other keys count, too, so that the share of keys equals the share of the cache's bytes.

    Args:
        along: settings beside the budgets that may differ along one line.
        recommended: spec of the point that gets a star.
        margin: points below dense at which to draw a line.
        over_splits: show splits whose names differ in a last number as one.
        against: ``keys_read_share``, or ``kv_bytes_per_step``: bytes of keys and values, of a sequence and all layers.

    Returns the reasons why rows were left out, a line each. Raises `UserError` for an unknown spec, setting or field,
    when nothing is to be drawn, and as :func:`figure.check` does.
    """
    if against not in _READ:
        raise unknown("field", against, _READ, "--against")
    read = _READ[against]
    rows, notes = lines.once(rows)
    if over_splits:
        rows, left = pooled.over_splits(rows)
        notes += left
    if recommended is not None and all(row["spec"] != recommended for row in rows):
        raise unknown("spec", recommended, dict.fromkeys(row["spec"] for row in rows), "--recommended")
    settings = dict.fromkeys(name for row in rows for name in row["settings"])
    for name in along:
        if name not in settings:
            raise unknown("setting", name, settings, "--along")
    shown = [row for row in rows if not is_dense(row) and row[against] is not None]
    for row in rows:
        if row[against] is None:
            why = "what it reads is not counted" if row["method"] == "own" else "took no decode steps"
            notes.append(f"{row['spec']}: {why}, not drawn")
    if not shown:
        raise UserError("nothing to draw: the rows are all of dense, or took no decode steps")
    rows, along = lines.with_dense(shown, rows), (*BUDGETS, *along)
    names, cells = lines.names(shown, along), lines.cells(rows)

    def scored(row: Row) -> Point:
        return Point(read.scale * row[against], row["score"], row["low"], row["high"])

    methods = [method for method, _ in names]
    with figure.drawing(out, figure.height(len(cells), len(names), max(map(len, names.values())))) as page:
        axes = figure.panels(page, len(cells))
        for axis, cell in zip(axes, cells.values()):
            dense = next(filter(is_dense, cell), None)
            level = cell[0]["dense_score"]
            figure.level(axis, level, None if dense is None else (dense["low"], dense["high"]))
            if margin is not None:
                figure.margin(axis, level - margin, f"{margin:g} point{'s' * (margin != 1)} below dense")
            drawn = [row for row in cell if not is_dense(row)]
            for index, (line, name) in enumerate(names.items()):
                points = sorted(scored(row) for row in drawn if lines.line(row, along) == line)
                figure.line(axis, points, name, figure.look(line[0]), methods[:index].count(line[0]))
            for row in drawn:
                if row["spec"] == recommended:
                    figure.star(axis, scored(row), figure.look(row["method"]), recommended)
            _read_axis(axis, [scored(row).x for row in drawn], read)
            axis.set_title(lines.place(cell[0], rows))
        figure.name_axes(axes, read.name, "score")
        figure.legend(page, axes)
        figure.title(page, f"Score against {read.words}", facts(rows, shown, along))
    return notes


def is_dense(row: Row) -> bool:
    return row["method"] == "dense"


def _read_axis(axis: Any, amounts: Sequence[float], read: _Read) -> None:
    """A logarithmic axis with numbers where they can be read."""
    least, most = min(amounts) / 1.25, max(amounts) * 1.25
    ticks, finer = ([tick for tick in choice if least <= tick <= most] for choice in (read.ticks, read.finer))
    axis.set_xscale("log")
    axis.set_xlim(least, most)
    axis.set_xticks(ticks if len(ticks) > 2 else finer)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g} {read.unit}")
    axis.xaxis.set_minor_formatter(lambda value, _: "")


def facts(rows: Sequence[Row], shown: Sequence[Row], along: Sequence[str], intervals: str = "95 % intervals") -> str:
    """On what all was measured, and what is set in the lines beside what their names say."""
    found = [f"{lines.circumstances(rows)} · {intervals}", lines.common(shown, along)]
    return "\n".join(filter(None, found))
