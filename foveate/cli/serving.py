"""`foveate serve`: vLLM with a method, checked before the engine starts."""

from __future__ import annotations

import os
import shlex
import sys
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
            help="Tokens below which decoding is dense; if left out, the method's own, or 4,096 a request.",
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
    """Serve a model with vLLM by a method; options that are not listed here are those of `vllm serve`."""
    if len(method) > 1:
        raise ValueError(f"--method is given {len(method)} times ({', '.join(method)}): leave all but one out")
    options.check_early(model, context.args)

    from foveate.cli.quiet import quiet
    from foveate.integrations.vllm import launch

    environment = dict(os.environ)  # before vLLM is imported, which leaves marks of a process in it
    quiet()
    arguments = launch.arguments_of(model, *method, dense_below, context.args, audit, lossless)
    for line in launch.startup_summary(launch.checked(arguments)):
        typer.echo(line)
    typer.echo(shlex.join(launch.command(arguments)))
    if not check:
        os.execve(sys.executable, launch.command(arguments), environment)
