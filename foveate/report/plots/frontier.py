"""Result rows as plots: score against what is read, perplexity against the refined share, perplexity by method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from foveate.report import lines, pooled
from foveate.report.plots import figure
from foveate.report.plots.figure import Look, Point
from foveate.report.ratio import perplexity_ratio
from foveate.report.rows import Row
from foveate.results.errors import UserError, unknown

BUDGETS = (
    *("top_k", "min_k", "expand", "epsilon", "top_p", "max_refined"),
    *("window", "min_window", "tail"),
)
"""Settings that say how much is read: along a line of the frontier they differ."""

_ALONG_FRACTION = ("top_k", "zero_values")
_COMPRESSORS = {  # by compressor and mass
    ("mean", "exact"): Look("#009E73", "^"),
    ("attention", "exact"): Look("#D55E00", "o"),
    ("random", "exact"): Look("#CC79A7", "s"),
    ("mean", "preserve"): Look("#999933", "D"),
    ("attention", "preserve"): Look("#E69F00", "v"),
    ("random", "preserve"): Look("#882255", "P"),
}


class _Read(NamedTuple):
    """How much a decode step reads, as an axis."""

    name: str
    words: str
    """In the title."""
    unit: str
    scale: float
    """Of the unit in the rows' own."""
    ticks: Sequence[float]
    finer: Sequence[float]
    """Ticks where the others are too few."""


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
_ASIDE = 0.004  # between intervals that would stand on each other


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

    Keys that are read to choose others count, so that their share is also that of the cache's bytes.

    Args:
        rows: of `foveate compare`.
        out: PNG file.
        along: settings beside the budgets that may differ along one line.
        recommended: spec of the point that gets a star.
        margin: points below dense at which to draw a line.
        over_splits: show splits whose names differ in a last number as one.
        against: ``keys_read_share``, or ``kv_bytes_per_step``: bytes of keys and values, of a sequence and all layers.

    Returns:
        What was left out, a line each.

    Raises:
        UserError: for an unknown spec, setting or field, when nothing is to be drawn, and as :func:`figure.check` does.
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
    shown = [row for row in rows if not _dense(row) and row[against] is not None]
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
            dense = next(filter(_dense, cell), None)
            level = cell[0]["dense_score"]
            figure.level(axis, level, None if dense is None else (dense["low"], dense["high"]))
            if margin is not None:
                figure.margin(axis, level - margin, f"{margin:g} point{'s' * (margin != 1)} below dense")
            drawn = [row for row in cell if not _dense(row)]
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
        figure.title(page, f"Score against {read.words}", _facts(rows, shown, along, False))
    return notes


def perplexity(rows: Sequence[Row], out: Path, to_dense: bool = False) -> list[str]:
    """Perplexity against the share of pages refined: a line for each compressor, dashed where values are zero.

    Args:
        rows: of the task `perplexity`; drawn are those of methods that refine a share of their pages, and dense.
        to_dense: show the ratio to dense attention, paired on the same texts.

    Returns what was left out, and raises `UserError`, as :func:`frontier` does.
    """
    rows, notes = lines.once(_of_perplexity(rows))
    shown = _of_several_shares(rows)
    if not shown:
        raise UserError("nothing to draw: no rows that refine several shares of their pages (top_k=0, or floats)")
    kept = {id(row) for row in shown}
    others = [row for row in rows if not _dense(row) and id(row) not in kept]
    notes += [f"{row['spec']}: on no line of several shares, not drawn" for row in others]
    rows = lines.with_dense(shown, rows)
    names, cells = lines.names(shown, _ALONG_FRACTION), lines.cells(rows)
    value, looks = _measure(to_dense, cells), _compressor_looks(names)
    zeroed = any(_zeroed(row) for row in shown)
    with figure.drawing(out, figure.height(len(cells), (1 + zeroed) * len(names))) as page:
        axes = figure.panels(page, len(cells))
        for axis, cell in zip(axes, cells.values()):
            _perplexity_level(axis, cell, to_dense)
            for index, (line, name) in enumerate(names.items()):
                aside = _ASIDE * (index - (len(names) - 1) / 2)
                own = [row for row in cell if lines.line(row, _ALONG_FRACTION) == line]
                for zero, words in ((False, name), (True, f"{name}, values zeroed")):
                    of_kind = [row for row in own if _zeroed(row) == zero]
                    points = sorted(value(row)._replace(x=_refined(row) + aside) for row in of_kind)
                    figure.line(axis, points, words, looks[line], int(zero))
            figure.log_if_wide(axis.yaxis, axis.set_yscale, [value(row).y for row in cell])
            axis.set_title(lines.place(cell[0], rows))
        figure.name_axes(axes, "share of the pages refined", _perplexity_name(to_dense))
        figure.legend(page, axes)
        what = f"{_perplexity_name(to_dense).capitalize()} against the share of pages refined"
        figure.title(page, what, _facts(rows, shown, _ALONG_FRACTION, to_dense))
    return notes


def modes(rows: Sequence[Row], out: Path, to_dense: bool = False) -> list[str]:
    """Perplexity of each method, one below the other, beside dense.

    Arguments, what is returned and what is raised are those of :func:`perplexity`.
    """
    rows, notes = lines.once(_of_perplexity(rows))
    shown = [row for row in rows if not _dense(row)]
    if not shown:
        raise UserError("nothing to draw: the rows are all of dense")
    rows, specs = lines.with_dense(shown, rows), list(dict.fromkeys(row["spec"] for row in shown))
    cells = lines.cells(rows)
    value = _measure(to_dense, cells)
    with figure.drawing(out, figure.list_height(len(cells), len(specs))) as page:
        axes = figure.panels(page, len(cells), sharey=True)
        for axis, cell in zip(axes, cells.values()):
            _perplexity_level(axis, cell, to_dense, upright=True)
            for row in cell:
                if not _dense(row):
                    digits = 3 if to_dense else 2
                    figure.dot(axis, value(row), specs.index(row["spec"]), figure.look(row["method"]), digits)
            figure.log_if_wide(axis.xaxis, axis.set_xscale, [value(row).y for row in cell])
            axis.set_yticks(range(len(specs)), specs)
            axis.set_ylim(len(specs) - 0.5, -0.7)
            axis.grid(False, axis="y")
            axis.set_title(lines.place(cell[0], rows))
            axis.set_xlabel(_perplexity_name(to_dense))
        figure.title(page, f"{_perplexity_name(to_dense).capitalize()}, by method", _facts(rows, [], (), to_dense))
    return notes


# What is drawn of a row


def _dense(row: Row) -> bool:
    return row["method"] == "dense"


def _of_perplexity(rows: Sequence[Row]) -> list[Row]:
    rows = [row for row in rows if "perplexity" in row["metrics"]]
    if not rows:
        raise UserError("nothing to draw: no row of the task perplexity")
    return rows


def _refined(row: Row) -> float | None:
    """The share of its pages that a row's method refines, if its setting is a share."""
    settings = row["settings"]
    if not {"compressor", "mass"} <= settings.keys() or settings.get("refine", "top_k") != "top_k":
        return None
    return float(settings["top_k"]) if settings["top_k"] == 0 or isinstance(settings["top_k"], float) else None


def _zeroed(row: Row) -> bool:
    """Whether a row's summaries have values of zero, a setting of older rows."""
    return row["settings"].get("zero_values", False)


def _of_several_shares(rows: Sequence[Row]) -> list[Row]:
    """The rows on lines that can be drawn: methods that refine a share of the pages, with more than one share."""
    shares: dict[lines.Line, set[float]] = {}
    refining = [(row, lines.line(row, _ALONG_FRACTION)) for row in rows if _refined(row) is not None]
    for row, line in refining:
        shares.setdefault(line, set()).add(_refined(row))
    return [row for row, line in refining if len(shares[line]) > 1]


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


# Looks and words


def _compressor_looks(found: Sequence[lines.Line]) -> dict[lines.Line, Look]:
    """A look for each line: its method's if it has one line only, else that of compressor and mass, each only once."""
    looks: dict[lines.Line, Look] = {}
    methods, spare = [method for method, _ in found], iter(figure.SPARE)
    for method, settings in found:
        values = dict(settings)
        own = _COMPRESSORS.get((values["compressor"], values["mass"]))
        if methods.count(method) == 1:
            own = figure.look(method)
        looks[method, settings] = next(spare, figure.look(method)) if own in (None, *looks.values()) else own
    return looks


def _perplexity_level(axis: Any, cell: Sequence[Row], to_dense: bool, upright: bool = False) -> None:
    row = next(filter(_dense, cell), None)
    if to_dense:
        figure.level(axis, 1.0, None, upright)
    elif row is not None:
        metric = row["metrics"]["perplexity"]
        figure.level(axis, metric["value"], (metric["low"], metric["high"]), upright)


def _read_axis(axis: Any, amounts: Sequence[float], read: _Read) -> None:
    """A logarithmic axis with numbers where they can be read."""
    least, most = min(amounts) / 1.25, max(amounts) * 1.25
    ticks, finer = ([tick for tick in choice if least <= tick <= most] for choice in (read.ticks, read.finer))
    axis.set_xscale("log")
    axis.set_xlim(least, most)
    axis.set_xticks(ticks if len(ticks) > 2 else finer)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g} {read.unit}")
    axis.xaxis.set_minor_formatter(lambda value, _: "")


def _perplexity_name(to_dense: bool) -> str:
    return "perplexity over that of dense" if to_dense else "perplexity"


def _facts(rows: Sequence[Row], shown: Sequence[Row], along: Sequence[str], paired: bool) -> str:
    """On what all was measured, and what is set in the lines beside what their names say."""
    intervals = "95 % intervals of the pairs" if paired else "95 % intervals"
    facts = [f"{lines.circumstances(rows)} · {intervals}", lines.common(shown, along)]
    return "\n".join(filter(None, facts))
