"""The command line: `foveate methods · plan · doctor · generate · chat · compare · calibrate · report · train · …`.

torch and Transformers are imported inside the commands, so that help and bad names answer at once.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from foveate import __version__
from foveate.cli import imports, planning, serving, terminal
from foveate.io import outfile

_BAD_INPUT = (ValueError, OSError, NotImplementedError, ArithmeticError, RecursionError)
_FAILED = 2
_WINGS = ("foveate.lab.cli", "foveate.hybrids.cli")
"""Packages whose `app` has further commands."""


class _Commands(TyperGroup):
    """The commands of the core and of the wings. Ends bad input with one red line and exit code 2; `--debug` lets the
    traceback through."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        for wing in _WINGS:
            self.commands |= typer.main.get_group(importlib.import_module(wing).app).commands
        for command in self.commands.values():
            _keep_inputs(command)
            _plain_help(command)
        _plain_help(self)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except (Exception, SystemExit) as error:
            no_memory = type(error).__name__ == "OutOfMemoryError"
            own = None if no_memory else imports.fault(error)
            if ctx.params["debug"] or not (own or no_memory or isinstance(error, _BAD_INPUT)):
                raise
            message = "out of memory; try fewer sequences at once, or shorter ones" if no_memory else own or str(error)
            terminal.console(stderr=True).print(f"error: {message}", style="red", markup=False, soft_wrap=True)
            raise typer.Exit(_FAILED) from None


def _paths(value: Any) -> list[Path]:
    """The paths that an argument may name, as the spec of a method does."""
    if isinstance(value, (list, tuple)):
        return [path for one in value for path in _paths(one)]
    if isinstance(value, str):
        parts = (one for one in {value, *re.split(r"[:,=\"]", value)} if one and "\0" not in one)
        return [Path(one) for one in parts if os.path.exists(one)]
    return [value] if isinstance(value, Path) else []


def _keep_inputs(command: Any) -> None:
    """Lets a command, or each of a group, refuse an output that is one of its inputs before it does anything."""
    for one in getattr(command, "commands", {}).values():
        _keep_inputs(one)
    outs = {one.name for one in command.params if getattr(one.callback, "__wrapped__", None) is outfile.announce}
    if not outs:
        return
    run = command.invoke

    def invoke(ctx: Any) -> Any:
        for name in outs:
            others = [value for other, value in ctx.params.items() if other != name]
            if out := ctx.params.get(name):
                outfile.check_apart(out, [path for value in others for path in _paths(value)], f"--{name}")
        return run(ctx)

    command.invoke = invoke


def _plain_help(command: Any) -> None:
    """Lets a command and the commands of its group print their help in two columns, with a narrow one for names."""
    command.rich_markup_mode = None
    command.short_help = (command.help or "").partition("\n\n")[0]  # which a list of commands does not cut off
    command.context_settings = {**command.context_settings, "max_content_width": terminal.WIDTH}
    for one in getattr(command, "commands", {}).values():
        _plain_help(one)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Long-context inference that looks closely only where it matters.",
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"foveate {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; allowed anywhere.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of all commands; what they do is in `_Commands`."""
    os.environ.setdefault("USE_HUB_KERNELS", "0")  # else Transformers asks a hub for kernels of recurrent layers


@app.command()
def methods(
    name: Annotated[
        str | None, typer.Argument(help="One method, with an example; left out: all.", show_default=False)
    ] = None,
    as_json: AsJson = False,
    imported: imports.Import = None,
) -> None:
    """List the methods with their sources and settings."""
    import foveate

    entries = []
    for known in foveate.methods.names() if name is None else [name]:
        method = foveate.methods.get(known)
        settings = [
            {"name": field.name, "default": field.default, "help": field.metadata.get("help", "")}
            for field in dataclasses.fields(method)
        ]
        summary = " ".join((method.__doc__ or "").partition("\n\n")[0].replace("``", "").split())
        entry = {"name": method.name, "summary": summary, "source": method.about.source, "settings": settings}
        entries.append(entry | {"example": _example(method)})
    if as_json:
        typer.echo(json.dumps(entries, indent=2, ensure_ascii=False, default=str))
    else:
        terminal.console().print(terminal.methods(entries, examples=name is not None))


def _example(method: Any) -> str:
    """A spec of a method, with what it needs, or else its budget, written out."""
    if method.about.example:
        return method.about.example
    defaults = {field.name: field.default for field in dataclasses.fields(method)}
    budget = next((one for one in ("top_k", "window") if one in defaults), None)
    return method.name if budget is None else f"{method.name}:{budget}={defaults[budget]}"


app.command(context_settings=serving.SETTINGS)(serving.serve)
app.command()(planning.plan)


def main() -> None:
    """Entry of the `foveate` script; `--debug` may stand anywhere among the arguments."""
    arguments = sys.argv[1:]
    if "--debug" in arguments:
        arguments = ["--debug", *(argument for argument in arguments if argument != "--debug")]
    app(args=arguments, prog_name="foveate")
