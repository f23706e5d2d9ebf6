"""`foveate check`: does a method hold what every method promises?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from foveate.cli import AsJson
from foveate.cli.imports import Import
from foveate.cli.quiet import quiet
from foveate.integrations.early import check_model


def check(
    method: Annotated[str, typer.Option(help="A method; by its name alone it gets the small budget that it declares.")],
    model: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a Hugging Face model; left out: a tiny one with random weights.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
    imported: Import = None,
) -> None:
    """Check that a method gives the same alone and in batches, whole and in pieces, copied, saved and captured."""
    if model is not None:
        check_model(model, needs_weights=True)

    from foveate.lab import checks

    quiet()
    chosen = checks.small(method)
    found = checks.check(chosen, None if model is None else _loaded(model))
    if as_json:
        typer.echo(json.dumps([line._asdict() for line in found.lines], indent=2))
    else:
        typer.echo(f"{found.spec}\n{found}")
    if not found.passed:
        raise typer.Exit(1)


def _loaded(folder: Path):
    from foveate.integrations.transformers.loading import load_model

    return load_model(folder, "float32", "cpu")
