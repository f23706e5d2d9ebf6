"""`foveate tune`: the cheapest setting that keeps a model's answers on one's own data."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from foveate.cli.imports import Import
from foveate.cli.quiet import quiet
from foveate.cli.terminal import console
from foveate.lab.cli.asking import Device, Dtype, Model
from foveate.lab.cli.progress import resumable, sayer
from foveate.outfile import announce


def tune(
    model: Model,
    data: Annotated[Path, typer.Option(help="Folder or file of documents (docs/guide/data.md).")],
    out: Annotated[
        Path, typer.Option(help="File for the setting, which attach takes in the place of a method.", callback=announce)
    ] = Path("foveate.json"),
    max_loss: Annotated[float, typer.Option(help="Points of the score that may be lost against dense.")] = 1.0,
    objective: Annotated[str, typer.Option(help="What is to be small: latency, throughput or memory.")] = "latency",
    task: Annotated[str, typer.Option(help="documents with settings, such as documents:length=8192.")] = "documents",
    calibration: Annotated[
        Path | None, typer.Option(help="A file of foveate calibrate: kascade is tried, too.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            help="Items to choose on at most, and as many to check on; if left out, as many as tell --max-loss, or 20 "
            "of documents without answers."
        ),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Time after which nothing new is tried.")] = 15.0,
    batch_size: Annotated[int, typer.Option(help="Items answered at once.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the items.")] = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    imported: Import = None,
) -> None:
    """Search methods and budgets on one half of your documents, check the best on the other, write it: resumable."""
    from foveate.lab.evaluation import tasks
    from foveate.lab.evaluation.tune import Plan, search

    say, chosen = sayer(console(stderr=True)), tasks.parse(task, split="tune")
    quiet()
    how = (max_loss, objective, calibration, limit, minutes, batch_size, seed, dtype, device, tuple(imported or ()))
    plan = Plan(model, chosen, data, out, *how)
    with resumable(say, f"the trials so far are in {plan.rows('tune')}"):
        found = search(plan, say)
    typer.echo(f"{found.spec}; in Python: foveate.attach(model, {str(out)!r}), else --method {shlex.quote(str(out))}")
