"""Markdown: a table of cells, and the words for what rows were made with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from foveate.report.rows import Row

NONE = "–"
"""The cell of a value that is missing or does not apply."""


def made_with(rows: Sequence[Row], commits: bool = True) -> str:
    """Devices, versions and commits of some rows, each once."""
    versions = [", ".join(f"{name} {row['versions'][name]}" for name in ("torch", "transformers")) for row in rows]
    parts = [[row["device"] for row in rows], versions]
    if commits:
        parts.append([f"commit {', '.join(_once(commit for row in rows for commit in row['commit'].split(', ')))}"])
    return "; ".join(", ".join(_once(part)) for part in parts)


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells, the first of them the head; the first column is text, the others are numbers."""
    head, *body = (f"| {' | '.join(cells)} |" for cells in lines)
    rule = "|" + "|".join("---" if i == 0 else "--:" for i in range(len(lines[0]))) + "|"
    return "\n".join([head, rule, *body])


def columns(rows: Sequence[Row], cells: Mapping[str, Callable[[Row], str]]) -> str:
    """A Markdown table with a line for each row; ``cells`` names the columns, and gives each column's cell of a row."""
    return markdown_table([tuple(cells), *(tuple(cell(row) for cell in cells.values()) for row in rows)])


def _once(words: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(words))
