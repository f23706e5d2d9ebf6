"""One table of methods beside another method than dense attention, over the comparisons that both have."""

from __future__ import annotations

from collections.abc import Sequence

from foveate.report import pooled
from foveate.report.markdown import interval, markdown_table, titled
from foveate.report.rows import Row, grouped


def paired(rows: Sequence[Row]) -> str:
    """A Markdown table for each model and number format: what each method scores over the first one.

    Differences are of the same items, pooled over the comparisons that both methods have.

    Args:
        rows: of `foveate compare`; those of `dense` are left out.

    Raises:
        ValueError: for a metric that is not the mean of its items', a model whose rows are all of one method, or two
            methods without a comparison in common.
    """
    if not all(map(pooled.averages, rows)):
        raise ValueError("a metric that is no mean over items, such as perplexity, has no pooled difference")
    groups = grouped(rows, lambda row: f"{row['model']}, {row['dtype']}")
    return "\n\n".join(_table(what, own) for what, own in groups.items())


def _table(what: str, rows: Sequence[Row]) -> str:
    by_spec = grouped([row for row in rows if row["method"] != "dense"], lambda row: row["spec"])
    if len(by_spec) < 2:
        raise ValueError(f"{what}: two methods or more are compared, not {', '.join(by_spec) or 'none'}")
    (base, theirs), *others = by_spec.items()
    table = [("method", f"over `{base}`, points [95 %, paired]", "comparisons", "n")]
    for spec, ours in others:
        pairs = [(row, its) for row in ours for its in theirs if row["run"]["items"] == its["run"]["items"]]
        if not pairs:
            raise ValueError(f"{what}: {spec} and {base} have no comparison in common")
        own, its = zip(*pairs)
        n = sum(row["n"] for row in own)
        table.append((f"`{spec}`", interval(vars(pooled.difference(own, its)), 1, "+"), f"{len(own)}", f"{n:,}"))
    used = [row for found in by_spec.values() for row in found]
    return titled(f"{what}, of the comparisons that both methods have", used, markdown_table(table))
