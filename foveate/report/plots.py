"""Result rows as plots: score against keys read, perplexity against the refined share, perplexity by method."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from foveate.evaluation.errors import UserError, unknown
from foveate.report import lines
from foveate.report.figure import FAINT, INK, Look, columns, drawing, legend, look, panels, title
from foveate.report.ratio import perplexity_ratio

Row = Mapping[str, Any]

BUDGETS = (
    *("top_k", "min_k", "expand", "epsilon", "top_p", "max_missed_mass", "max_refined"),
    *("window", "min_window", "tail"),
)
"""Settings that say how much is read: along a line of the frontier they differ."""

_ALONG_FRACTION = ("top_k", "zero_values")
_COMPRESSORS = {  # by compressor and mass
    ("mean", "preserve"): Look("#009E73", "^"),
    ("attention", "preserve"): Look("#D55E00", "o"),
    ("random", "preserve"): Look("#CC79A7", "s"),
    ("mean", "exact"): Look("#0072B2", "D"),
    ("attention", "exact"): Look("#E69F00", "v"),
    ("random", "exact"): Look("#7A7A7A", "P"),
}
_DASHES = ("-", "--", ":", "-.")
_SHARES = (0.5, 1, 2.5, 5, 10, 25, 50, 100)
_FINER_SHARES = (*range(1, 11), 12, 15, 20, 25, 30, 40, 50, 60, 80, 100)
_LOG_FROM = 3.0  # a logarithmic axis once the largest value is so many times the smallest
_ASIDE = 0.004  # between intervals that would stand on each other


class Point(NamedTuple):
    """A value with its 95 % interval."""

    x: float
    y: float
    low: float
    high: float


def frontier(
    rows: Sequence[Row],
    out: Path,
    to_dense: bool = False,
    along: Sequence[str] = (),
    recommended: str | None = None,
    margin: float | None = None,
) -> list[str]:
    """Score against the share of keys read in decode: a panel for each task, a line for each method.

    Args:
        rows: of `foveate compare`.
        out: PNG file.
        to_dense: show the paired difference to dense instead of the score.
        along: settings beside the budgets that may differ along one line.
        recommended: spec of the point that gets a star.
        margin: points below dense at which to draw a line.

    Returns:
        What was left out, a line each.

    Raises:
        UserError: for an unknown spec, a file name that is no PNG's, or when matplotlib is missing.
    """
    rows, notes = lines.once(rows)
    if recommended is not None and all(row["spec"] != recommended for row in rows):
        raise unknown("spec", recommended, dict.fromkeys(row["spec"] for row in rows), "--recommended")
    shown = [row for row in rows if _decoded(row)]
    notes += [f"{row['spec']}: took no decode steps, not drawn" for row in rows if row["keys_read_share"] is None]
    if not shown:
        raise UserError("nothing to draw: the rows are all of dense, or took no decode steps")
    along = (*BUDGETS, *along)
    names, cells = lines.names(shown, along), lines.cells(rows)
    methods = [method for method, _ in names]
    with drawing(out, _height(len(cells), len(names))) as figure:
        axes = panels(figure, len(cells))
        for axis, cell in zip(axes, cells.values()):
            level = 0.0 if to_dense else cell[0]["dense_score"]
            dense = next(filter(_dense, cell), None)
            _level(axis, level, None if to_dense or dense is None else (dense["low"], dense["high"]))
            if margin is not None:
                dashes = {"color": FAINT, "linewidth": 0.9, "linestyle": (0, (4, 3))}
                axis.axhline(level - margin, label=f"{margin:g} points below dense", **dashes)
            drawn = [row for row in cell if _decoded(row)]
            for index, (key, name) in enumerate(names.items()):
                points = sorted(_scored(row, to_dense) for row in drawn if lines.line(row, along) == key)
                _line(axis, points, name, look(key[0]), methods[:index].count(key[0]))
            for row in drawn:
                if row["spec"] == recommended:
                    _star(axis, _scored(row, to_dense), look(row["method"]), recommended)
            _share_axis(axis, [100 * row["keys_read_share"] for row in drawn])
            axis.set_title(lines.place(cell[0], rows))
        _name_axes(axes, "keys read in decode", "score − dense, points" if to_dense else "score")
        legend(figure, axes)
        what = "Difference to dense" if to_dense else "Score"
        title(figure, f"{what} against the share of keys that decoding reads", _facts(rows, shown, along, to_dense))
    return notes


def perplexity(rows: Sequence[Row], out: Path, to_dense: bool = False) -> list[str]:
    """Perplexity against the share of pages refined: a line for each compressor, dashed where values are zero.

    Args:
        rows: of the task `perplexity`; those of methods that refine a share of their pages are drawn, and dense.
        out: PNG file.
        to_dense: show the ratio to dense attention, paired on the same texts.

    Returns:
        What was left out, a line each.

    Raises:
        UserError: when no such row is there, for a file name that is no PNG's, or when matplotlib is missing.
    """
    rows, notes = lines.once(_of_perplexity(rows))
    shown = [row for row in rows if _refined(row) is not None]
    others = dict.fromkeys(row["spec"] for row in rows if not _dense(row) and _refined(row) is None)
    notes += [f"{spec}: refines no share of pages, not drawn" for spec in others]
    if not shown:
        raise UserError("nothing to draw: no row of a method that refines a share of its pages (top_k=0 or a float)")
    rows = [row for row in rows if _dense(row) or _refined(row) is not None]
    names, cells = lines.names(shown, _ALONG_FRACTION), lines.cells(rows)
    value = _measure(to_dense, cells)
    zeroed = any(row["settings"]["zero_values"] for row in shown)
    with drawing(out, _height(len(cells), (1 + zeroed) * len(names))) as figure:
        axes = panels(figure, len(cells))
        for axis, cell in zip(axes, cells.values()):
            _perplexity_level(axis, cell, to_dense)
            drawn = []
            for index, (key, name) in enumerate(names.items()):
                aside = _ASIDE * (index - (len(names) - 1) / 2)
                for zero in (False, True):
                    line = [row for row in cell if lines.line(row, _ALONG_FRACTION) == key]
                    line = [row for row in line if row["settings"]["zero_values"] == zero]
                    points = sorted(value(row)._replace(x=_refined(row) + aside) for row in line)
                    settings = dict(key[1])
                    style = _COMPRESSORS.get((settings["compressor"], settings["mass"]), look(key[0]))
                    _line(axis, points, f"{name}, values zeroed" if zero else name, style, int(zero))
                    drawn += points
            _log_if_wide(axis, [point.y for point in drawn])
            axis.set_title(lines.place(cell[0], rows))
        _name_axes(axes, "share of the pages refined", _perplexity_name(to_dense))
        legend(figure, axes)
        what = f"{_perplexity_name(to_dense).capitalize()} against the share of pages refined"
        title(figure, what, _facts(rows, shown, _ALONG_FRACTION, to_dense))
    return notes


def modes(rows: Sequence[Row], out: Path, to_dense: bool = False) -> list[str]:
    """Perplexity of each method, one below the other, beside dense.

    Args:
        rows: of the task `perplexity`.
        out: PNG file.
        to_dense: show the ratio to dense attention, paired on the same texts.

    Returns:
        What was left out, a line each.

    Raises:
        UserError: when no such row is there, for a file name that is no PNG's, or when matplotlib is missing.
    """
    rows, notes = lines.once(_of_perplexity(rows))
    specs = list(dict.fromkeys(row["spec"] for row in rows if not _dense(row)))
    if not specs:
        raise UserError("nothing to draw: the rows are all of dense")
    cells = lines.cells(rows)
    value = _measure(to_dense, cells)
    height = 1.0 + -(-len(cells) // columns(len(cells))) * (0.7 + 0.32 * len(specs))
    with drawing(out, height) as figure:
        axes = panels(figure, len(cells), sharey=True)
        for axis, cell in zip(axes, cells.values()):
            _perplexity_level(axis, cell, to_dense, upright=True)
            for row in cell:
                if not _dense(row):
                    _dot(axis, value(row), specs.index(row["spec"]), look(row["method"]), 3 if to_dense else 2)
            axis.set_yticks(range(len(specs)), specs)
            axis.set_ylim(len(specs) - 0.5, -0.7)
            axis.grid(False, axis="y")
            axis.set_title(lines.place(cell[0], rows))
            axis.set_xlabel(_perplexity_name(to_dense))
        title(figure, f"{_perplexity_name(to_dense).capitalize()}, by method", _facts(rows, [], (), to_dense))
    return notes


# What is drawn of a row


def _dense(row: Row) -> bool:
    return row["method"] == "dense"


def _decoded(row: Row) -> bool:
    return not _dense(row) and row["keys_read_share"] is not None


def _scored(row: Row, to_dense: bool) -> Point:
    fields = ("diff_to_dense", "diff_low", "diff_high") if to_dense else ("score", "low", "high")
    return Point(100 * row["keys_read_share"], *(row[field] for field in fields))


def _refined(row: Row) -> float | None:
    """The share of its pages that a row's method refines, if it is told as a share."""
    settings = row["settings"]
    if not {"compressor", "zero_values", "mass"} <= settings.keys() or settings.get("refine") != "top_k":
        return None
    return float(settings["top_k"]) if settings["top_k"] == 0 or isinstance(settings["top_k"], float) else None


def _of_perplexity(rows: Sequence[Row]) -> list[Row]:
    rows = [row for row in rows if "perplexity" in row["metrics"]]
    if not rows:
        raise UserError("nothing to draw: no row of the task perplexity")
    return rows


def _measure(to_dense: bool, cells: Mapping[lines.Cell, Sequence[Row]]) -> Callable[[Row], Point]:
    """What to draw of a row: its perplexity, or its ratio to that of the dense row on the same items."""
    if not to_dense:
        return lambda row: Point(0.0, *(row["metrics"]["perplexity"][name] for name in ("value", "low", "high")))
    dense = {key: next(filter(_dense, cell), None) for key, cell in cells.items()}
    if None in dense.values():
        raise UserError("no row of dense to compare with; leave --to-dense away, or give the file that has it too")

    def ratio(row: Row) -> Point:
        interval = perplexity_ratio(row, dense[lines.cell(row)])
        return Point(0.0, interval.value, interval.low, interval.high)

    return ratio


# Drawing


def _line(axis: Any, points: Sequence[Point], name: str, style: Look, variant: int) -> None:
    """Points with their intervals, joined; variants of one look differ in their dashes and fillings."""
    if not points:
        return
    x, y = [point.x for point in points], [point.y for point in points]
    reach = [[point.y - point.low for point in points], [point.high - point.y for point in points]]
    axis.errorbar(x, y, yerr=reach, fmt="none", ecolor=style.color, elinewidth=1.1, alpha=0.45)
    dashes, filling = _DASHES[variant % len(_DASHES)], "white" if variant else style.color
    axis.plot(x, y, dashes, color=style.color, marker=style.marker, markerfacecolor=filling, label=name)


def _dot(axis: Any, point: Point, place: int, style: Look, digits: int) -> None:
    """One method's value on its line of a list, with its interval and its number."""
    reach = [[point.y - point.low], [point.high - point.y]]
    axis.errorbar(point.y, place, xerr=reach, color=style.color, marker=style.marker, markersize=7)
    number = {"textcoords": "offset points", "ha": "center", "fontsize": 7.5}
    axis.annotate(f"{point.y:.{digits}f}", (point.y, place), (0, 6), **number)


def _star(axis: Any, point: Point, style: Look, name: str) -> None:
    edge = {"markeredgecolor": INK, "markeredgewidth": 0.9, "zorder": 5}
    axis.plot(point.x, point.y, "*", markersize=15, color=style.color, label=f"recommended: {name}", **edge)


def _level(axis: Any, value: float, interval: tuple[float, float] | None, upright: bool = False) -> None:
    """The line of dense attention, and its interval as a band."""
    color = look("dense").color
    (axis.axvline if upright else axis.axhline)(value, color=color, linewidth=1.2, label="dense")
    if interval is not None:
        (axis.axvspan if upright else axis.axhspan)(*interval, color=color, alpha=0.08, linewidth=0)


def _perplexity_level(axis: Any, cell: Sequence[Row], to_dense: bool, upright: bool = False) -> None:
    row = next(filter(_dense, cell), None)
    if to_dense:
        _level(axis, 1.0, None, upright)
    elif row is not None:
        metric = row["metrics"]["perplexity"]
        _level(axis, metric["value"], (metric["low"], metric["high"]), upright)


def _share_axis(axis: Any, shares: Sequence[float]) -> None:
    """Percent on a logarithmic axis, with numbers where they can be read."""
    axis.set_xscale("log")
    least, most = (min(shares) / 1.25, max(shares) * 1.25) if shares else (1.0, 100.0)
    axis.set_xlim(least, most)
    ticks, finer = ([share for share in shares if least <= share <= most] for shares in (_SHARES, _FINER_SHARES))
    axis.set_xticks(ticks if len(ticks) > 2 else finer)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    axis.xaxis.set_minor_formatter(lambda value, _: "")


def _log_if_wide(axis: Any, values: Sequence[float]) -> None:
    if not values or max(values) <= _LOG_FROM * min(values):
        return
    axis.set_yscale("log")
    for set_formatter in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
        set_formatter(lambda value, _: f"{value:g}" if _leading(value) in (1, 2, 3, 5) else "")


def _leading(value: float) -> float:
    """The value between 1 and 10 that a power of ten makes of it."""
    return round(value / 10 ** math.floor(math.log10(value) + 1e-9), 6)


def _name_axes(axes: Sequence[Any], x: str, y: str) -> None:
    across = columns(len(axes))
    for index, axis in enumerate(axes):
        if index + across >= len(axes):
            axis.set_xlabel(x)
        if index % across == 0:
            axis.set_ylabel(y)


def _perplexity_name(to_dense: bool) -> str:
    return "perplexity over that of dense" if to_dense else "perplexity"


def _facts(rows: Sequence[Row], shown: Sequence[Row], along: Sequence[str], paired: bool) -> str:
    """On what all was measured, and what is set in the lines beside what their names say."""
    intervals = "95 % intervals of the pairs" if paired else "95 % intervals"
    facts = [f"{lines.circumstances(rows)} · {intervals}", lines.common(shown, along)]
    return "\n".join(filter(None, facts))


def _height(count: int, entries: int) -> float:
    """Inches for so many panels and so many lines in the legend."""
    across = columns(count)
    return 0.9 + -(-count // across) * {1: 4.4, 2: 3.3, 3: 2.6}[across] + 0.2 * -(-entries // 3)
