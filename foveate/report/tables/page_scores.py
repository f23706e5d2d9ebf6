"""Rows of `foveate bench page-scores` as Markdown cells: a line for each page size and score, a column a budget."""

from __future__ import annotations

from collections.abc import Sequence

from foveate.report.rows import Row

_LESS, _MORE = "▼", "▲"


def title(row: Row) -> str:
    """What the rows of one table have in common, and how to read its cells."""
    case = row["case"]
    return (
        f"{row['bench']}, {case['model']}, {case['task']} ({case['split']}), {case['context']:,} tokens, "
        f"n = {row['n']}, {case['dtype']}; attention missed / heads that miss most of theirs / error of the output, "
        f"by keys read, {_LESS} less error than `{row['baseline']}` on each of the {row['n']} items, {_MORE} more"
    )


def cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The lines of the table, the head first; – where a budget does not pay for the summaries."""
    cases = {(row["case"]["page_size"], row["case"]["budget"], row["case"]["score"]): row for row in rows}
    budgets = sorted({budget for _, budget, _ in cases if budget is not None})
    limit = next((row["case"]["max_missed_mass"] for row in rows if row["case"]["budget"] is None), None)
    certified = [] if limit is None else [f"pages for ≤ {100 * limit:g} %"]
    lines = [("page", "score", *(f"{100 * budget:g} %" for budget in budgets), *certified)]
    for size, score in dict.fromkeys((size, score) for size, _, score in cases):
        line = [str(size), f"`{score}`"]
        for budget in budgets:
            row = cases.get((size, budget, score))
            line.append("–" if row is None else _cell(row, cases.get((size, budget, row["baseline"]))))
        if certified:
            row = cases.get((size, None, score))
            line.append("" if row is None else f"{100 * row['refined_share']['value']:.1f} %")
        lines.append(tuple(line))
    return lines


def _cell(row: Row, baseline: Row | None) -> str:
    missed, lost = (100 * row[name]["value"] for name in ("missed_mass", "lost_heads"))
    return f"{missed:.1f} % / {lost:.1f} % / {row['output_error']['value']:.3f}{_mark(row, baseline)}"


def _mark(row: Row, baseline: Row | None) -> str:
    """Whether the error is less, or more, than the baseline's on every item: too few for an interval."""
    if baseline is None or baseline is row:
        return ""
    ours, theirs = (one["item_values"]["output_error"] for one in (row, baseline))
    pairs = list(zip(ours, theirs, strict=True))
    return _LESS if all(a < b for a, b in pairs) else _MORE if all(a > b for a, b in pairs) else ""
