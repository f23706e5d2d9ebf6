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
_COLORS = dict(zip((*PARTS, "upkeep"), ("#0072B2", "#E69F00", "#009E73", "#7A7A7A", "#CC79A7")))
_WORDS = {
    "score": "weigh keys or summaries",
    "select": "choose",
    "attend": "attend and merge",
    "other": "PyTorch's own kernels",
    "upkeep": "make new pages",
}


def parts(rows: Sequence[Row], out: Path) -> None:
    """A panel for each length and batch size, a bar for each method: its mean layer's kernels one above the other.

    Args:
        rows: of `foveate bench decode`; those without a profile of their kernels are left out.
        out: PNG file.

    Raises:
        UserError: when no row has a profile, for a file name that is no PNG's, or when matplotlib is missing.
    """
    profiled = [row for row in rows if mean_parts(row)]
    if not profiled:
        raise UserError("nothing to draw: no row of foveate bench decode --level kernel with a profile of its kernels")
    sizes = sorted({(row["case"]["batch"], row["case"]["context"]) for row in profiled})
    methods = list(dict.fromkeys(row["case"]["method"] for row in profiled))
    rows_of_panels = -(-len(sizes) // figure.columns(len(sizes)))
    with figure.drawing(out, 1.6 + rows_of_panels * (0.9 + 0.24 * len(methods))) as page:
        axes = figure.panels(page, len(sizes), sharey=True)
        for axis, (batch, context) in zip(axes, sizes):
            own = {
                row["case"]["method"]: mean_parts(row)
                for row in profiled
                if (row["case"]["batch"], row["case"]["context"]) == (batch, context)
            }
            below = [0.0] * len(methods)
            for part, color in _COLORS.items():
                times = [1e3 * own[method][part] if method in own else 0.0 for method in methods]
                axis.barh(range(len(methods)), times, left=below, color=color, label=_WORDS[part], height=0.7)
                below = [sum(pair) for pair in zip(below, times)]
            axis.set_yticks(range(len(methods)), methods, fontsize=7)
            axis.grid(visible=False, axis="y")
            axis.set_xlabel("µs a layer")
            axis.set_title(f"{context:,} tokens, {batch} sequence{'s' * (batch > 1)}")
        axes[0].invert_yaxis()
        figure.legend(page, axes)
        figure.title(page, "What a layer's decode step goes to: its kernels, without gaps", made_with(profiled))


def mean_parts(row: Row) -> dict[str, float]:
    """Milliseconds of the mean layer by what its kernels do; empty without a profile of them."""
    kinds = [one for one in (row.get("layers") or {}).values() if one.get("parts_ms")]
    number = sum(one["layers"] for one in kinds)
    found = {part: sum(one["layers"] * one["parts_ms"][part] for one in kinds) / number for part in PARTS if kinds}
    return found | {"upkeep": sum(one["layers"] * one["upkeep_ms"] for one in kinds) / number} if kinds else {}
