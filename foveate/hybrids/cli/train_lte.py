"""`foveate train lte`: the module of learned eviction for a frozen model."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from foveate.cli.progress import Progress
from foveate.cli.quiet import quiet
from foveate.cli.terminal import console
from foveate.integrations.early import check_model
from foveate.io.outfile import announce
from foveate.io.reading import novel_files


def lte(
    model: Annotated[Path, typer.Option("--model", help="Folder of a Hugging Face model.", show_default=False)],
    text: Annotated[
        Path, typer.Option(help="Folder of plain text to read (.txt, .txt.xz, .tar.xz).", show_default=False)
    ],
    out: Annotated[
        Path, typer.Option(help="File for the module (.safetensors).", show_default=False, callback=announce)
    ],
    steps: Annotated[int, typer.Option(help="Sequences to learn from, one a step.")] = 1000,
    minutes: Annotated[
        float | None, typer.Option(help="End after so many minutes, whatever the steps.", show_default=False)
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 4096,
    window: Annotated[int, typer.Option(help="Queries within so many tokens do not count.")] = 32,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = 2e-3,
    seed: Annotated[int, typer.Option(help="Seed of sequences and weights.")] = 0,
    dtype: Annotated[
        str, typer.Option(help="The model's: float32, bfloat16, float16, or auto: float32 on a CPU, else its own.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")] = "auto",
) -> None:
    """Learn which tokens of a frozen model later queries will need: resumable, one small file for --method lte."""
    check_model(model, needs_weights=True)
    novel_files(text)

    from foveate.hybrids.training.frozen_lte import Plan, train
    from foveate.methods import get

    plan = Plan(model, text, out, steps, minutes, length, window, lr, seed, dtype, device)
    notes = console(stderr=True)
    quiet()
    with _Readings(notes, steps) as progress:
        outcome = train(plan, progress.say, progress)
    if outcome.signal is not None:
        raise typer.Exit(128 + outcome.signal)
    typer.echo(
        f"step {outcome.step:,} · held-out loss {outcome.loss:.4f} · {outcome.recall:.1%} of the best tokens found"
    )
    typer.echo(f"use it as --method {shlex.quote(get('lte')(file=str(out)).spec)}")


class _Readings(Progress):
    """Shows the readings of a run, each once."""

    _said = 0

    def __call__(self, step: int, steps: int, row: dict[str, float]) -> None:
        line = f"loss {row['loss']:.4f} · recall {row['recall']:.1%}" if row else "learning"
        self.show(step, steps, line)
        if row and not self.on_terminal and row["step"] != self._said:
            self._said = row["step"]
            self.say(f"step {step:,} of {steps:,} · {line} · {row['seconds']:,.0f} s")
