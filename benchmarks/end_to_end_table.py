"""Points and speed of the same run: a line a method, for each model, number of sequences and length."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.summary_table import heading
from foveate.errors import UserError
from foveate.lab.evaluation.verdict import nothing_to_lose
from foveate.lab.report.markdown import NONE, context_length, difference, markdown_table, number, titled
from foveate.lab.report.rows import Row, grouped

CALIBRATION = re.compile(r'[:,]calibration="[^"]*"')
"""The setting that names a calibration, in a spec."""
ACTS = 0.9
"""The least share of decode steps that must be sparse for a row to tell of its method."""


def table(rows: Sequence[Row]) -> str:
    """Scores and paired differences by task, the time of a token and of a whole request over dense, and the cache.

    Where fewer than nine steps in ten were sparse, because contexts were short for the method, a cell says so instead.
    Raises `UserError` for rows that were measured by different bounds (`dense_below`), or without any.
    """
    if any("request_ms" not in row for row in rows):
        raise UserError("rows without the time of a request, from before it was measured, have no end-to-end table")
    if len({str(row["dense_below"]) for row in rows}) > 1:
        raise UserError("rows of different --dense-below are not compared: choose some with a condition")
    groups = grouped(rows, lambda row: (row["model"], row["dtype"], row["batch_size"], row["task_settings"]["length"]))
    return "\n\n".join(map(_table, groups.values()))


def _table(rows: Sequence[Row]) -> str:
    tasks = list(dict.fromkeys(map(_words, rows)))
    lines: dict[str, dict[str, Row]] = {}
    for row in rows:
        lines.setdefault(row["spec"], {})[_words(row)] = row
    dense = lines["dense"]
    cells = [("method", *(f"{task}, n = {dense[task]['n']}" for task in tasks), *_COSTS)]
    for spec, found in lines.items():
        if spec == "dense":
            scores = [number(found[task]["score"], 1) for task in tasks]
        else:
            scores = [_points(found.get(task), dense[task]) for task in tasks]
        cells.append((f"`{CALIBRATION.sub('', spec)}`", *scores, *_costs(found, dense)))
    first = rows[0]
    shape = f"{_sequences(first)} × {context_length(first['task_settings']['length'])} tokens"
    return titled(f"{first['model']}, {first['dtype']}, {shape}", rows, markdown_table(cells))


def _words(row: Row) -> str:
    return heading({**row, "task_settings": {}})


def _sequences(row: Row) -> int:
    """Of the largest batch: no more than there are items."""
    return min(row["batch_size"], row["n"])


def _sparse(row: Row) -> float:
    return 1 - row["dense_steps"] / row["decode_steps"] if row["decode_steps"] else 0.0


def _points(row: Row | None, dense: Row) -> str:
    if row is None or nothing_to_lose(dense, max_loss=1.0):
        return NONE
    return difference(row) if _sparse(row) >= ACTS else f"dense in {100 * (1 - _sparse(row)):.0f} % of the steps"


_COSTS = ("a token, ms", "over dense", "a request, s", "over dense", "cache of a sequence")


def _costs(found: Mapping[str, Row], dense: Mapping[str, Row]) -> tuple[str, ...]:
    """Times are medians over the tasks in which the method was sparse; a request's are of the shortest and longest."""
    acting = [task for task, row in found.items() if row["spec"] == "dense" or _sparse(row) >= ACTS]
    cache = max(row["resident_bytes"] / _sequences(row) for row in found.values())
    if not acting:
        return (NONE,) * 4 + (f"{cache / 1e9:.2f} GB",)
    token = statistics.median(found[task]["decode_ms_per_token"] for task in acting)
    faster = statistics.median(
        dense[task]["decode_ms_per_token"] / found[task]["decode_ms_per_token"] for task in acting
    )
    requests = [found[task]["request_ms"] / 1000 for task in acting]
    sooner = [dense[task]["request_ms"] / found[task]["request_ms"] for task in acting]
    own = found[acting[0]]["spec"] == "dense"
    return (
        number(token, 2),
        "" if own else f"{faster:.2f}×",
        _range(requests, 1),
        "" if own else f"{_range(sooner, 2)}×",
        f"{cache / 1e9:.2f} GB",
    )


def _range(values: Sequence[float], digits: int) -> str:
    low, high = (number(of(values), digits) for of in (min, max))
    return low if low == high else f"{low}–{high}"
