"""What the commands of `foveate bench` share: options, and how rows are kept, written and shown."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from foveate.results.outfile import announce

Model = Annotated[Path, typer.Option("--model", help="Folder of a Hugging Face model.", show_default=False)]
Out = Annotated[
    Path | None,
    typer.Option(
        help="File for the rows (JSON Lines), those of other cases stay in it.", show_default=False, callback=announce
    ),
]
Methods = Annotated[list[str] | None, typer.Option("--method", help="A method; may be given often.")]


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}" if name != "chunks" else "--chunk"


def kept(out: Path | None) -> Callable[[list[dict[str, Any]]], None]:
    """A function that writes rows to the file as they come, so that an interrupted run keeps what it has measured."""
    from foveate.results import measurements

    return functools.partial(measurements.write, out) if out is not None else lambda rows: None


def measure(
    bench: str,
    out: Path | None,
    run: Callable[[Callable[[str], None]], list[dict[str, Any]]],
    markdown: Callable[[list[dict[str, Any]]], str] | None = None,
) -> None:
    """Run a bench, write its rows and show them.

    Args:
        bench: name of the bench, which all rows of the file must have.
        out: file for the rows, or None.
        run: gives the rows; called with a function that shows a line of progress.
        markdown: gives the table to print; without it rows are shown as a table for the terminal.

    Raises:
        UserError: before anything is measured, if the file cannot be written or holds rows of another bench.
    """
    from foveate.report.terminal import console, speeds
    from foveate.results import measurements

    if out is not None:
        measurements.check_out(out, bench)
    notes = console(stderr=True)
    rows = run(lambda line: notes.print(line, style="dim", markup=False))
    if not rows:
        return  # of several processes, only the first has rows
    if out is not None:
        measurements.write(out, rows)
    if markdown is not None:
        typer.echo(markdown(rows))
    else:
        console().print(speeds(rows))
