"""What all plots share: a PNG without a display, one style, one look for a method, rows read with care."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from foveate.evaluation.data import read_jsonl
from foveate.evaluation.errors import DataError, UserError, unknown

Row = Mapping[str, Any]

WIDTH = 10.0
"""Inches; with the resolution below about twice the width at which a README shows a picture."""
DPI = 170
INK, FAINT = "#222222", "#8A8A8A"
_STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.6,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.5,
    "lines.markersize": 5,
    "errorbar.capsize": 0,
}


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
    "lined_as_published": Look("#E69F00", "v"),
    "snapkv": Look("#009E73", "D"),
    "streaming": Look("#7A7A7A", "P"),
    "tova": Look("#882255", "X"),
    "uniform": Look("#999933", "<"),
    "per_layer": Look("#332288", "h"),
}
_SPARE = [Look(color, marker) for marker in "*d>" for color in ("#117733", "#AA4499", "#661100", "#44AA99")]


def look(method: str) -> Look:
    """The same for a method in every plot."""
    return _LOOKS.get(method) or _SPARE[zlib.crc32(method.encode()) % len(_SPARE)]


def check(out: Path) -> None:
    """Raises `UserError` if no plot can be written there: matplotlib is missing, or it is no name of a PNG file."""
    if out.suffix.lower() != ".png":
        raise UserError(f"{out}: plots are PNG files, so --out must end in .png")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("plots need matplotlib, which is not installed: pip install 'foveate[plot]'") from None


@contextmanager
def drawing(out: Path, height: float, width: float = WIDTH) -> Iterator[Any]:
    """A matplotlib figure of so many inches, written to ``out`` when the block ends. The same drawing, the same bytes.

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
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(content.getvalue())


def title(figure: Any, text: str, facts: str) -> None:
    """What is drawn, and below it on what it was measured."""
    figure.suptitle(f"{text}\n{facts}", x=0.01, ha="left", fontsize=9.5, linespacing=1.5)


def panels(figure: Any, count: int, **shared: Any) -> list[Any]:
    """So many axes in rows of :func:`columns`."""
    across = columns(count)
    axes = figure.subplots(-(-count // across), across, squeeze=False, **shared).flatten().tolist()
    for unused in axes[count:]:
        unused.set_visible(False)
    return axes[:count]


def columns(count: int) -> int:
    """Panels side by side."""
    return count if count <= 2 else 2 if count == 4 else 3


def legend(figure: Any, axes: Sequence[Any]) -> None:
    """One legend under all panels, an entry for each label."""
    entries = {}
    for one in axes:
        for handle, label in zip(*one.get_legend_handles_labels()):
            entries.setdefault(label, handle)
    across = 3 if max(map(len, entries)) > 24 else 5
    figure.legend(entries.values(), entries, loc="outside lower left", ncols=min(len(entries), across))


# Rows

_NEEDED = ("method", "spec", "settings", "model", "task", "task_settings", "split", "length", "n", "score", "run")


def read(files: Sequence[Path]) -> list[Row]:
    """The rows of `foveate compare` in some files.

    Raises:
        DataError: for a file without rows, or a line that is no such row.
    """
    rows = []
    for file in files:
        found = list(read_jsonl(file))
        if not found:
            raise DataError(f"{file}: no rows in this file")
        for number, row in found:
            missing = [name for name in _NEEDED if not isinstance(row, dict) or name not in row]
            if missing:
                raise DataError(f"{file}:{number}: not a row of foveate compare ('{missing[0]}' is missing)")
            rows.append(row)
    return rows


def chosen(rows: Sequence[Row], conditions: Sequence[str]) -> list[Row]:
    """The rows that meet every condition ``NAME=VALUE``, where the name is a row's, a task's or a method's setting.

    Rows of ``dense`` are there to compare with, and need not meet conditions on methods.

    Raises:
        UserError: for a condition of another form, a name that no row has, or when no row is left.
    """
    for condition in conditions:
        name, equals, value = condition.partition("=")
        if not equals:
            raise UserError(f"--where {condition}: expected NAME=VALUE, such as task=niah or compressor=mean")
        if all(_value(row, name) is None for row in rows):
            names = {*rows[0], *(name for row in rows for name in (*row["task_settings"], *row["settings"]))}
            raise unknown("name", name, sorted(names), "--where")
        of_method = name in ("method", "spec") or all(name not in {**row, **row["task_settings"]} for row in rows)
        rows = [row for row in rows if (of_method and row["method"] == "dense") or _value(row, name) == value]
        if not rows:
            raise UserError(f"--where {condition}: no row is left")
    return list(rows)


def _value(row: Row, name: str) -> str | None:
    for fields in (row, row["task_settings"], row["settings"]):
        if name in fields:
            return str(fields[name])
    return None
