"""One table over many comparisons: methods by tasks, and the paired difference to dense pooled over all items."""

from __future__ import annotations

from collections.abc import Sequence

from foveate.errors import UserError
from foveate.lab.report import pooled
from foveate.lab.report.lines import split_of
from foveate.lab.report.markdown import NONE, interval, markdown_table, titled
from foveate.lab.report.rows import Row, grouped

_Cell = tuple[str, str, int]


def summary(rows: Sequence[Row]) -> str:
    """A Markdown table: a line a method, a column a comparison (its score), and at the end the pooled difference.

    Only methods that every comparison has are listed. Comparisons of several models or number formats are tables of
    their own, and those of several seeds columns. Raises `UserError` when a comparison has no row of `dense`, two rows
    of one method that differ, or a metric that is not the mean of its items'.
    """
    if not all(map(pooled.averages, rows)):
        raise UserError("a metric that is no mean over items, such as perplexity, has no pooled difference")
    return "\n\n".join(map(_table, grouped(rows, lambda row: (row["model"], row["dtype"])).values()))


def _table(rows: Sequence[Row]) -> str:
    cells = list(dict.fromkeys(map(_cell, rows)))
    by_spec: dict[str, dict[_Cell, Row]] = {}
    for row in rows:
        first = by_spec.setdefault(row["spec"], {}).setdefault(_cell(row), row)
        if any(first[name] != row[name] for name in ("item_values", "keys_read_share")):
            commits = " and ".join(one["commit"] for one in (first, row))
            raise UserError(
                f"two rows of {row['spec']} in {heading(row)} that differ, of commit {commits}; leave one out"
            )
    dense = by_spec.get("dense", {})
    if missing := [cell for cell in cells if cell not in dense]:
        raise UserError(f"no row of dense in {missing[0][0]}")
    n = sum(row["n"] for row in dense.values())
    counts, seeds = ", ".join(str(dense[cell]["n"]) for cell in cells), {seed for *_, seed in cells}
    heads = [words + (f", seed {seed}" if len(seeds) > 1 else "") for words, _, seed in cells]
    lines = [("method", "keys read", *heads, f"Δ to dense [95 %], pooled, n = {n:,}")]
    for spec, found in by_spec.items():
        if any(cell not in found for cell in cells):
            continue
        ours, theirs = ([of[cell] for cell in cells] for of in (found, dense))
        shares = [100 * (row["keys_read_share"] or 0.0) for row in ours]  # no decode step: nothing was read
        read = f"{min(shares):.1f}–{max(shares):.1f} %" if len(cells) > 1 else f"{shares[0]:.1f} %"
        lines.append(
            (
                f"`{spec}`",
                read if ours[0]["method"] != "own" else NONE,  # nobody counts what a model reads as it is
                *(f"{row['score']:.1f}" for row in ours),
                "" if spec == "dense" else interval(vars(pooled.difference(ours, theirs)), 1, "+"),
            )
        )
    ceilings = [dense[cell]["ceiling"] for cell in cells]
    if any(ceiling < 100 for ceiling in ceilings):
        lines.append(("evidence ceiling", "", *(f"{ceiling:.1f}" for ceiling in ceilings), ""))
    return titled(f"{rows[0]['model']}, {rows[0]['dtype']}, scores, n = {counts}", rows, markdown_table(lines))


def heading(row: Row) -> str:
    """The words for the items of a row: task, split and, if it is asked for, the length."""
    length = row["task_settings"].get("length")
    return " ".join((row["task"], split_of(row), *([f"{round(length / 1024)}K"] if length else [])))


def _cell(row: Row) -> _Cell:
    """The words that head a comparison's column; its items' fingerprint and seed, since comparisons may share words."""
    return heading(row), row["run"]["items"], row["seed"]
