"""What a decode step's time goes to, by method (as LuKA's figure 3 and Kascade's figure 8 show it)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foveate.bench.breakdown import PARTS
from foveate.evaluation.errors import UserError
from foveate.report import figure
from foveate.report.markdown import made_with

Row = Mapping[str, Any]
_COLORS = dict(zip((*PARTS, "upkeep", "idle"), ("#0072B2", "#E69F00", "#009E73", "#7A7A7A", "#CC79A7", "#D9D9D9")))
_WORDS = {
    "score": "weigh keys or summaries",
    "select": "choose",
    "attend": "attend and merge",
    "other": "other kernels",
    "upkeep": "make new pages",
    "idle": "no kernel runs",
}
LEVELS = {"kernel": ("µs a layer", 1e3), "model": ("ms a step", 1.0)}
"""What is drawn of rows of a level, and in what part of a millisecond."""


def parts(rows: Sequence[Row], out: Path, level: str = "kernel") -> None:
    """A panel for each length and batch size, a bar for each method: what its time goes to, one above the other.

    Args:
        rows: of `foveate bench decode`; those of other levels, or without a profile of their kernels, are left out.
        out: PNG file.
        level: ``kernel``, the mean layer's kernels; ``model``, a step of a model, with the time that none runs.

    Raises:
        UserError: for another level, when no row has a profile, for a file name that is no PNG's, or when matplotlib is
            missing.
    """
    if level not in LEVELS:
        raise UserError(f"level must be one of {', '.join(LEVELS)}, not '{level}'")
    of_row = mean_parts if level == "kernel" else _of_step
    profiled = [row for row in rows if row["case"]["level"] == level and of_row(row)]
    if not profiled:
        raise UserError(
            f"nothing to draw: no row of foveate bench decode --level {level} with a profile of its kernels"
        )
    unit, scale = LEVELS[level]
    panels = sorted({_panel(row) for row in profiled})
    methods = list(dict.fromkeys(row["case"]["method"] for row in profiled))
    rows_of_panels = -(-len(panels) // figure.columns(len(panels)))
    with figure.drawing(out, 1.6 + rows_of_panels * (0.9 + 0.24 * len(methods))) as page:
        axes = figure.panels(page, len(panels), sharey=True)
        for axis, panel in zip(axes, panels):
            own = {row["case"]["method"]: of_row(row) for row in profiled if _panel(row) == panel}
            below = [0.0] * len(methods)
            for part in own[next(iter(own))]:
                times = [scale * own[method][part] if method in own else 0.0 for method in methods]
                axis.barh(range(len(methods)), times, left=below, color=_COLORS[part], label=_WORDS[part], height=0.7)
                below = [sum(pair) for pair in zip(below, times)]
            axis.set_yticks(range(len(methods)), methods, fontsize=7)
            axis.grid(visible=False, axis="y")
            axis.set_xlabel(unit)
            model, batch, context, how = panel
            axis.set_title(f"{model}{context:,} tokens, {batch} sequence{'s' * (batch > 1)}{how}")
        axes[0].invert_yaxis()
        figure.legend(page, axes)
        told = "a layer's decode step goes to: its kernels, without gaps" if level == "kernel" else "a step goes to"
        figure.title(page, f"What {told}", made_with(profiled))


def _panel(row: Row) -> tuple[str, int, int, str]:
    """The model, if there is one, sequences, tokens, and how it runs."""
    case = row["case"]
    how = ", Liger's kernels" * bool(case.get("liger"))
    how += f", dense below {case['dense_below']}" if case.get("dense_below") else ""
    return f"{case['model']}, " if case.get("model") else "", case["batch"], case["context"], how


def _of_step(row: Row) -> dict[str, float]:
    """Milliseconds of a model's step by what its kernels do; empty where they were not watched."""
    return row.get("parts_ms") or {}


def mean_parts(row: Row) -> dict[str, float]:
    """Milliseconds of the mean layer by what its kernels do; empty without a profile of them."""
    kinds = [one for one in (row.get("layers") or {}).values() if one.get("parts_ms")]
    number = sum(one["layers"] for one in kinds)
    found = {part: sum(one["layers"] * one["parts_ms"][part] for one in kinds) / number for part in PARTS if kinds}
    return found | {"upkeep": sum(one["layers"] * one["upkeep_ms"] for one in kinds) / number} if kinds else {}
