"""What sparse prompts lose, against how much faster a model's attention reads a prompt, as a plot.

python -m benchmarks.sparse_prompt_plots benchmarks/results/sparse-prompts-means.jsonl \
    benchmarks/results/sparse-prompts-times.jsonl docs/figures/sparse-prompts.png
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

import foveate.calibrations
from benchmarks.end_to_end_table import CALIBRATION
from benchmarks.summary_table import heading
from foveate.calibration import load
from foveate.lab.report import pooled
from foveate.lab.report.markdown import context_length, made_with
from foveate.lab.report.plots import figure
from foveate.lab.report.plots.figure import Look, Point
from foveate.lab.report.rows import Row, grouped

_DENSE = ""
_LINES = {  # settings after a share; how far above its point a label stands
    "dense prompts (only answers are sparse)": (_DENSE, Look("#7A7A7A", "P"), 0),
    "sparse prompts": (",decode_only=false", Look("#EE3377", "o"), -10),
    "sparse prompts, rest=mean": (",decode_only=false,rest=mean", Look("#0072B2", "s"), 4),
}
_SHARES = {"": "a tenth", "top_k=0.2": "a fifth"}
app = typer.Typer()


@app.command()
def loss(points: Path, times: Path, out: Path) -> None:
    """A panel for each task and length and one for all together; on each line a tenth and a fifth of the keys."""
    rows, timed = (list(map(json.loads, file.read_text(encoding="utf-8").splitlines())) for file in (points, times))
    longest = max(row["case"]["context"] for row in timed)
    anchors, layers = anchors_of(rows[0])
    faster = speeds([row for row in timed if row["case"]["context"] == longest], anchors, layers)
    cells = grouped(rows, lambda row: (row["task"], row["split"], row["length"]))
    panels = {heading(of[0]) + f", n = {of[0]['n']}": of for of in cells.values()}
    number = sum(of[0]["n"] for of in cells.values())
    panels[f"all {len(cells)} together, n = {number}"] = rows
    with figure.drawing(out, figure.height(len(panels), len(_LINES) + 1)) as page:
        axes = figure.panels(page, len(panels), sharey=True)
        for axis, (words, some) in zip(axes, panels.items(), strict=True):
            for name, (more, look, above) in _LINES.items():
                found = {share: point(some, spec(share + more), faster) for share in _SHARES}
                figure.line(axis, list(found.values()), name, look, 0)
                for share, at in found.items():
                    if more != _DENSE:  # whose points stand above each other
                        axis.annotate(_SHARES[share], (at.x, at.y), (5, above), textcoords="offset points", fontsize=7)
            figure.level(axis, 0.0, None)
            axis.set_title(words)
        prompt = f"attention of a prompt of {context_length(longest)} tokens, times as fast"
        figure.name_axes(axes, prompt, "points to dense")
        figure.legend(page, axes)
        title = "What sparse prompts lose and gain with a tenth and a fifth of the keys"
        title += f" ({anchors} anchors of {layers} layers; times of the 8B's)"
        figure.title(page, title, f"{rows[0]['model']}; {made_with(rows)}")


def anchors_of(row: Row) -> tuple[int, int]:
    """Anchors of the calibration that comes with foveate for the model of a row, and the model's layers."""
    calibration = load(Path(foveate.calibrations.__path__[0]) / f"{row['model']}.json")
    return len(calibration.anchors), row["architecture"]["layers"]


def speeds(timed: Sequence[Row], anchors: int, layers: int) -> dict[str, float]:
    """How many times as fast as the fastest dense attention the layers of a model read a prompt, by spec.

    ``timed`` are rows of one length. Their layers that choose and their layers that read are weighed anew, because they
    were timed with another number of anchors.
    """
    found = {}
    for row in timed:
        if "reading" in (row["layers"] or {}):
            kinds = {name: kind["ms"] for name, kind in row["layers"].items()}
            whole = kinds["dense, choosing"] + (anchors - 1) * kinds["choosing"] + (layers - anchors) * kinds["reading"]
            found[row["case"]["method"]] = layers * row["baseline_ms"] / whole
    return found


def spec(settings: str) -> str:
    """`kascade` with these settings, as rows of times write it."""
    return f"kascade:{settings.lstrip(',')}" if settings else "kascade"


def point(rows: Sequence[Row], wanted: str, faster: Mapping[str, float]) -> Point:
    """The paired difference to dense attention with its interval, over the items of all comparisons if several."""
    own = [row for row in rows if CALIBRATION.sub("", row["spec"]) == wanted]
    x = faster[wanted] if "decode_only=false" in wanted else 1.0
    if len(own) == 1:
        return Point(x, *(own[0][name] for name in ("diff_to_dense", "diff_low", "diff_high")))
    found = pooled.difference(own, [row for row in rows if row["method"] == "dense"])
    return Point(x, found.value, found.low, found.high)


if __name__ == "__main__":
    app()
