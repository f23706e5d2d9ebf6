"""Rows of measurements in a results file: one file answers one question."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foveate.evaluation import outfile
from foveate.evaluation.errors import UserError

FIELDS = (
    "bench",
    "case",
    "ms",
    "baseline",
    "baseline_ms",
    "speedup",
    "gb_per_s",
    "tflop_per_s",
    "peak_bytes",
    "device",
    "versions",
    "commit",
)
"""What every speed row has at least."""
PAGE_SCORE_FIELDS = (
    "bench",
    "case",
    "n",
    "missed_mass",
    "output_error",
    "refined_share",
    "read_share",
    "baseline",
    "item_values",
    "device",
    "versions",
    "commit",
)
"""What every row on the scores of pages has at least."""

FORMER = {"dsa": "csa-model"}
"""Benches that were renamed, by the name that older rows carry."""


def bench_of(row: Mapping[str, Any]) -> str | None:
    """The present name of the bench that wrote a row; None for a row that no bench wrote."""
    name = row.get("bench")
    return FORMER.get(name, name)


def needed(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields that a row has to have, by its bench."""
    return PAGE_SCORE_FIELDS if row.get("bench") == "page-scores" else FIELDS


def check_out(out: Path, bench: str) -> None:
    """Refuse, before anything is measured, a file that cannot be written or that is not this bench's.

    Raises:
        UserError: naming the file and what it holds.
    """
    outfile.check(out)
    if not out.exists():
        return
    for number, line in enumerate(out.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            holds = bench_of(row)
        except (json.JSONDecodeError, AttributeError):
            raise UserError(f"{out}:{number}: not a results row; name another --out") from None
        if holds != bench:
            raise UserError(
                f"{out}:{number}: holds rows of {holds or 'a comparison'}, not of {bench}; name another --out"
            )
        if "case" not in row:
            raise UserError(f"{out}:{number}: a row of {bench} without its 'case'; name another --out")


def write(out: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows as JSON lines, all or none; those of other cases that the file has already stay before them.

    Raises:
        ValueError: when a row lacks a field of :func:`needed`.
    """
    for row in rows:
        missing = [field for field in needed(row) if field not in row]
        if missing:
            raise ValueError(f"row lacks {', '.join(missing)}")
    there = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    cases = [row["case"] for row in rows]
    lines = [line for line in there if json.loads(line)["case"] not in cases]
    lines += [json.dumps(row, ensure_ascii=False) for row in rows]
    outfile.write(out, "".join(line + "\n" for line in lines).encode())
