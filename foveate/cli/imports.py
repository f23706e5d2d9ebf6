"""Files of the user's that define methods: run once, known by their digests, named where they fail."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from foveate.errors import UserError
from foveate.io import infile
from foveate.io.digest import digest

_RAN: dict[str, str] = {}
"""The files that have run, by their absolute paths, each with a digest of the code that ran."""


def run(file: Path) -> None:
    """Run a file, whose methods then have names, as a module that is called as its path.

    Raises:
        UserError: for a file that is not there or fails, or that calls `sys.exit`; with file and line.
    """
    infile.check(file)
    name, before = str(file.resolve()), set(sys.modules)
    module = ModuleType(name)
    module.__file__ = name
    sys.modules[name] = module  # where dataclasses and pickles look for it
    try:
        exec(compile(infile.read(file, infile.MOST_OF_SETTINGS), name, "exec", dont_inherit=True), module.__dict__)
    except SyntaxError as error:
        del sys.modules[name]
        raise UserError(f"{file}:{error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        _RAN[name] = ""
        raise UserError(fault(error) or f"{file}: {_words(error)}") from error
    beside = {getattr(sys.modules[one], "__file__", None) for one in set(sys.modules) - before - {name}}
    own = sorted(Path(one) for one in beside if one and Path(one).is_relative_to(file.resolve().parent))
    _RAN[name] = digest([file.resolve(), *own])


def identity(file: Path) -> str:
    """A file's name, with a digest of the file and of the modules that it imported from its own folder."""
    return f"{file.name} {_RAN.get(str(file.resolve())) or digest([file])}"


def fault(error: BaseException) -> str | None:
    """What went wrong in a file that ran, with file and line; None for an error that passed through no such file."""
    for one in _causes(error):
        frames = [frame for frame in traceback.extract_tb(one.__traceback__) if frame.filename in _RAN]
        if frames:
            return f"{frames[-1].filename}:{frames[-1].lineno}: {_words(one)}"
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The errors that led to an error, the first of them first."""
    if error.__cause__ is not None:
        yield from _causes(error.__cause__)
    yield error


def _words(error: BaseException) -> str:
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, SystemExit):
        return f"SystemExit({error.code!r}): a file of methods must not end the program"
    text, kind = str(error), type(error).__name__
    return text if text and type(error) is ValueError else ": ".join(filter(None, (kind, text)))


def _run_all(files: list[Path] | None) -> list[Path]:
    for file in files or ():
        run(file)
    return files or []


Import = Annotated[
    list[Path] | None,
    typer.Option(
        "--import",
        help="A Python file that is run first: the methods that it defines can be named; may be repeated.",
        show_default=False,
        callback=_run_all,
        is_eager=True,
    ),
]
