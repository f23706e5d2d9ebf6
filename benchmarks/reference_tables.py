"""Tables of the reference pages: every command with its options, every method with its settings, as they are defined.

A mark `<!-- report: commands -->` or `<!-- report: settings -->` of a page of the documentation asks for them.
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import typer

from foveate import methods
from foveate.cli import app
from foveate.methods._settings import spelled_value


def commands() -> str:
    """Each command's options, with their defaults and what they do."""
    return "\n\n".join(_command(name, one) for name, one in _commands("foveate", typer.main.get_group(app)))


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", {})
    if not inner:
        yield name, command
    for own, one in inner.items():
        yield from _commands(f"{name} {own}", one)


def _command(name: str, command: Any) -> str:
    lines = [("argument or option", "default", "what it is")]
    for one in command.params:
        if one.name == "help" or getattr(one, "hidden", False):
            continue
        plain = one.default is None or callable(one.default) or one.default in ((), [], False)
        given = ", ".join(map(str, one.default)) if isinstance(one.default, (list, tuple)) else one.default
        default = "required" if one.required else "" if plain else f"`{given}`"
        lines.append((f"`{_spelled(one)}`", default, " ".join((one.help or "").split())))
    return f"### `{name}`\n\n{_summary(command.help)}\n\n{_table(lines)}"


def _spelled(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return parameter.name.upper()
    name = max(parameter.opts, key=len)
    return name if parameter.is_flag else f"{name} {parameter.name.upper()}"


def settings() -> str:
    """Each method's settings, with their defaults and what they do."""
    return "\n\n".join(_method(methods.get(name)) for name in methods.names())


def _method(kind: Any) -> str:
    head = f"### `{kind.name}`\n\n{kind.about.source}. {_summary(kind.__doc__)}"
    lines = [(f"`{one.name}`", f"`{spelled_value(one.default)}`", one.metadata["help"]) for one in fields(kind)]
    return f"{head}\n\n{_table([('setting', 'default', 'what it is'), *lines])}" if lines else head


def _summary(text: str | None) -> str:
    return " ".join((text or "").partition("\n\n")[0].replace("``", "`").split())


def _table(lines: list[tuple[str, str, str]]) -> str:
    head, *body = (f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |" for cells in lines)
    return "\n".join([head, "|---|---|---|", *body])
