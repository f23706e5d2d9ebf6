"""`foveate plot ...`: one command for each kind of plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from foveate.io.outfile import announce

app = typer.Typer(no_args_is_help=True, help="Draw rows of results, or a calibration, as PNG.")

Files = Annotated[list[Path], typer.Argument(help="Files of rows (JSON Lines).")]
Out = Annotated[Path, typer.Option(help="PNG file to write.", callback=announce)]
Where = Annotated[
    list[str] | None,
    typer.Option(
        help="Only rows with NAME=VALUE: a field, or a setting of task or method; may be repeated; of one NAME, any."
    ),
]


@app.command()
def frontier(
    files: Files,
    out: Out,
    along: Annotated[
        list[str] | None, typer.Option(help="A setting, beside the budgets, that may differ along a line.")
    ] = None,
    recommended: Annotated[str | None, typer.Option(help="Spec of the point that gets a star.")] = None,
    margin: Annotated[float | None, typer.Option(help="Draw a line so many points below dense.")] = None,
    over_splits: Annotated[
        bool, typer.Option("--over-splits", help="Show splits whose names differ in a last number as one.")
    ] = False,
    against: Annotated[
        str, typer.Option(help="keys_read_share, or kv_bytes_per_step: bytes of keys and values.")
    ] = "keys_read_share",
    where: Where = None,
) -> None:
    """Score against what decoding reads: a panel for each task, a line for each method."""
    from foveate.lab.report.plots import frontier as plots
    from foveate.lab.report.rows import chosen, read

    how = (along or [], recommended, margin, over_splits, against)
    _say(out, plots.frontier(chosen(read(files), where or []), out, *how))


@app.command()
def recall(files: Files, out: Out, where: Where = None) -> None:
    """Recall by layer and method, from rows of `foveate compare --recall`."""
    from foveate.lab.report.plots import recall as plots
    from foveate.lab.report.rows import chosen, read

    _say(out, plots.recall(chosen(read(files), where or []), out))


@app.command()
def decode(
    files: Files,
    out: Out,
    level: Annotated[str, typer.Option(help="kernel: a layer's kernels; model: a model's whole step.")] = "kernel",
    where: Where = None,
) -> None:
    """What a decode step goes to, by method, from rows of the bench `decode`."""
    from foveate.lab.report.plots import decode as plots
    from foveate.lab.report.rows import of_cases, read_bench

    plots.parts(of_cases(read_bench(files, "decode"), where or []), out, level)
    _say(out)


@app.command()
def calibration(file: Annotated[Path, typer.Argument(help="File of `foveate calibrate`.")], out: Out) -> None:
    """A calibration of Kascade: similarity of layers, their importance, attention on few keys by head."""
    from foveate.calibration import load
    from foveate.lab.report.plots.calibration import draw

    draw(load(file), out)
    typer.echo(f"{out}: anchors of {file.name}")


def _say(out: Path, notes: Sequence[str] = ()) -> None:
    from foveate.cli.terminal import console

    for note in [*notes, f"wrote {out}"]:
        console(stderr=True).print(note, style="dim", markup=False, soft_wrap=True)
