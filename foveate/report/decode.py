"""Rows of `foveate bench decode` as a Markdown table: a method's time, its floor, and what its layers take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foveate.report.decode_plots import mean_parts
from foveate.report.markdown import made_with, markdown_table

Row = Mapping[str, Any]
_BELOW = " (below its floor)"


def table(rows: Sequence[Row]) -> str:
    """One table for each level and shape, one line for each method and size."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["case"]["level"], _shape(row)), []).append(row)
    return "\n\n".join(
        f"{shape}, {level} ({made_with(group)}):\n\n{(_models if level == 'model' else _layers)(group)}"
        for (level, shape), group in groups.items()
    )


def _shape(row: Row) -> str:
    case = row["case"]
    if case["level"] == "model":
        how = ", Liger's kernels" * case["liger"]
        how += f", dense below {case['dense_below']}" if case["dense_below"] else ""
        return f"{case['model']} ({case['weights']} weights), {case['dtype']}{how}"
    return f"{case['heads']} query and {case['kv_heads']} KV heads of {case['head_dim']}, {case['dtype']}"


def _layers(rows: Sequence[Row]) -> str:
    lines = [("method", "tokens", "batch", "ms", "floor, ms", "over the fastest dense", "kinds of layers, ms each")]
    for row in rows:
        case, kinds = row["case"], row["layers"] or {}
        told = "; ".join(f"{one['layers']} {name} {_time(one, 3)}" for name, one in kinds.items())
        lines.append(
            (
                f"`{case['method']}`",
                f"{case['context']:,}",
                str(case["batch"]),
                _time(row, 3),
                f"{row['floor_ms']:.3f}",
                f"{row['speedup']:.2f}×",
                told if len(kinds) > 1 else "",
            )
        )
    parts = _parts(rows)
    return markdown_table(lines) + (f"\n\nKernels of the mean layer, ms:\n\n{parts}" if parts else "")


def _parts(rows: Sequence[Row]) -> str:
    """What they do, where a profile has told; empty where none has. Upkeep is LuKA's making pages, its share a step."""
    lines = [("method", "tokens", "batch", "score", "select", "attend", "other", "upkeep")]
    for row in rows:
        parts, case = mean_parts(row), row["case"]
        if not parts:
            continue
        lines.append(
            (
                f"`{case['method']}`",
                f"{case['context']:,}",
                str(case["batch"]),
                *(f"{ms:.3f}" for ms in parts.values()),
            )
        )
    return markdown_table(lines) if len(lines) > 1 else ""


def _time(one: Row, digits: int) -> str:
    """Milliseconds of a row or of a kind of layers, and whether memory cannot have given them."""
    below = one["floor_ms"] is not None and one["ms"] < one["floor_ms"]
    return f"{one['ms']:.{digits}f}{_BELOW if below else ''}"


def _models(rows: Sequence[Row]) -> str:
    lines = [("method", "tokens", "batch", "ms a step", "floor, ms", "tokens/s", "over dense", "prompt, s", "peak")]
    for row in rows:
        case = row["case"]
        lines.append(
            (
                f"`{case['method']}`",
                f"{case['context']:,}",
                str(case["batch"]),
                _time(row, 2),
                "" if row["floor_ms"] is None else f"{row['floor_ms']:.2f}",
                f"{row['tokens_per_s']:,.1f}",
                f"{row['speedup']:.2f}×",
                f"{row['prefill_ms'] / 1e3:.2f}",
                f"{row['peak_bytes'] / 1e9:.2f} GB",
            )
        )
    parts = _steps(rows)
    return markdown_table(lines) + (f"\n\nWhat a step goes to, ms:\n\n{parts}" if parts else "")


def _steps(rows: Sequence[Row]) -> str:
    """What the kernels of a model's step do, and how long none runs; empty where they were not watched."""
    lines = [("method", "tokens", "batch", "score", "select", "attend", "other", "idle")]
    for row in rows:
        case, parts = row["case"], row.get("parts_ms")
        if parts:
            times = (f"{ms:.2f}" for ms in parts.values())
            lines.append((f"`{case['method']}`", f"{case['context']:,}", str(case["batch"]), *times))
    return markdown_table(lines) if len(lines) > 1 else ""
