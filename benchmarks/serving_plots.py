"""Latency of a server under load, as a plot: `python -m benchmarks.serving_plots ROWS OUT.png` of `serving_load.py`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foveate.lab.report.plots import figure
from foveate.lab.report.plots.figure import Point
from foveate.lab.report.rows import grouped, read_bench

KINDS = {
    "first_token_ms": "To the first token",
    "token_ms": "Between tokens, mean of a request",
    "request_ms": "A whole request",
}


def load(file: Path, out: Path) -> None:
    """A panel for each kind of latency: the median against the rate, and a bar from there to the 99th percentile."""
    rows = sorted(read_bench([file], "serving-load"), key=lambda row: row["case"]["rate"])
    methods = grouped(rows, lambda row: row["case"]["method"])
    names = [method.split(":")[0] for method in methods]
    with figure.drawing(out, figure.height(len(KINDS), 1 + len(methods)) + 0.4) as page:
        case = rows[0]["case"]
        facts = f"{case['model']}: prompts of {case['least']:,} to {case['most']:,} tokens, {case['new']} new ones"
        figure.title(page, "Requests that arrive at random: median, and a bar to the 99th percentile", facts)
        axes = figure.panels(page, len(KINDS))
        for axis, (kind, words) in zip(axes, KINDS.items()):
            own = next(iter(methods.values()))
            figure.line(axis, _points(own, f"baseline_{kind}", 0), "vLLM's own attention", figure.look("dense"), 0)
            for index, (method, of_method) in enumerate(methods.items()):
                name, before = names[index], names[:index].count(names[index])
                label = method if names.count(name) > 1 else name
                figure.line(axis, _points(of_method, kind, index + 1), label, figure.look(name), before)
            axis.set_title(words)
            axis.set_xscale("log", base=2)
            axis.set_xticks([row["case"]["rate"] for row in own], [f"{row['case']['rate']:g}" for row in own])
            axis.set_ylim(bottom=0)
        figure.name_axes(axes, "requests a second", "ms")
        figure.legend(page, axes)


def _points(rows: Sequence[dict[str, Any]], kind: str, aside: int) -> list[Point]:
    """Medians, beside those of other lines."""
    return [Point(row["case"]["rate"] * 1.02**aside, row[kind][0], row[kind][0], row[kind][-1]) for row in rows]


if __name__ == "__main__":
    load(*map(Path, sys.argv[1:]))
