"""What the commands print: a console, and the methods with their settings."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

WIDTH = 100


def console(stderr: bool = False) -> Console:
    """A console as wide as the terminal, or 100 columns where the output is no terminal."""
    made = Console(stderr=stderr, highlight=False)
    return made if made.is_terminal else Console(stderr=stderr, highlight=False, width=WIDTH)


def methods(entries: Sequence[Mapping[str, Any]], examples: bool = False) -> RenderableType:
    """The methods with their sources and settings, and with examples; entries as `foveate methods --json` prints."""
    parts: list[RenderableType] = []
    for entry in entries:
        parts.append(Text.assemble((entry["name"], "bold cyan"), "  ", entry["summary"]))
        parts.append(Padding(Text(entry["source"], "dim"), (0, 0, 0, 4)))
        if entry["settings"]:
            table = Table(box=None, show_header=False, pad_edge=False)
            table.add_column(no_wrap=True)
            table.add_column(no_wrap=True)
            table.add_column(overflow="fold")
            for setting in entry["settings"]:
                table.add_row(Text(setting["name"]), Text(_value(setting["default"]), "dim"), Text(setting["help"]))
            parts.append(Padding(table, (0, 0, 0, 4)))
        if examples:
            spec = entry["example"]
            lines = f"foveate.attach(model, {spec!r})\nfoveate generate --model DIR --prompt-file FILE --method "
            parts += ["", Padding(Text(lines + shlex.quote(spec), overflow="fold"), (0, 0, 0, 4))]
        parts.append("")
    return Group(*parts[:-1])


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}" if value.is_integer() else f"{value:.4g}"  # 1.0 is a share, 1 a number
    return "none" if value is None else str(value)
