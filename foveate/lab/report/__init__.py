"""Reports: result rows as Markdown tables, tables for the terminal, plots, an HTML page, and data frames."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any


def to_dataframe(paths: str | Path | Iterable[str | Path]) -> Any:
    """Rows of `foveate compare` and `foveate bench` as a pandas DataFrame, one line a row.

    `paths`: a file of rows (JSON Lines), or several. Returns the DataFrame. Columns are the rows' fields, and ``file``;
    a field within a field has both names, as ``settings.top_k``, ``metrics.f1.low``, ``case.context`` and
    ``versions.torch``. Lists, such as ``item_values.f1``, stay lists. Raises `UserError` if pandas is not installed, or
    a file is not of rows.
    """
    from foveate.lab.report import frame

    return frame.to_dataframe([Path(paths)] if isinstance(paths, (str, Path)) else [Path(path) for path in paths])
