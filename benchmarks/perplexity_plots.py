"""Perplexity over that of dense attention, paired on the same texts, as plots (LuKA, figures 4 to 6).

    python -m benchmarks.perplexity_plots refined ROWS OUT.png [NAME=VALUE]...
    python -m benchmarks.perplexity_plots modes ROWS OUT.png [NAME=VALUE]...

`refined` draws it against the share of pages refined, a line for each compressor, dashed where values are zero; `modes`
draws each method, one below the other. Conditions choose rows as `foveate plot --where` does. `luka-figures.sh` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.axes import log_if_wide
from foveate.lab.report import lines
from foveate.lab.report.plots import figure
from foveate.lab.report.plots.figure import Look, Point
from foveate.lab.report.plots.frontier import facts, is_dense
from foveate.lab.report.pooled import perplexity_ratio
from foveate.lab.report.rows import Row, chosen, grouped, read

app = typer.Typer()
Where = Annotated[list[str] | None, typer.Argument(help="NAME=VALUE: only such rows.")]
_NAME = "perplexity over that of dense"
_ALONG = ("top_k", "zero_values")
_ASIDE = 0.004  # between intervals that would stand on each other
_COMPRESSORS = {  # by compressor and mass
    ("mean", "exact"): Look("#009E73", "^"),
    ("attention", "exact"): Look("#D55E00", "o"),
    ("random", "exact"): Look("#CC79A7", "s"),
    ("mean", "preserve"): Look("#999933", "D"),
    ("attention", "preserve"): Look("#E69F00", "v"),
    ("random", "preserve"): Look("#882255", "P"),
}


@app.command()
def refined(file: Path, out: Path, where: Where = None) -> None:
    """Against the share of pages refined: methods that refine several shares (top_k=0, or floats)."""
    rows = _rows(file, where)
    by_line = grouped((row for row in rows if _share(row) is not None), lambda row: lines.line(row, _ALONG))
    shown = [row for own in by_line.values() if len({_share(row) for row in own}) > 1 for row in own]
    names, cells = lines.names(shown, _ALONG), lines.cells(lines.with_dense(shown, rows))
    looks, zeroed = _looks(list(names)), any(map(_zeroed, shown))
    with figure.drawing(out, figure.height(len(cells), (1 + zeroed) * len(names))) as page:
        axes = figure.panels(page, len(cells))
        for axis, cell in zip(axes, cells.values()):
            value = _over_dense(cell)
            figure.level(axis, 1.0, None)
            for index, (line, name) in enumerate(names.items()):
                aside = _ASIDE * (index - (len(names) - 1) / 2)
                own = [row for row in cell if lines.line(row, _ALONG) == line]
                for zero, words in ((False, name), (True, f"{name}, values zeroed")):
                    of_kind = [row for row in own if _zeroed(row) == zero]
                    points = sorted(value(row)._replace(x=_share(row) + aside) for row in of_kind)
                    figure.line(axis, points, words, looks[line], int(zero))
            log_if_wide(axis.yaxis, axis.set_yscale, [value(row).y for row in cell])
            axis.set_title(lines.place(cell[0], rows))
        figure.name_axes(axes, "share of the pages refined", _NAME)
        figure.legend(page, axes)
        what = f"{_NAME.capitalize()} against the share of pages refined"
        figure.title(page, what, facts(lines.with_dense(shown, rows), shown, _ALONG, "95 % intervals of the pairs"))


@app.command()
def modes(file: Path, out: Path, where: Where = None) -> None:
    """By method."""
    rows = _rows(file, where)
    specs = list(dict.fromkeys(row["spec"] for row in rows if not is_dense(row)))
    cells = lines.cells(rows)
    with figure.drawing(out, _height(len(cells), len(specs))) as page:
        axes = figure.panels(page, len(cells), sharey=True)
        for axis, cell in zip(axes, cells.values()):
            value = _over_dense(cell)
            figure.level(axis, 1.0, None, upright=True)
            for row in cell:
                if not is_dense(row):
                    _dot(axis, value(row), specs.index(row["spec"]), figure.look(row["method"]))
            log_if_wide(axis.xaxis, axis.set_xscale, [value(row).y for row in cell])
            axis.set_yticks(range(len(specs)), specs)
            axis.set_ylim(len(specs) - 0.5, -0.7)
            axis.grid(False, axis="y")
            axis.set_title(lines.place(cell[0], rows))
            axis.set_xlabel(_NAME)
        what = f"{_NAME.capitalize()}, by method"
        figure.title(page, what, facts(rows, [], (), "95 % intervals of the pairs"))


def _rows(file: Path, where: Sequence[str] | None) -> list[Row]:
    """The rows that meet the conditions, one a method on the same items; dense only where there are others.

    Rows of methods without the ablations' setting `zero_values` have the value False of it.
    """
    found = read([file])
    for row in found:
        if "compressor" in row["settings"]:
            row["settings"] = {"zero_values": False} | row["settings"]
    rows, _ = lines.once(chosen(found, where or []))
    return lines.with_dense([row for row in rows if not is_dense(row)], rows)


def _share(row: Row) -> float | None:
    """The share of its pages that a row's method refines, if its setting is a share."""
    settings = row["settings"]
    if not {"compressor", "mass"} <= settings.keys() or settings.get("refine", "top_k") != "top_k":
        return None
    return float(settings["top_k"]) if settings["top_k"] == 0 or isinstance(settings["top_k"], float) else None


def _zeroed(row: Row) -> bool:
    return row["settings"].get("zero_values", False)


def _over_dense(cell: Sequence[Row]) -> Callable[[Row], Point]:
    """What is drawn of the rows on the same items, dense's among them."""
    dense = next(filter(is_dense, cell))

    def point(row: Row) -> Point:
        interval = perplexity_ratio(row, dense)
        return Point(0.0, interval.value, interval.low, interval.high)

    return point


def _looks(found: Sequence[lines.Line]) -> dict[lines.Line, Any]:
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


def _height(count: int, entries: int) -> float:
    """Inches for so many panels that list so many entries."""
    return 1.0 + -(-count // figure.columns(count)) * (0.7 + 0.32 * entries)


def _dot(axis: Any, point: Point, place: int, style: Look) -> None:
    """One method's value on its line of a list, with its interval and its number."""
    reach = [[point.y - point.low], [point.high - point.y]]
    axis.errorbar(point.y, place, xerr=reach, color=style.color, marker=style.marker, markersize=7)
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.6}
    number = {"textcoords": "offset points", "ha": "center", "fontsize": 7.5, "bbox": box}
    axis.annotate(f"{point.y:.3f}", (point.y, place), (0, 6), **number)


if __name__ == "__main__":
    app()
