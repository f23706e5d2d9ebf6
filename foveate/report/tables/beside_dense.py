"""Tables of methods beside dense attention: what each comparison says of each, and how few keys suffice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foveate.report import lines
from foveate.report.markdown import NONE, difference, markdown_table, number, percent, titled
from foveate.report.rows import Row, grouped

_EXACTLY = 1e-9  # scores are means of floats
_Comparisons = Sequence[Sequence[Row]]


def differences(rows: Sequence[Row]) -> str:
    """A Markdown table for each model: a line a method, a column a comparison.

    In each cell the score, the paired difference to dense with its 95 % interval, and the keys read; a dash where a
    comparison lacks the method.
    """
    return _by_model(rows, "score / difference to dense, points [95 %, paired] / keys read", _differences)


def least_keys(rows: Sequence[Row], margin: float = 2.0) -> str:
    """A Markdown table for each model: a line a comparison, a column a method, over all settings of the method.

    In each cell the least share of the keys with which one of its settings is at most `margin` points below dense, and
    its difference to dense; or that none is, and up to which share. How many settings stand in a method's head.

    Raises:
        ValueError: when a comparison has no row of `dense`.
    """
    return _by_model(
        rows,
        f"the least keys read by a setting at most {margin:g} points below dense (its difference to dense)",
        lambda comparisons: _least_keys(comparisons, margin),
    )


def _by_model(rows: Sequence[Row], what: str, table: Callable[[_Comparisons], list[tuple[str, ...]]]) -> str:
    parts = []
    for model, own in grouped(rows, lambda row: row["model"]).items():
        form = ", ".join(dict.fromkeys(row["dtype"] for row in own))
        body = markdown_table(table(list(lines.cells(own).values())))
        parts.append(titled(f"{model}, {form}; {what}", own, body))
    return "\n\n".join(parts)


def _differences(comparisons: _Comparisons) -> list[tuple[str, ...]]:
    specs = dict.fromkeys(row["spec"] for comparison in comparisons for row in comparison)
    found = [{row["spec"]: _difference(row) for row in comparison} for comparison in comparisons]
    table = [("method", *(f"{lines.heading(rows[0])}, n = {rows[0]['n']}" for rows in comparisons))]
    table += [(f"`{spec}`", *(cells.get(spec, NONE) for cells in found)) for spec in specs]
    ceilings = [comparison[0]["ceiling"] for comparison in comparisons]
    if any(ceiling < 100 for ceiling in ceilings):
        table.append(("evidence ceiling", *(f"{ceiling:.1f}" for ceiling in ceilings)))
    return table


def _least_keys(comparisons: _Comparisons, margin: float) -> list[tuple[str, ...]]:
    methods = dict.fromkeys(row["method"] for rows in comparisons for row in rows if row["method"] != "dense")
    tried = {method: max(len(_of(method, rows)) for rows in comparisons) for method in methods}
    heads = (f"`{method}`, {count} setting{'s' * (count > 1)}" for method, count in tried.items())
    table = [("comparison", "n", "dense", *heads)]
    for rows in comparisons:
        dense = next((row for row in rows if row["method"] == "dense"), None)
        if dense is None:
            raise ValueError(f"no row of dense in {lines.heading(rows[0])}")
        cells = (_least(_of(method, rows), margin) for method in methods)
        table.append((lines.heading(dense), f"{dense['n']}", f"{dense['score']:.1f}", *cells))
    return table


def _of(method: str, rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["method"] == method and row["keys_read_share"] is not None]


def _least(rows: Sequence[Row], margin: float) -> str:
    if not rows:
        return NONE
    near = [row for row in rows if row["diff_to_dense"] >= -margin - _EXACTLY]
    if not near:
        return f"none up to {100 * max(row['keys_read_share'] for row in rows):.1f} %"
    least = min(near, key=lambda row: row["keys_read_share"])
    return f"{100 * least['keys_read_share']:.1f} % ({number(least['diff_to_dense'], 1, '+')})"


def _difference(row: Row) -> str:
    score = number(row["score"], 1)
    return score if row["method"] == "dense" else f"{score} / {difference(row)} / {percent(row['keys_read_share'])}"
