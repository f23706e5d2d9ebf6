"""Rows as a pandas DataFrame, and as CSV."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foveate import outfile
from foveate.errors import UserError, of_extra
from foveate.lab.report.rows import read_any, spelled


def check(out: Path) -> None:
    """Raises `UserError` if no CSV can be written there: another suffix, no file can, or pandas is missing."""
    if out.suffix != ".csv":
        raise UserError(f"--csv must be a file that ends in .csv, not {out}")
    outfile.check(out)
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
    check(out)
    if not files:
        raise UserError("--csv is of rows, and no file of rows is named")
    frame = to_dataframe(files)
    lists = [name for name, column in frame.items() if any(isinstance(value, list) for value in column)]
    outfile.write(out, frame.drop(columns=lists).to_csv(index=False).encode())


def _pandas() -> Any:
    return of_extra("pandas", "report", "data frames need")
