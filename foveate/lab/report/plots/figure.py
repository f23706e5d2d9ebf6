"""What all plots share: a PNG without a display, one style, one look for a method, marks with intervals."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from foveate.errors import UserError, of_extra
from foveate.io import outfile

WIDTH = 10.0  # inches; with the resolution below about twice the width at which a README shows a picture
DPI = 170
INK, FAINT = "#222222", "#8A8A8A"
_STYLE = {
    **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), 9),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 8),
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **{"axes.titlelocation": "left", "axes.edgecolor": FAINT, "axes.linewidth": 0.8, "axes.grid": True},
    **{"axes.axisbelow": True, "grid.color": "#E6E6E6", "grid.linewidth": 0.6, "lines.linewidth": 1.5},
    **{"lines.markersize": 5, "errorbar.capsize": 0},
}

_DASHES = ("-", "--", ":", "-.")
_HOLLOW = ("o", "s", "^", "D", "v", "p", "P")


class Look(NamedTuple):
    """Colour and marker: two ways to tell lines apart."""

    color: str
    marker: str


_LOOKS = {
    "dense": Look(INK, "s"),
    "luka": Look("#0072B2", "o"),
    "luka_paper": Look("#56B4E9", "s"),
    "mixed": Look("#CC79A7", "p"),
    "h2o": Look("#D55E00", "^"),
    "h2o_as_published": Look("#E69F00", "v"),
    "snapkv": Look("#009E73", "D"),
    "lte": Look("#E69F00", "d"),
    "streaming": Look("#7A7A7A", "P"),
    "tova": Look("#882255", "X"),
    "uniform": Look("#999933", "<"),
    "per_layer": Look("#332288", "h"),
    "kascade": Look("#EE3377", "o"),
    "kascade_paper": Look("#EE3377", "s"),
    "kascade_pages": Look("#EE3377", "v"),
    "oracle_topk": Look("#661100", "*"),
    "quest": Look("#117733", "D"),
    "omnikv": Look("#AA4499", "^"),
    "lessismore": Look("#DDAA33", "v"),
}
SPARE = [Look(color, marker) for marker in "*d>" for color in ("#117733", "#AA4499", "#661100", "#44AA99")]
"""For lines and methods without a look of their own."""


def look(method: str) -> Look:
    """The same for a method in every plot."""
    return _LOOKS.get(method) or SPARE[zlib.crc32(method.encode()) % len(SPARE)]


def check(out: Path) -> None:
    """Raises `UserError` if no plot can be written there: no file can, its name is no PNG's, or no matplotlib."""
    if out.suffix.lower() != ".png":
        raise UserError(f"{out}: plots are PNG files, so the name must end in .png")
    outfile.check(out)
    of_extra("matplotlib", "plot", "plots need")


@contextmanager
def drawing(out: Path, height: float, width: float = WIDTH) -> Iterator[Any]:
    """A matplotlib figure, ``width`` by ``height`` inches, written to ``out`` when the block ends. The same drawing
    gives the same bytes.

    Raises what :func:`check` does.
    """
    check(out)
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(["default", _STYLE]):
        figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
        yield figure
        content = io.BytesIO()
        figure.savefig(content, format="png", metadata={"Software": None})
    outfile.write(out, content.getvalue())


def title(figure: Any, text: str, facts: str) -> None:
    """What is drawn, and below it on what it was measured."""
    figure.suptitle(f"{text}\n{facts}", x=0.01, ha="left", fontsize=9.5, linespacing=1.5)


def panels(figure: Any, count: int, **shared: Any) -> list[Any]:
    """``count`` axes in rows of :func:`columns`."""
    across = columns(count)
    axes = figure.subplots(-(-count // across), across, squeeze=False, **shared).flatten().tolist()
    for unused in axes[count:]:
        unused.set_visible(False)
    return axes[:count]


def stacked(figure: Any, heights: Sequence[float]) -> list[Any]:
    """Parts of a figure below each other, with heights in inches."""
    return figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0].tolist()


def columns(count: int) -> int:
    """Panels side by side."""
    return count if count <= 2 else 2 if count in (4, 8) else 3


def legend(figure: Any, axes: Sequence[Any]) -> None:
    """One legend under all panels, an entry for each label."""
    entries = {}
    for one in axes:
        for handle, label in zip(*one.get_legend_handles_labels()):
            entries.setdefault(label, handle)
    across = _entries_across(max(map(len, entries)))
    figure.legend(entries.values(), entries, loc="outside lower left", ncols=min(len(entries), across))


def _entries_across(longest: int) -> int:
    """How many entries of a legend fit side by side, where the longest entry has ``longest`` letters."""
    return max(1, min(3 if longest > 24 else 5, int(WIDTH / (0.6 + 0.065 * longest))))


def name_axes(axes: Sequence[Any], x: str, y: str) -> None:
    """Names of the axes, at the lowest and at the left panels only."""
    across = columns(len(axes))
    for index, axis in enumerate(axes):
        if index + across >= len(axes):
            axis.set_xlabel(x)
        if index % across == 0:
            axis.set_ylabel(y)


def height(count: int, entries: int, longest: int = 25) -> float:
    """Inches for ``count`` panels and a legend with ``entries`` entries, the longest of ``longest`` letters."""
    across = columns(count)
    lines = -(-entries // _entries_across(longest))
    return 0.9 + -(-count // across) * {1: 4.4, 2: 3.3, 3: 2.6}[across] + 0.2 * lines


# Marks


class Point(NamedTuple):
    """A value with its 95 % interval."""

    x: float
    y: float
    low: float
    high: float


def line(axis: Any, points: Sequence[Point], name: str, style: Look, variant: int) -> None:
    """Points with their intervals, joined; variants of one look differ in their dashes and hollow markers."""
    if not points:
        return
    x, y = [point.x for point in points], [point.y for point in points]
    reach = [[point.y - point.low for point in points], [point.high - point.y for point in points]]
    axis.errorbar(x, y, yerr=reach, fmt="none", ecolor=style.color, elinewidth=1.1, alpha=0.45)
    dashes, filling = _DASHES[variant % len(_DASHES)], "white" if variant else style.color
    marker = _HOLLOW[(variant - 1) % len(_HOLLOW)] if variant else style.marker
    axis.plot(x, y, dashes, color=style.color, marker=marker, markerfacecolor=filling, label=name)


def star(axis: Any, point: Point, style: Look, name: str) -> None:
    """The point that is recommended."""
    edge = {"markeredgecolor": INK, "markeredgewidth": 0.9, "zorder": 5}
    axis.plot(point.x, point.y, "*", markersize=15, color=style.color, label=f"recommended: {name}", **edge)


def level(axis: Any, value: float, interval: tuple[float, float] | None, upright: bool = False) -> None:
    """The line of dense attention, and its interval as a band."""
    color = look("dense").color
    (axis.axvline if upright else axis.axhline)(value, color=color, linewidth=1.2, label="dense")
    if interval is not None:
        (axis.axvspan if upright else axis.axhspan)(*interval, color=color, alpha=0.08, linewidth=0)


def margin(axis: Any, value: float, name: str) -> None:
    """A level that is not to be fallen short of."""
    axis.axhline(value, color=FAINT, linewidth=0.9, linestyle=(0, (4, 3)), label=name)
