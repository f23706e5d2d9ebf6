"""`foveate serve`: vLLM with a method, checked before the engine starts."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from foveate.integrations.vllm import options

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Of the command: all other options are vLLM's."""


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder of a model, or a name that vLLM knows.")],
    method: Annotated[
        list[str],
        typer.Option(
            metavar="<str>",
            help="A method, or a .json file of `foveate tune`; auto: the recommended one for the model.",
        ),
    ] = ["auto"],  # noqa: B006
    dense_below: Annotated[
        int | None,
        typer.Option(
            help="Tokens below which decoding is dense; if left out, the method's own, and 4,096 a request.",
            show_default=False,
        ),
    ] = None,
    audit: Annotated[
        float | None,
        typer.Option(help="Share of decode steps that are also run densely and compared.", show_default=False),
    ] = None,
    lossless: Annotated[
        int | None,
        typer.Option(
            help="Draft this many tokens by the method and verify them densely: answers are those of dense attention.",
            show_default=False,
        ),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Check and print the plan, and start nothing.")] = False,
) -> None:
    """Serve a model with vLLM by a method; options that are not listed here go to `vllm serve`."""
    if len(method) > 1:
        raise ValueError(f"--method is given {len(method)} times ({', '.join(method)}): leave all but one out")
    options.check_early(model, context.args)

    from foveate.cli.quiet import quiet
    from foveate.integrations.vllm import launch

    environment = dict(os.environ)  # before vLLM is imported, which leaves marks of a process in it
    quiet()
    here = launch.vllm_here()
    arguments = launch.arguments_of(model, *method, dense_below, context.args, audit, lossless, needs_vllm=not check)
    config = launch.checked(arguments) if here else None
    lines = launch.startup_summary(config) if here else launch.folder_summary(model, arguments)
    if check:
        lines += _sizes(model, method[0], context.args, config.model_config.max_model_len if here else None)
    for line in lines:
        typer.echo(line)
    if not here:
        typer.echo(f"vLLM: not checked, {launch.NO_VLLM}; the command there:")
    typer.echo(shlex.join(launch.command(arguments)))
    if not check:
        os.execve(sys.executable, launch.command(arguments), environment)


def _sizes(model: str, method: str, given: list[str], tokens: int | None) -> list[str]:
    """What a folder's model and a request take of a GPU, by the arithmetic of `foveate plan`, a line each.

    Args:
        given: vLLM's options.
        tokens: of the longest request, as vLLM has settled it; None: as the options or the model say.
    """
    if not (Path(model).is_dir() and options.tells_all(given)):
        return []
    from foveate.planning.gpus import gpu_here
    from foveate.planning.machine import served_lines

    sizes = options.typed(given)
    how = {"ranks": sizes.ranks, "kv_cache_dtype": sizes.kv_cache_dtype, "dtype": sizes.dtype}
    try:
        return served_lines(Path(model), tokens or sizes.tokens, gpu_here(), method=method, **how)
    except ValueError as error:  # vLLM serves more models and options than a plan is made for
        return [f"sizes: not planned, {error}"]
