"""Rows of benches: their schema, and the file that holds the rows of one bench."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foveate.errors import UserError
from foveate.io import circumstances, infile, outfile
from foveate.io.json_text import parse_json

FIELDS = (
    *("bench", "case", "ms", "baseline", "baseline_ms", "speedup", "gb_per_s", "tflop_per_s", "peak_bytes"),
    *("device", "versions", "commit"),
)
"""Fields of every row of a speed bench."""
_OF_ANSWERS = {
    "page-scores": ("missed_mass", "output_error", "refined_share", "read_share"),
    "serving-accuracy": ("score", "low", "high", "baseline_score", "diff", "diff_low", "diff_high"),
}
"""What a row of the benches that are of no speed has, by its bench, beside what all of them have."""

PARTS = ("score", "select", "attend", "other")
"""The parts of a step's time: the verbs of :mod:`foveate.ops` whose kernels run, and PyTorch's own kernels. Kernels of
attention libraries count as ``attend``."""
TRANSFORMERS = "transformers-sdpa"  # the name of Transformers' own attention among the methods of a bench

SCHEMA = 2  # version of the rows of benches


def needed(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields that a row must have, by its bench."""
    if row.get("bench") not in _OF_ANSWERS:
        return FIELDS
    return ("bench", "case", "n", *_OF_ANSWERS[row["bench"]], "baseline", "item_values", *FIELDS[-3:])


def speed_row(
    bench: str,
    case: Mapping[str, Any],
    device: str,
    ms: float,
    baseline: tuple[str, float],
    gb_per_s: float | None = None,
    tflop_per_s: float | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A row of a speed bench, measured here and now; a later row of the same case replaces this one in a file.

    `ms` is the time in milliseconds. `baseline` is the name and the milliseconds of the baseline of the speed-up.
    `more` are other fields, such as ``peak_bytes``.
    """
    name, baseline_ms = baseline
    return {
        "schema": SCHEMA,
        "bench": bench,
        "case": dict(case),
        "ms": ms,
        "baseline": name,
        "baseline_ms": baseline_ms,
        "speedup": baseline_ms / ms,
        "gb_per_s": gb_per_s,
        "tflop_per_s": tflop_per_s,
        **more,
        **circumstances.of(device),
    }


def check_out(out: Path, bench: str) -> None:
    """Check, before anything is measured, that rows of a bench can be written to a file.

    Raises `UserError` if the file cannot be written or holds other rows; it names the file and what it holds.
    """
    outfile.check(out)
    if not out.exists():
        return
    for number, line in enumerate(infile.read(out).splitlines(), 1):
        try:
            row = parse_json(line)
            holds = row.get("bench")
        except (json.JSONDecodeError, UnicodeDecodeError, AttributeError):
            raise UserError(f"{out}:{number}: not a results row; name another --out") from None
        if holds != bench:
            raise UserError(
                f"{out}:{number}: holds rows of {holds or 'a comparison'}, not of {bench}; name another --out"
            )
        if "case" not in row:
            raise UserError(f"{out}:{number}: a row of {bench} without its 'case'; name another --out")


def write(out: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows as JSON lines in one step; rows of other cases that the file already has stay first.

    Raises `ValueError` when a row lacks a field of :func:`needed`.
    """
    for row in rows:
        missing = [field for field in needed(row) if field not in row]
        if missing:
            raise ValueError(f"row lacks {', '.join(missing)}")
    there = infile.read(out).decode().splitlines() if out.exists() else []
    cases = [json.loads(json.dumps(row["case"])) for row in rows]  # as the file has them: tuples are lists there
    lines = [line for line in there if json.loads(line)["case"] not in cases]
    lines += [json.dumps(row, ensure_ascii=False) for row in rows]
    outfile.write(out, "".join(line + "\n" for line in lines).encode())
