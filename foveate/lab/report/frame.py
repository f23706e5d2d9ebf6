"""Rows as a pandas DataFrame, and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foveate.errors import UserError, of_extra
from foveate.io import outfile
from foveate.lab.report.rows import read_any, spelled

_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""What a cell begins with that a spreadsheet runs as a formula."""


def check(out: Path, inputs: Sequence[Path] = ()) -> None:
    """Raises `UserError` if no CSV can be written there: another suffix, no file can, it is one of the inputs, or
    pandas is missing."""
    if out.suffix != ".csv":
        raise UserError(f"--csv must be a file that ends in .csv, not {out}")
    outfile.check(out, "--csv", inputs)
    _pandas()


def to_dataframe(files: Sequence[Path]) -> Any:
    """See :func:`foveate.lab.report.to_dataframe`."""
    pandas, rows = _pandas(), []
    for file in files:
        rows += [{"file": str(file)} | (row if "bench" in row else spelled(row)) for row in read_any(file)]
    return pandas.json_normalize(rows)


def write_csv(files: Sequence[Path], out: Path) -> None:
    """Write :func:`to_dataframe` as CSV, without the columns of lists.

    Raises `UserError` as :func:`check` does, and when there are no files of rows.
    """
    check(out, files)
    if not files:
        raise UserError("--csv is of rows, and no file of rows is named")
    frame = to_dataframe(files)
    lists = [name for name, column in frame.items() if any(isinstance(value, list) for value in column)]
    frame = frame.drop(columns=lists).map(_as_text).rename(columns=_as_text)
    outfile.write(
        out, frame.to_csv(index=False, quoting=csv.QUOTE_NONNUMERIC).encode(errors="backslashreplace")
    )  # names may be of any bytes


def _as_text(cell: Any) -> Any:
    """A cell that no spreadsheet takes for a formula: a text that begins like one gets an apostrophe before it."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULAS) else cell


def _pandas() -> Any:
    return of_extra("pandas", "report", "data frames need")
