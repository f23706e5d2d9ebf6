"""Rows of `foveate bench decode-model` as Markdown: times, their floors, and what they go to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foveate.lab.report.markdown import columns, context_length, titled
from foveate.lab.report.rows import Row, grouped
from foveate.lab.results.measurements import PARTS

_BELOW = " (below its floor)"


def table(rows: Sequence[Row], of_layers: Callable[[Sequence[Row]], str] | None = None) -> str:
    """One table for each level and shape, one line for each method and size; `of_layers` makes the tables of layers."""
    groups = grouped(rows, lambda row: (row["case"]["level"], shape(row)))
    return "\n\n".join(
        titled(f"{shape}, {level}", group, (_models if level == "model" else of_layers)(group))
        for (level, shape), group in groups.items()
    )


def method(row: Row) -> str:
    return f"`{row['case']['method']}`"


def speedup(row: Row) -> str:
    return f"{row['speedup']:.2f}×"


PLACE: dict[str, Callable[[Row], str]] = {
    "method": method,
    "tokens": lambda row: context_length(row["case"]["context"]),
    "batch": lambda row: str(row["case"]["batch"]),
}
"""The first columns of the tables of one method and size a line."""


def shape(row: Row) -> str:
    case = row["case"]
    if case["level"] == "model":
        return f"{case['model']} ({case['weights']} weights), {case['dtype']}{how(case)}"
    return f"{case['heads']} query and {case['kv_heads']} KV heads of {case['head_dim']}, {case['dtype']}"


def how(case: Row) -> str:
    """How a model runs; empty for a layer."""
    kernels = ", Liger's kernels" * bool(case.get("liger"))
    return kernels + (f", dense below {case['dense_below']}" if case.get("dense_below") else "")


def parts(rows: Sequence[Row], parts_of: Callable[[Row], Row], names: Sequence[str], digits: int) -> str:
    """Milliseconds by what kernels do, of the rows with a profile of them; empty where no row has one."""
    profiled = [row for row in rows if parts_of(row)]
    cells = PLACE | {name: lambda row, name=name: f"{parts_of(row)[name]:.{digits}f}" for name in names}
    return columns(profiled, cells) if profiled else ""


def time(one: Row, digits: int) -> str:
    """Milliseconds of a row or of a kind of layers, and whether memory cannot have given them."""
    below = one["floor_ms"] is not None and one["ms"] < one["floor_ms"]
    return f"{one['ms']:.{digits}f}{_BELOW if below else ''}"


MODELS: dict[str, Callable[[Row], str]] = {
    **PLACE,
    "ms a step": lambda row: time(row, 2),
    "floor, ms": lambda row: "" if row["floor_ms"] is None else f"{row['floor_ms']:.2f}",
    "tokens/s": lambda row: f"{row['tokens_per_s']:,.1f}",
    "over dense": speedup,
    "prompt, s": lambda row: f"{row['prefill_ms'] / 1e3:.2f}",
    "peak": lambda row: f"{row['peak_bytes'] / 1e9:.2f} GB",
}
"""The columns of a whole model's rows."""


def _models(rows: Sequence[Row]) -> str:
    found = parts(rows, lambda row: row.get("parts_ms") or {}, (*PARTS, "idle"), 2)
    return columns(rows, MODELS) + (f"\n\nWhat a step goes to, ms:\n\n{found}" if found else "")


def mean_parts(row: Row) -> dict[str, float]:
    """Milliseconds of the mean layer by what its kernels do; empty without a profile of them."""
    kinds = [one for one in (row.get("layers") or {}).values() if one.get("parts_ms")]
    number = sum(one["layers"] for one in kinds)
    found = {part: sum(one["layers"] * one["parts_ms"][part] for one in kinds) / number for part in PARTS if kinds}
    return found | {"upkeep": sum(one["layers"] * one["upkeep_ms"] for one in kinds) / number} if kinds else {}
