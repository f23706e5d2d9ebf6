"""What a decode step's time goes to, by method (as LuKA's figure 3 and Kascade's figure 8 show it)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foveate.errors import UserError
from foveate.lab.report.markdown import context_length, made_with
from foveate.lab.report.plots import figure
from foveate.lab.report.rows import Row, grouped
from foveate.lab.report.tables.decode import how, mean_parts
from foveate.lab.results.measurements import PARTS, TRANSFORMERS

COLORS = dict(zip((*PARTS, "upkeep", "idle"), ("#0072B2", "#E69F00", "#009E73", "#7A7A7A", "#CC79A7", "#D9D9D9")))
WORDS = {
    "score": "weigh keys or summaries",
    "select": "choose",
    "attend": "attend and merge",
    "other": "other kernels",
    "upkeep": "make new pages",
    "idle": "no kernel runs",
}
LEVELS = {"kernel": ("µs a layer", 1e3), "model": ("ms a step", 1.0)}
"""The unit of an axis by level, and that unit in a millisecond."""


def parts(rows: Sequence[Row], out: Path, level: str = "kernel") -> None:
    """Panels for each number of sequences and each length, with a bar for each method that shows where its time goes.

    Lengths with the same methods are beside each other.

    Args:
        rows: rows of the bench `decode`. Rows of other levels, or without a profile of their kernels, are left out.
        level: ``kernel``: the mean layer's kernels; ``model``: a step of a model, with the time in which no kernel
            runs.

    Raises `UserError` for another level, when no row has a profile, and as :func:`figure.check` does.
    """
    if level not in LEVELS:
        raise UserError(f"level must be one of {', '.join(LEVELS)}, not '{level}'")
    of_row = mean_parts if level == "kernel" else of_step
    profiled = [row for row in rows if row["case"]["level"] == level and of_row(row)]
    if not profiled:
        bench = "decode" if level == "kernel" else "decode-model"
        raise UserError(f"nothing to draw: no row of foveate bench {bench} with a profile of its kernels")
    unit, scale = LEVELS[level]
    profiled.sort(key=lambda row: row["case"]["context"])
    cells = grouped(profiled, lambda row: (_group(row), row["case"]["context"]))
    methods_of = {cell: tuple(dict.fromkeys(row["case"]["method"] for row in some)) for cell, some in cells.items()}
    groups = grouped(profiled, lambda row: (_group(row), *methods_of[_group(row), row["case"]["context"]]))
    heights = [0.75 + 0.26 * len(methods) for _, *methods in groups]
    with figure.drawing(out, 1.0 + sum(heights)) as page:
        axes = []
        for part, ((group, *methods), rows) in zip(figure.stacked(page, heights), groups.items()):
            contexts = dict.fromkeys(row["case"]["context"] for row in rows)
            own = part.subplots(1, len(contexts), squeeze=False, sharey=True)[0]
            part.suptitle(group, x=0.01, ha="left", fontsize=8.5)
            for axis, context in zip(own, contexts):
                of_context = [row for row in rows if row["case"]["context"] == context]
                _bars(axis, methods, {row["case"]["method"]: of_row(row) for row in of_context}, scale)
                axis.set_title(f"{context_length(context)} tokens")
                axis.set_xlabel(unit)
            own[0].set_yticks(range(len(methods)), [_lines(name) for name in methods], fontsize=6.5)
            own[0].set_ylim(len(methods) - 0.5, -0.5)
            axes += [*own]
        figure.legend(page, axes)
        what = "a layer's decode step goes to: its kernels, without gaps" if level == "kernel" else "a step goes to"
        figure.title(page, f"What {what}", made_with(profiled))


def _bars(axis: Any, methods: Sequence[str], times: Mapping[str, Mapping[str, float]], scale: float) -> None:
    """A bar for each method, with its total time. The bar of another library may be cut, which two strokes show."""
    places = [methods.index(name) for name in times]
    totals = [scale * sum(parts.values()) for parts in times.values()]
    limit = 1.2 * max((total for name, total in zip(times, totals) if name != TRANSFORMERS), default=max(totals))
    below = [0.0] * len(times)
    for part in next(iter(times.values())):
        widths = [scale * parts[part] for parts in times.values()]
        axis.barh(places, widths, left=below, color=COLORS[part], label=WORDS[part], height=0.7)
        below = [sum(pair) for pair in zip(below, widths)]
    for place, total in zip(places, totals):
        cut = total > limit
        end = {"x": limit, "ha": "right", "backgroundcolor": "white"} if cut else {"x": total, "ha": "left"}
        axis.text(y=place, s=f" {total:,.{0 if total >= 100 else 1}f} ", va="center", fontsize=6.5, **end)
        for x in (0.85, 0.865) if cut else ():
            axis.plot([(x - 0.01) * limit, (x + 0.01) * limit], [place + 0.5, place - 0.5], color="white", linewidth=2)
    axis.set_xlim(0, limit)
    axis.grid(visible=False, axis="y")


def _lines(spec: str) -> str:
    """A long name in two lines."""
    name, comma, rest = spec.partition(",")
    return f"{name}{comma}\n{rest}" if len(spec) > 28 else spec


def _group(row: Row) -> str:
    """The model, if there is one, sequences, and how it runs."""
    case = row["case"]
    model = f"{case['model']}, " if case.get("model") else ""
    return f"{model}{case['batch']} sequence{'s' * (case['batch'] > 1)}{how(case)}"


def of_step(row: Row) -> dict[str, float]:
    """Milliseconds of a model's step by what its kernels do; empty where they were not watched."""
    return row.get("parts_ms") or {}
