"""Rows of `foveate bench decode` as Markdown: times and their floors, speed-ups, and Kascade beside its paper."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from foveate.report.markdown import NONE, columns, made_with, markdown_table, percent, titled
from foveate.report.published import kascade as paper
from foveate.report.rows import Row, grouped
from foveate.results.errors import UserError
from foveate.results.measurements import PARTS

_BELOW = " (below its floor)"
_LEVELS = {"kernel": "attention of a layer", "layer": "a layer with its cache"}
_FLASH = "flash-attention-3"
_KASCADE = {"first": "dense, choosing", "choosing": "choosing", "reading": "reading"}
"""Kinds of layers: the paper's, and the bench's."""
_FIRST_BY_PAGES = {"first": "pages, choosing"}
"""The same under first_layer=pages."""


def table(rows: Sequence[Row]) -> str:
    """One table for each level and shape, one line for each method and size."""
    groups = grouped(rows, lambda row: (row["case"]["level"], _shape(row)))
    return "\n\n".join(
        titled(f"{shape}, {level}", group, (_models if level == "model" else _layers)(group))
        for (level, shape), group in groups.items()
    )


def speedups(rows: Sequence[Row]) -> str:
    """A line for each case, a column for each method: how many times as fast as dense attention it decodes.

    Raises:
        UserError: for two rows of one method and case, such as of other heads.
    """
    methods = list(dict.fromkeys(row["case"]["method"] for row in rows))
    cases: dict[tuple[str, int, int, str], dict[str, str]] = {}
    for row in rows:
        case = row["case"]
        what = _LEVELS.get(case["level"]) or f"{case['model']}, whole steps"
        place = (what, case["batch"], case["context"], how(case))
        found = cases.setdefault(place, {})
        if case["method"] in found:
            raise UserError(f"{case['method']}: two rows of {what}, {case['batch']} × {case['context']:,} tokens")
        everything = (row.get("stats") or {}).get("keys_read_share") == 1
        found[case["method"]] = f"{row['speedup']:.2f}×{' (reads all)' if everything else ''}"
    order = list(_LEVELS.values())
    places = sorted(cases, key=lambda place: (order.index(place[0]) if place[0] in order else len(order), *place))
    lines = [("times as fast as dense attention", *(f"`{method}`" for method in methods))]
    for place in places:
        what, batch, context, runs = place
        found = [cases[place].get(method, NONE) for method in methods]
        lines.append((f"{what}, {batch} × {context:,} tokens{runs}", *found))
    return f"{made_with(rows)}:\n\n{markdown_table(lines)}"


def models(rows: Sequence[Row]) -> str:
    """What a whole model does, in short: keys read, tokens a second, prompt and memory; one table for each shape."""

    def place(row: Row) -> str:
        return f"{_shape(row)}, {row['case']['batch']} × {row['case']['context']:,} tokens"

    def stats(row: Row) -> Row:
        return row.get("stats") or {}  # Transformers' own path has none

    cells: dict[str, Callable[[Row], str]] = {
        "method": _method,
        "keys read": lambda row: percent(stats(row)["keys_read_share"]) if stats(row) else "",
        "ms a step": lambda row: _time(row, 2),
        "tokens/s": lambda row: f"{row['tokens_per_s']:,.1f}",
        "over dense": _speedup,
        "prompt, s": lambda row: f"{row['prefill_ms'] / 1e3:.2f}",
        "cache": lambda row: f"{stats(row)['resident_bytes'] / 1e9:.2f} GB" if stats(row) else "",
        "peak": _peak,
    }
    groups = grouped((row for row in rows if row["case"]["level"] == "model"), place)
    return "\n\n".join(titled(what, group, columns(group, cells)) for what, group in groups.items())


def kascade(rows: Sequence[Row]) -> str:
    """Kascade's milliseconds and speed-ups beside its paper's table 3, for every length and share that both have."""
    rows = [row for row in rows if all(row["case"].get(name) == value for name, value in paper.SHAPE.items())]
    flash = {row["case"]["context"]: row for row in rows if row["case"]["method"] == _FLASH}
    found = [(row, *_scored(row)) for row in rows if row["case"]["method"].startswith("kascade")]
    of_layers = ("layer 0", "choosing", "reading", "mean")
    lines = [("keys read", "tokens", "FlashAttention-3", *of_layers, "over FlashAttention-3", "over the fastest dense")]
    for row, keys, by_pages in sorted(found, key=lambda one: (one[1], one[0]["case"]["share"])):
        case, layers, exact = row["case"], row["layers"], keys == "exact"
        theirs = paper.DECODE.get((case["context"], case["share"])) if exact else None
        ours = paper.Decode(
            flash[case["context"]]["ms"],
            *(layers[name]["ms"] for name in (_KASCADE | (_FIRST_BY_PAGES if by_pages else {})).values()),
            row["ms"],
            flash[case["context"]]["ms"] / row["ms"],
        )
        scored = "pages" if keys == "pages" else f"{keys} keys"
        chosen = "" if exact else f", chosen by {scored} (recall {row['recall']:.3f})"
        chosen += ", layer 0 by pages" if by_pages else ""
        times = (_pair(theirs and theirs[i], ours[i]) for i in range(len(ours)))
        lines.append((f"{100 * case['share']:.0f} %{chosen}", f"{case['context']:,}", *times, f"{row['speedup']:.2f}"))
    return titled("ms, and times as fast; the paper / here", [row for row, *_ in found], markdown_table(lines))


def kinds(rows: Sequence[Row]) -> str:
    """What the kernels of each kind of layers take, as the Kascade paper's figure 8 splits it; rows need a profile."""
    of_kinds = [{**row, "kind": name, **kind} for row in rows for name, kind in row["layers"].items()]
    cells = {
        **_PLACE,
        "kind of layer": lambda one: one["kind"],
        "layers": lambda one: str(one["layers"]),
        "ms": lambda one: f"{one['ms']:.3f}",
        **{part: lambda one, part=part: f"{one['parts_ms'][part]:.3f}" for part in PARTS},
    }
    return titled("ms", rows, columns(of_kinds, cells))


def _scored(row: Row) -> tuple[str, bool]:
    """What anchors score, and whether layer 0 reads pages; settings that are gone, such as fp8 keys, are told, too."""
    spec = row["case"]["method"]
    keys = re.search(r"score_keys=(\w+)", spec)
    return keys[1] if keys else "exact", "first_layer=pages" in spec


def _pair(theirs: float | None, ours: float) -> str:
    return f"{NONE if theirs is None else format(theirs, '.2f')} / {ours:.2f}"


def _method(row: Row) -> str:
    return f"`{row['case']['method']}`"


def _speedup(row: Row) -> str:
    return f"{row['speedup']:.2f}×"


def _peak(row: Row) -> str:
    return f"{row['peak_bytes'] / 1e9:.2f} GB"


_PLACE: dict[str, Callable[[Row], str]] = {
    "method": _method,
    "tokens": lambda row: f"{row['case']['context']:,}",
    "batch": lambda row: str(row["case"]["batch"]),
}
"""The first columns of the tables of one method and size a line."""


def _shape(row: Row) -> str:
    case = row["case"]
    if case["level"] == "model":
        return f"{case['model']} ({case['weights']} weights), {case['dtype']}{how(case)}"
    return f"{case['heads']} query and {case['kv_heads']} KV heads of {case['head_dim']}, {case['dtype']}"


def how(case: Row) -> str:
    """How a model runs; empty for a layer."""
    kernels = ", Liger's kernels" * bool(case.get("liger"))
    return kernels + (f", dense below {case['dense_below']}" if case.get("dense_below") else "")


def _layers(rows: Sequence[Row]) -> str:
    def kinds(row: Row) -> str:
        found = row["layers"] or {}
        words = (f"{one['layers']} {name} {_time(one, 3)}" for name, one in found.items())
        return "; ".join(words) if len(found) > 1 else ""

    cells: dict[str, Callable[[Row], str]] = {
        **_PLACE,
        "ms": lambda row: _time(row, 3),
        "floor, ms": lambda row: f"{row['floor_ms']:.3f}",
        "over the fastest dense": _speedup,
        "kinds of layers, ms each": kinds,
    }
    # Upkeep is LuKA's making pages, its share a step.
    parts = _parts(rows, mean_parts, (*PARTS, "upkeep"), 3)
    return columns(rows, cells) + (f"\n\nKernels of the mean layer, ms:\n\n{parts}" if parts else "")


def _parts(rows: Sequence[Row], parts_of: Callable[[Row], Row], names: Sequence[str], digits: int) -> str:
    """Milliseconds by what kernels do, of the rows with a profile of them; empty where no row has one."""
    profiled = [row for row in rows if parts_of(row)]
    cells = _PLACE | {name: lambda row, name=name: f"{parts_of(row)[name]:.{digits}f}" for name in names}
    return columns(profiled, cells) if profiled else ""


def _time(one: Row, digits: int) -> str:
    """Milliseconds of a row or of a kind of layers, and whether memory cannot have given them."""
    below = one["floor_ms"] is not None and one["ms"] < one["floor_ms"]
    return f"{one['ms']:.{digits}f}{_BELOW if below else ''}"


def _models(rows: Sequence[Row]) -> str:
    cells: dict[str, Callable[[Row], str]] = {
        **_PLACE,
        "ms a step": lambda row: _time(row, 2),
        "floor, ms": lambda row: "" if row["floor_ms"] is None else f"{row['floor_ms']:.2f}",
        "tokens/s": lambda row: f"{row['tokens_per_s']:,.1f}",
        "over dense": _speedup,
        "prompt, s": lambda row: f"{row['prefill_ms'] / 1e3:.2f}",
        "peak": _peak,
    }
    parts = _parts(rows, lambda row: row.get("parts_ms") or {}, (*PARTS, "idle"), 2)
    return columns(rows, cells) + (f"\n\nWhat a step goes to, ms:\n\n{parts}" if parts else "")


def mean_parts(row: Row) -> dict[str, float]:
    """Milliseconds of the mean layer by what its kernels do; empty without a profile of them."""
    kinds = [one for one in (row.get("layers") or {}).values() if one.get("parts_ms")]
    number = sum(one["layers"] for one in kinds)
    found = {part: sum(one["layers"] * one["parts_ms"][part] for one in kinds) / number for part in PARTS if kinds}
    return found | {"upkeep": sum(one["layers"] * one["upkeep_ms"] for one in kinds) / number} if kinds else {}
