"""`foveate train ...`: a run by its configuration, tokenised text, and the list of settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from foveate.cli.progress import INTERRUPTED, Progress
from foveate.cli.quiet import quiet
from foveate.cli.terminal import console
from foveate.io.outfile import announce

app = typer.Typer(help="Train a model on text and generated retrieval.")

_MISSED = 3
"""The exit code of a run whose model has not learned what `sparsity.recall` asks for."""


@app.callback(invoke_without_command=True)
def train(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="The run's settings (.toml, .json).", show_default=False)] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for checkpoints, log and model.", show_default=False, callback=announce),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE over the file, such as optim.lr=0.001; may be repeated."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest whole checkpoint.")] = False,
    minutes: Annotated[
        float | None, typer.Option(help="Stop with a checkpoint after so many minutes.", show_default=False)
    ] = None,
) -> None:
    """Train by a configuration: resumable to the same curve; under torchrun with several processes."""
    if context.invoked_subcommand is not None:
        return
    from foveate.errors import UserError, require

    if config is None or out is None:
        raise UserError("foveate train needs --config and --out; foveate train settings lists what a configuration has")
    require(minutes is None or minutes > 0, "--minutes", "above 0", minutes)
    from foveate.hybrids.training import configuration

    plan = configuration.load(config, changes or [])

    from foveate.hybrids.training import loop

    quiet()
    try:
        with _Readings(console(stderr=True), plan.steps) as progress:
            outcome = loop.train(plan, out, resume, minutes, progress.say, progress)
    except KeyboardInterrupt:
        progress.say("interrupted; --resume goes on from the last checkpoint")
        raise typer.Exit(INTERRUPTED) from None
    if _first():
        _summary(out, outcome, progress.say)
    if outcome.signal is not None:
        raise typer.Exit(128 + outcome.signal)
    if outcome.missed:
        if _first():
            typer.echo(f"no recall: {outcome.missed}")
        raise typer.Exit(_MISSED)


@app.command()
def prepare(
    text: Annotated[Path, typer.Option(help="Folder of .txt, .jsonl or wikiextractor's files, also .xz.")],
    out: Annotated[Path, typer.Option(help="Folder for the tokenised text.", show_default=False, callback=announce)],
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of a tokenizer; one is trained if left out.", show_default=False)
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="Tokens of one that is trained.")] = 16384,
    limit: Annotated[
        int | None, typer.Option(help="Training tokens, taken alike from all files; else all.", show_default=False)
    ] = None,
    held_out: Annotated[float, typer.Option(help="Share of the documents that training never sees.")] = 0.005,
    leave_out: Annotated[
        list[Path] | None,
        typer.Option(help="Titles to leave out: a SQuAD file, or one a line; may be repeated.", show_default=False),
    ] = None,
    questions: Annotated[
        list[Path] | None,
        typer.Option(help="A train set for the cloze source; may be repeated.", show_default=False),
    ] = None,
) -> None:
    """Tokenise a folder of text, once: memory-mapped shards, all that a run reads."""
    from foveate.hybrids.training.prepare import Preparation
    from foveate.hybrids.training.prepare import prepare as prepare_text

    plan = Preparation(
        text,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        limit=limit,
        held_out=held_out,
        leave_out=tuple(leave_out or ()),
        questions=tuple(questions or ()),
    )
    prepare_text(plan, out, typer.echo)


@app.command()
def settings() -> None:
    """List what a configuration can set, with defaults."""
    from foveate.hybrids.training import configuration

    for name, default, text in configuration.settings():
        default = "none" if default is None else list(default) if isinstance(default, tuple) else default
        typer.echo(f"{name} = {default}  # {text}")


class _Readings(Progress):
    """Shows the readings of a run."""

    def __call__(self, step: int, steps: int, row: dict[str, float]) -> None:
        line = f"loss {row['loss']:.4f} · {row['tokens_per_s']:,.0f} tokens/s"
        self.show(step, steps, line)
        if not self.on_terminal:
            self.say(f"step {step:,} of {steps:,} · {line}")


def _summary(out: Path, outcome: Any, say: Any) -> None:
    parts = [f"step {outcome.step:,}"]
    if outcome.loss is not None:
        parts.append(f"loss {outcome.loss:.4f}")
    if outcome.held_out is not None:
        parts.append(f"held-out loss {outcome.held_out:.4f}")
    if outcome.tokens_per_second is not None:
        parts.append(f"{outcome.tokens_per_second:,.0f} tokens/s")
    say(" · ".join(parts))
    if outcome.finished:
        typer.echo(f"the model is in {out / 'model'}")


def _first() -> bool:
    return os.environ.get("RANK", "0") == "0"
