"""Errors that a user can mend: one line with what is wrong and what is allowed."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable
from typing import Any


class UserError(ValueError):
    """Bad input: an unknown name, a missing folder, a length out of range. The command line prints it as one line."""


class DataError(UserError):
    """A malformed or missing data file; the message begins with the file and, where there is one, the line."""


class FoveateWarning(UserWarning):
    """What a user should know and no program has to handle: what was chosen and why, what is slower, what was left out.

    Shown as one line. Filters of :mod:`warnings` and ``logging.captureWarnings`` apply to it.
    """


def show_plainly() -> None:
    """Let Python show the warnings of this package as one line each, without a place in the code."""
    before = warnings.formatwarning
    if getattr(before, "shows_foveate", False):
        return

    def formatwarning(message: Any, category: type[Warning], *where: Any, **line: Any) -> str:
        if category.__module__.partition(".")[0] != __name__.partition(".")[0]:
            return before(message, category, *where, **line)
        return f"foveate: {str(message).removeprefix('foveate: ')}\n"

    formatwarning.shows_foveate = True
    warnings.formatwarning = formatwarning


def require(right: bool, name: str, allowed: str, value: object) -> None:
    """Raises `UserError`, which names a setting, its value and what is allowed, unless the value is right."""
    if not right:
        raise UserError(f"{name} must be {allowed}, got {value}")


def check_seed(seed: int) -> None:
    """Raises `UserError` for a seed that a random generator does not take."""
    if not 0 <= seed < 1 << 64:
        raise UserError(f"seed must be at least 0 and below 2^64, got {seed}")


def check_text(text: str, what: str) -> None:
    """Raises `UserError` for a text that is not Unicode, as an argument of undecodable bytes is not.

    Args:
        what: the text in words, which begin the message.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{what} is not UTF-8: its character {error.start + 1} is {text[error.start]!r}") from None


def unknown(kind: str, value: str, allowed: Iterable[str], where: str = "") -> UserError:
    """The error for an unknown name found in `where`; it suggests the nearest allowed name and lists all of them."""
    names = list(allowed)
    near = difflib.get_close_matches(value, names, n=1, cutoff=0.5)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    where = f"{where}: " if where else ""
    return UserError(f"{where}unknown {kind} '{value}'.{hint} Allowed: {', '.join(names)}")


def first_line(error: Exception) -> str:
    """What an error says first; its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def of_extra(package: str, extra: str, what: str, installed_as: str = "") -> Any:
    """A package that one of foveate's extras brings, imported. Raises `UserError` where it is not installed.

    Args:
        what: what needs it, with the verb: these words begin the message.
        installed_as: what it is called where it is installed from, if not by the name of the import.
    """
    try:
        return __import__(package)
    except ImportError:
        name = installed_as or package
        raise UserError(f"{what} {name}, which is not installed: pip install 'foveate[{extra}]'") from None
