"""`foveate plan`: memory, the method, an estimate of a step's time, and the commands, from a config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from foveate.cli.quiet import quiet
from foveate.errors import UserError, require
from foveate.integrations.early import check_model
from foveate.planning.gpus import GPUS, Gpu, gpu_here, gpu_of


def plan(
    model: Annotated[Path, typer.Option(help="Folder of a model; config.json suffices.")],
    context: Annotated[int, typer.Option(help="Tokens of a sequence, its prompt and its answer.")],
    sequences: Annotated[int, typer.Option(help="Sequences that decode at once.")] = 1,
    gpu: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(GPUS)}, or a size of memory such as 24GB; left out: the GPU that is here.",
            show_default=False,
        ),
    ] = None,
    tp: Annotated[int, typer.Option(help="GPUs that share each layer, with vLLM.")] = 1,
    method: Annotated[str, typer.Option(help="A method; auto: the recommended one for the model.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="Of weights and cache: float32, bfloat16, float16, or auto: the model's own.")
    ] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto: as the weights; fp8: eight bits, with vLLM.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Plan long contexts without weights: memory, the method, an estimate of a step's time, and the commands."""
    require(context >= 1, "context", "at least 1", context)
    require(sequences >= 1, "sequences", "at least 1", sequences)
    require(tp >= 1, "tp", "at least 1", tp)
    chosen = None if gpu is None else gpu_of(gpu)
    check_model(model)
    from foveate.planning.lines import lines_of
    from foveate.planning.plan import Asked, plan_of

    quiet()
    asked = Asked(context, sequences, chosen or _here(), tp, kv_cache_dtype, method)
    found = plan_of(model, asked, dtype)
    if as_json:
        typer.echo(json.dumps(found.facts(), indent=2))
    else:
        typer.echo("\n".join(lines_of(found, str(model), dtype)))


def _here() -> Gpu:
    """The GPU of this machine. Raises UserError where there is none."""
    if (found := gpu_here()) is None:
        raise UserError(f"no GPU is here: name one with --gpu ({', '.join(GPUS)}, or a size such as 24GB)")
    return found
