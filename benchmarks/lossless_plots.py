"""How many drafts of lossless decoding are accepted, by task, context and method, as a plot.

python -m benchmarks.lossless_plots benchmarks/results/lossless.jsonl docs/figures/lossless-accepted.png
"""

from __future__ import annotations

import json
from pathlib import Path

import typer

from benchmarks.table_kinds import OF_ACCEPTANCE
from foveate.lab.report.markdown import context_length, made_with
from foveate.lab.report.plots import figure
from foveate.lab.report.plots.figure import Look, Point
from foveate.lab.report.rows import grouped

_COLORS = ("#EE3377", "#0072B2", "#009E73", "#E69F00")
app = typer.Typer()


@app.command()
def accepted(file: Path, out: Path) -> None:
    """A panel for each task, a line for each method."""
    found = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    rows = [row for row in found if row["case"]["draft"] == OF_ACCEPTANCE]
    tasks = grouped(rows, lambda row: row["case"]["task"])
    methods = list(dict.fromkeys(row["case"]["method"] for row in rows))
    looks = {name: Look(color, marker) for name, color, marker in zip(methods, _COLORS, "osD^", strict=True)}
    with figure.drawing(out, figure.height(len(tasks), len(methods))) as page:
        axes = figure.panels(page, len(tasks), sharey=True)
        for axis, (task, own) in zip(axes, tasks.items()):
            for method, some in grouped(own, lambda row: row["case"]["method"]).items():
                points = sorted(Point(row["case"]["tokens"], *3 * [row["accepted"]]) for row in some)
                figure.line(axis, points, method, looks[method], 0)
            lengths = sorted({row["case"]["tokens"] for row in own})
            axis.set_xscale("log", base=2)
            axis.set_xticks(lengths, map(context_length, lengths))
            axis.minorticks_off()
            axis.set_ylim(0, int(OF_ACCEPTANCE))
            axis.set_title(task)
        figure.name_axes(axes, "tokens of a prompt", f"accepted of {OF_ACCEPTANCE} drafts")
        figure.legend(page, axes)
        models = ", ".join(dict.fromkeys(row["case"]["model"] for row in rows))
        figure.title(
            page, "Drafts that dense attention accepts, by task, context and method", f"{models}; {made_with(rows)}"
        )


if __name__ == "__main__":
    app()
