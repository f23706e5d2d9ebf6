"""Losses and retention of trained hybrids as plots: figures 6 and 5 of the laLTE/laNSA paper.

    python -m benchmarks.hybrid_plots benchmarks/results/hybrids-curves.jsonl docs/figures
    python -m benchmarks.hybrid_plots benchmarks/results/hybrids-lesson-curves.jsonl docs/figures \\
        --name hybrids-recipe --model gdn_recipe-27M-0 --model gdn_swa_recipe-27M-0 \\
        --model gdn_attn_recipe-27M-0 --model lalte_lesson-27M-0 --model lte_mlp_lesson-27M-0 \\
        --model pure_lte_lesson-27M-0

The folder gets `hybrids-losses.png` and, of models with LTE layers that `hybrid_curves.py` had at hand,
`hybrids-retention.png`; `--name` stands in place of `hybrids`. `--model` draws some models of a file alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from foveate.errors import DataError, UserError
from foveate.lab.report.plots import figure
from foveate.lab.report.rows import Row, checked

_LINES = 6
"""Most models of a panel."""
_COLORS = ("#222222", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
_STYLES = [figure.Look(color, dashes) for color, dashes in zip(_COLORS, ("-", "--", "-.", ":", "-", "--"), strict=True)]
"""Colours, and dashes for those who cannot tell these apart."""


def read(files: Sequence[Path]) -> list[Row]:
    """Rows of `benchmarks/hybrid_curves.py`. Raises `DataError` for others, or for files without any."""

    def check(row: Any, where: str) -> None:
        if not isinstance(row, dict) or row.get("kind") != "hybrid-curves":
            raise DataError(f"{where}: not a row of benchmarks/hybrid_curves.py")

    return checked(files, check)


def losses(rows: Sequence[Row], out: Path) -> None:
    """Training loss by tokens, a line for each model, and the held-out loss as points; panels of at most six models."""
    count = -(-len(rows) // _LINES)
    each = -(-len(rows) // count)
    late = [loss for row in rows for loss in (*row["loss"][len(row["loss"]) // 8 :], *row["held_out"])]
    with figure.drawing(out, figure.height(count, 0)) as drawn:
        axes = figure.panels(drawn, count, sharey=True)
        for place, row in enumerate(rows):
            axis, style = axes[place // each], _STYLES[place % each]
            tokens = [number / 1e6 for number in row["tokens"]]
            axis.plot(tokens, row["loss"], style.marker, color=style.color, label=row["model"])
            x = [number / 1e6 for number in row["held_out_tokens"]]
            axis.plot(x, row["held_out"], "o", color=style.color, alpha=0.6)
        axes[0].set_ylim(min(late) * 0.97, max(late) * 1.02)
        for axis in axes:
            axis.legend()
        figure.name_axes(axes, "tokens, millions", "loss, nats a token")
        figure.title(drawn, "Training loss (lines) and loss on held-out text (marks)", _facts(rows))


def retention(rows: Sequence[Row], out: Path) -> None:
    """Share of the tokens before the window that each KV head of each LTE layer retains, a panel for each model.

    Raises `UserError` if no model has LTE layers.
    """
    drawn_rows = [row for row in rows if row["retention"]]
    if not drawn_rows:
        raise UserError("retention: no row is of a model with lte layers")
    highest = max(share for row in drawn_rows for layer in row["retention"]["share"] for share in layer)
    with figure.drawing(out, figure.height(len(drawn_rows), 1)) as drawn:
        axes = figure.panels(drawn, len(drawn_rows))
        for axis, row in zip(axes, drawn_rows, strict=True):
            kept = row["retention"]
            shares = [list(heads) for heads in zip(*kept["share"], strict=True)]
            image = axis.imshow(shares, aspect="auto", cmap="viridis", vmin=0, vmax=highest)
            axis.set_xticks(range(len(kept["layers"])), kept["layers"])
            axis.set_yticks(range(len(shares)))
            axis.grid(visible=False)
            axis.set_title(row["model"])
            for head, of_layers in enumerate(shares):
                for layer, share in enumerate(of_layers):
                    color = "white" if share < 0.6 * highest else "black"
                    axis.text(layer, head, f"{share:.1%}", ha="center", va="center", fontsize=7, color=color)
        figure.name_axes(axes, "layer", "KV head")
        drawn.colorbar(image, ax=axes, label="share retained", format=lambda value, _: f"{value:.0%}")
        kept = drawn_rows[0]["retention"]
        words = f"{kept['sequences']} held-out sequences of {kept['length']:,} tokens"
        figure.title(drawn, "Tokens before the window that a KV head retains", f"{words}; {_facts(rows)}")


def _facts(rows: Sequence[Row]) -> str:
    devices = sorted({row["device"] for row in rows})
    versions = sorted({f"torch {row['versions']['torch']}" for row in rows})
    return "; ".join((", ".join(devices), ", ".join(versions)))


def main(
    file: Path,
    folder: Path,
    name: Annotated[str, typer.Option(help="Before the names of the pictures.")] = "hybrids",
    model: Annotated[list[str] | None, typer.Option(help="Model to draw, repeated; all if left out.")] = None,
) -> None:
    """Draw the rows of `benchmarks/hybrid_curves.py`."""
    rows = read([file])
    if unknown := sorted({*(model or ())} - {row["model"] for row in rows}):
        raise UserError(f"--model {unknown[0]}: {file} has {', '.join(dict.fromkeys(row['model'] for row in rows))}")
    rows = [next(row for row in rows if row["model"] == one and row["held_out"]) for one in model] if model else rows
    losses(rows, folder / f"{name}-losses.png")
    if any(row["retention"] for row in rows):
        retention(rows, folder / f"{name}-retention.png")


if __name__ == "__main__":
    typer.run(main)
