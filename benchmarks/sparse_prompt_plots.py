"""What sparse prompts lose, against how much faster a layer reads a prompt, as a plot.

python -m benchmarks.sparse_prompt_plots benchmarks/results/sparse-prompts-means.jsonl \
    benchmarks/results/sparse-prompts-times.jsonl docs/figures/sparse-prompts.png
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import typer

from benchmarks.summary_table import heading
from foveate.lab.report import pooled
from foveate.lab.report.markdown import context_length, made_with
from foveate.lab.report.plots import figure
from foveate.lab.report.plots.figure import Look, Point
from foveate.lab.report.rows import Row, grouped

_CALIBRATION = re.compile(r',?calibration="[^"]*"')
_LINES = {  # settings after a share
    "answers alone (dense prompts)": ("", Look("#7A7A7A", "P")),
    "sparse prompts": (",decode_only=false", Look("#EE3377", "o")),
    "sparse prompts, rest=mean": (",decode_only=false,rest=mean", Look("#0072B2", "s")),
}
_SHARES = ("", "top_k=0.2")  # a tenth, which is the default, and a fifth
app = typer.Typer()


@app.command()
def loss(points: Path, times: Path, out: Path) -> None:
    """A panel for each task and length and one for all together; on each line a fifth and a tenth of the keys."""
    rows = [json.loads(line) for line in points.read_text(encoding="utf-8").splitlines()]
    timed = [json.loads(line) for line in times.read_text(encoding="utf-8").splitlines()]
    longest = max(row["case"]["context"] for row in timed)
    faster = {row["case"]["method"]: row["speedup"] for row in timed if row["case"]["context"] == longest}
    cells = grouped(rows, lambda row: (row["task"], row["split"], row["length"]))
    named = {heading(of[0]) + f", n = {of[0]['n']}": of for of in cells.values()}
    together = sum(of[0]["n"] for of in cells.values())
    panels = {**named, f"all {len(named)} together, n = {together}": rows}
    with figure.drawing(out, figure.height(len(panels), len(_LINES) + 1)) as page:
        axes = figure.panels(page, len(panels), sharey=True)
        for axis, (words, some) in zip(axes, panels.items(), strict=True):
            for name, (more, look) in _LINES.items():
                specs = [_spec(share + more) for share in _SHARES]
                figure.line(axis, [_point(some, spec, faster.get(spec, 1.0)) for spec in specs], name, look, 0)
            figure.level(axis, 0.0, None)
            axis.set_title(words)
        figure.name_axes(
            axes, f"a layer's prompt of {context_length(longest)} tokens, times as fast", "points to dense"
        )
        figure.legend(page, axes)
        title = (
            "Points that sparse prompts lose, and what they gain: a fifth of the keys (left of each line) and a tenth"
        )
        figure.title(page, title, f"points: {rows[0]['model']}; times: the 8B's shape; {made_with(rows)}")


def _spec(settings: str) -> str:
    """`kascade` with these settings, as rows of times write it."""
    return f"kascade:{settings.lstrip(',')}" if settings else "kascade"


def _point(rows: Sequence[Row], spec: str, faster: float) -> Point:
    """The paired difference to dense attention over the items of all comparisons, with its interval."""
    own = [row for row in rows if _CALIBRATION.sub("", row["spec"]).rstrip(":") == spec]
    found = pooled.difference(own, [row for row in rows if row["method"] == "dense"])
    return Point(faster, found.value, found.low, found.high)


if __name__ == "__main__":
    app()
