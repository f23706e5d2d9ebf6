"""Markdown: a table of cells, and the words for what rows were made with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from foveate.lab.report.rows import Row

NONE = "–"  # the cell of a value that is missing or does not apply


def made_with(rows: Sequence[Row], commits: bool = True) -> str:
    """Devices, versions and commits of some rows, each once."""
    versions = [", ".join(f"{name} {row['versions'][name]}" for name in ("torch", "transformers")) for row in rows]
    parts = [[row["device"] for row in rows], versions]
    if commits:
        parts.append([f"commit {', '.join(_once(commit for row in rows for commit in row['commit'].split(', ')))}"])
    return "; ".join(", ".join(_once(part)) for part in parts)


def made_beside(title: str, rows: Sequence[Row]) -> str:
    """What rows were made with, without the part that their title already has."""
    made = f"{made_with(rows, commits=False)}; "
    return made_with(rows).removeprefix(made if made[:-2] in title else "")


def context_length(tokens: float) -> str:
    """A number of tokens as contexts are named: 131,072 is 128K; one that is no multiple of 1,024 is written out."""
    if not tokens or tokens % 1024:
        return f"{tokens:,.0f}"
    return f"{tokens // 1024:.0f}K" if tokens % 2**20 else f"{tokens // 2**20:.0f}M"


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells, the first of them the head; the first column is text, the others are numbers.

    A `|` or a line break within a cell, such as a file's name may hold, ends neither the cell nor the table.
    """
    escaped = [[" ".join(text.replace("|", "\\|").splitlines()) for text in cells] for cells in lines]
    head, *body = (f"| {' | '.join(cells)} |" for cells in escaped)
    rule = "|" + "|".join("---" if i == 0 else "--:" for i in range(len(lines[0]))) + "|"
    return "\n".join([head, rule, *body])


def columns(rows: Sequence[Any], cells: Mapping[str, Callable[[Any], str]]) -> str:
    """A Markdown table of :func:`lines_of`."""
    return markdown_table(lines_of(rows, cells))


def lines_of(rows: Sequence[Any], cells: Mapping[str, Callable[[Any], str]]) -> list[tuple[str, ...]]:
    """A line of cells for each row, after the head; ``cells`` has each column's name and its cell of a row."""
    return [tuple(cells), *(tuple(cell(row) for cell in cells.values()) for row in rows)]


def titled(what: str, rows: Sequence[Row], table: str) -> str:
    """A table of some rows, after a line with what it shows and what the rows were made with."""
    return f"{' '.join(what.splitlines())} ({made_with(rows)}):\n\n{table}"


def number(value: float, digits: int, sign: str = "") -> str:
    """A number with ``digits`` decimals. With the sign ``+``, positive numbers and zero have a sign, too."""
    return f"{round(value, digits) + 0.0:{sign}.{digits}f}"


def interval(
    of: Mapping[str, float], digits: int = 1, sign: str = "", names: Sequence[str] = ("value", "low", "high")
) -> str:
    """A value with its interval, such as ``12.3 [10.0, 14.5]``."""
    value, low, high = (number(of[name], digits, sign) for name in names)
    return f"{value} [{low}, {high}]"


def score(row: Row) -> str:
    """The score of a row of `foveate compare` with its interval."""
    return interval(row, names=("score", "low", "high"))


def difference(row: Row) -> str:
    """Its paired difference to dense with its interval, points."""
    return interval(row, 1, "+", ("diff_to_dense", "diff_low", "diff_high"))


def percent(share: float | None, digits: int = 1) -> str:
    """A share as such, or a dash."""
    return NONE if share is None else f"{100 * share:.{digits}f} %"


def _once(words: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(words))
