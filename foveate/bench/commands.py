"""`foveate bench ...`: one command for each question."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, help="Measure speed.")

Model = Annotated[Path, typer.Option("--model", help="Folder of a Hugging Face model.", show_default=False)]
Out = Annotated[Path | None, typer.Option(help="File for the rows (JSON Lines).", show_default=False)]
Methods = Annotated[list[str] | None, typer.Option("--method", help="A method; may be given often.")]


@app.command("cpu-decode")
def cpu_decode(
    model: Model,
    data: Annotated[Path, typer.Option(help="Folder with books.", show_default=False)],
    context: Annotated[int, typer.Option(help="Prompt tokens.")] = 8000,
    steps: Annotated[int, typer.Option(help="Timed decode steps of each implementation.")] = 48,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 2,
    method: Methods = None,
    out: Out = None,
) -> None:
    """Decode steps of a real model on the CPU: dense, sparse and Transformers' own path."""
    from foveate.bench import cpu_decode as bench

    _measure(
        bench.BENCH,
        out,
        lambda say: bench.run(model, data, context, steps, method or bench.METHODS, threads, say),
    )


@app.command("prefill")
def prefill(
    model: Model,
    context: Annotated[list[int] | None, typer.Option(help="Prompt tokens; may be given often.")] = None,
    repeats: Annotated[int, typer.Option(help="Timed runs.")] = 5,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    method: Methods = None,
    out: Out = None,
) -> None:
    """Time and peak memory of a prompt on a GPU."""
    from foveate.bench import prefill as bench

    contexts = context or (8192, 16384, 32768)
    _measure(bench.BENCH, out, lambda say: bench.run(model, contexts, method or bench.METHODS, repeats, dtype, say))


def _measure(bench: str, out: Path | None, run: Callable[[Callable[[str], None]], list[dict[str, Any]]]) -> None:
    from foveate.bench import rows as files
    from foveate.report.speeds import speeds
    from foveate.report.table import console

    if out is not None:
        files.check_out(out, bench)
    notes = console(stderr=True)
    rows = run(lambda line: notes.print(line, style="dim", markup=False))
    if out is not None:
        files.write(out, rows)
    console().print(speeds(rows))
