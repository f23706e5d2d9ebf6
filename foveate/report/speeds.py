"""Speed rows as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table


def speeds(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line for each row: case, time, factor over the baseline, rates and peak memory.

    What all cases have in common stands in the title.
    """
    common = {
        key: value for key, value in rows[0]["case"].items() if all(row["case"].get(key) == value for row in rows)
    }
    title = f"{rows[0]['bench']} · " + " · ".join(f"{key} {value}" for key, value in common.items())
    table = Table(
        title=f"{title}\n{rows[0]['device']}", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    own = [key for key in rows[0]["case"] if key not in common]
    for key in own:
        table.add_column(key, overflow="fold")
    for name in ("ms", "speed-up", "over", "GB/s", "TFLOP/s", "peak"):
        table.add_column(name, justify="left" if name == "over" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            *(str(row["case"][key]) for key in own),
            f"{row['ms']:.1f}",
            f"{row['speedup']:.2f}×",
            row["baseline"],
            "–" if row["gb_per_s"] is None else f"{row['gb_per_s']:.1f}",
            "–" if row["tflop_per_s"] is None else f"{row['tflop_per_s']:.2f}",
            f"{row['peak_bytes'] / 1e6:,.0f} MB",
        )
    return table
