"""Rows of `foveate bench indexer` and `foveate bench indexer-study` beside what the StreamIndex paper reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foveate.report.markdown import NONE, columns, made_with, markdown_table, percent
from foveate.report.published import streamindex as paper
from foveate.report.rows import Row

MEMORY = "out of memory"
_SETTINGS = {
    "top_k": "k, fused",
    "MB of scores held": "MB of scores held, fused",
    "query_chunk": "queries of a tile, chunked",
    "key_chunk": "keys of a tile, chunked",
}
"""Settings of the study, in words."""


def parity(rows: Sequence[Row]) -> str:
    """Least recall of every implementation at every length, beside the paper's table 2."""
    names = _names(rows)
    lines = [("tokens", "keys", "paper, mean and least", *(f"{name}, least" for name in names), "materialised / ours")]
    for tokens, found in _by_tokens(rows).items():
        if tokens not in paper.PARITY:
            continue
        theirs = " and ".join(f"{share:.4f}" for share in paper.PARITY[tokens])
        keys = f"{tokens // found['foveate']['case']['ratio']:,}"
        shares = [f"{found[name]['recall_min']:.4f}" if name in found else NONE for name in names]
        lines.append((f"{tokens:,}", keys, theirs, *shares, times(found.get("materialised"), found["foveate"])))
    return f"{heading(rows)}\n\n{markdown_table(lines)}"


def lengths(rows: Sequence[Row]) -> str:
    """Time and peak memory of every implementation at every length, beside the paper's tables 3 and 4."""
    case, names = rows[0]["case"], _names(rows)
    k = case["top_k"] if case["dtype"] == "bfloat16" else None
    materialised, chunked = paper.MATERIALISED.get(k, {}), paper.CHUNKED.get(k, {})
    theirs = ("paper, materialised", "paper, chunked") if chunked else ()
    gained = ("paper's chunked / ours",) if chunked else ()
    rates = "TFLOP/s (of matmul)", "GB/s", "selection, of scoring"
    lines = [("tokens", *theirs, *names, *rates, *gained, "recall, least")]
    for tokens, found in _by_tokens(rows).items():
        ours = found["foveate"]
        line = [f"{tokens:,}"]
        if chunked:
            beyond = MEMORY if tokens > max(materialised) else NONE
            line += [published(materialised.get(tokens), beyond), published(chunked.get(tokens))]
        line += [cost(found[name]["ms"], found[name]["peak_bytes"]) if name in found else NONE for name in names]
        line.append(f"{ours['tflop_per_s']:,.0f} ({100 * ours['of_matmul']:.0f} %)")
        line.append(NONE if ours["gb_per_s"] is None else f"{ours['gb_per_s']:,.0f}")
        line.append(percent(of_scoring(ours), 0))
        if chunked:
            line.append(f"{chunked[tokens].ms / ours['ms']:.1f}×" if tokens in chunked else NONE)
        line.append(f"{min(row['recall_min'] for row in found.values()):.4f}")
        lines.append(line)
    return f"{heading(rows)}\n\n{markdown_table(lines)}"


def gpus(rows: Sequence[Row]) -> str:
    """Time, memory of each and speed-up over one GPU, for every number of GPUs."""
    alone = next(row for row in rows if row["case"]["gpus"] == 1)
    cells: dict[str, Callable[[Row], str]] = {
        "GPUs": lambda row: str(row["case"]["gpus"]),
        "time": lambda row: duration(row["ms"]),
        "peak of each": lambda row: size(row["peak_bytes"]),
        "TFLOP/s together": lambda row: f"{row['tflop_per_s']:,.0f}",
        "over one": lambda row: f"{alone['ms'] / row['ms']:.2f}×",
        "recall, least": lambda row: f"{row['recall_min']:.4f}",
    }
    return f"{heading(rows)}\n\n{columns(rows, cells)}"


def settings(rows: Sequence[Row]) -> str:
    """A line for each value of each setting; the paper's where it has the same at this length."""

    def theirs(row: Row) -> str:
        case = row["case"]
        values = paper.SETTINGS.get(case["study"], {}) if case["tokens"] == paper.SETTINGS_TOKENS else {}
        return published(values.get(case["value"]))

    cells: dict[str, Callable[[Row], str]] = {
        "setting": lambda row: _SETTINGS[row["case"]["study"]],
        "value": lambda row: f"{row['case']['value']:,}",
        "tokens": lambda row: f"{row['case']['tokens']:,}",
        "ours": lambda row: cost(row["ms"], row["peak_bytes"]),
        "recall, mean and least": lambda row: f"{row['recall_mean']:.4f} and {row['recall_min']:.4f}",
        "paper (chunked)": theirs,
    }
    of_settings = [row for row in rows if row["case"]["study"] in _SETTINGS]
    return f"{_study_heading(rows)}\n\n{columns(of_settings, cells)}"


def ablations(rows: Sequence[Row]) -> str:
    """Mean and least recall, and the share of queries with all, of every ablation; time of merging the scores."""
    rows = [row for row in rows if row["case"]["study"] == "ablation"]
    lines = [("variant", "mean", "least", "with all", "paper: mean", "least", "with all", "ms")]
    for row in rows:
        ours = _shares(row["recall_mean"], row["recall_min"], row["recall_whole"])
        theirs = paper.ABLATIONS.get(row["case"]["value"])
        lines.append((row["case"]["value"], *ours, *(_shares(*theirs) if theirs else [NONE] * 3), duration(row["ms"])))
    return f"{_study_heading(rows)}\n\n{markdown_table(lines)}"


def _shares(mean: float, least: float, whole: float) -> tuple[str, str, str]:
    return f"{mean:.4f}", f"{least:.4f}", f"{100 * whole:.2f} %"


def _study_heading(rows: Sequence[Row]) -> str:
    case = rows[0]["case"]
    lengths = {row["case"]["tokens"] for row in rows}
    length = f"{lengths.pop():,} tokens, " if len(lengths) == 1 else ""
    counts = {row["recall_n"] for row in rows}
    checked = f"recall of {min(counts):,}" + (f" to {max(counts):,}" if len(counts) > 1 else "") + " queries"
    return f"{length}{case['heads']} heads of {case['dim']}, {case['dtype']}; {checked} ({made_with(rows)}):"


def heading(rows: Sequence[Row]) -> str:
    """One line on what was measured, and with what."""
    case = rows[0]["case"]
    length = f"{case['tokens']:,} tokens, " if len({row["case"]["tokens"] for row in rows}) == 1 else ""
    dims = f"{case['heads']} heads of {case['dim']}, k = {case['top_k']:,}, {case['ratio']} tokens a key"
    return f"{length}{dims}, {case['dtype']} ({made_with(rows)}):"


def _names(rows: Sequence[Row]) -> list[str]:
    """The implementations, ours first."""
    return sorted(dict.fromkeys(row["impl"] for row in rows), key=lambda name: name != "foveate")


def _by_tokens(rows: Sequence[Row]) -> dict[int, dict[str, Row]]:
    """The rows of each length that ours has, by implementation."""
    found: dict[int, dict[str, Row]] = {}
    for row in sorted(rows, key=lambda row: row["case"]["tokens"]):
        found.setdefault(row["case"]["tokens"], {})[row["impl"]] = row
    return {tokens: some for tokens, some in found.items() if "foveate" in some}


# Cells


def cost(ms: float, peak_bytes: float) -> str:
    return f"{duration(ms)}, {size(peak_bytes)}"


def published(found: paper.Cost | None, otherwise: str = NONE) -> str:
    """What the paper says, in its GB."""
    return otherwise if found is None else f"{duration(found.ms)}, {found.gb:.2f} GB"


def duration(ms: float) -> str:
    return f"{ms / 1000:.2f} s" if ms >= 1000 else f"{ms:.0f} ms" if ms >= 100 else f"{ms:.2f} ms"


def size(count: float) -> str:
    return f"{count / 1e9:.2f} GB"


def of_scoring(row: Row) -> float | None:
    """Time of selection alone over that of scoring alone; None where they were not measured."""
    return row["select_ms"] / row["score_ms"] if row.get("select_ms") else None


def times(slow: Row | None, fast: Row) -> str:
    return NONE if slow is None else f"{slow['ms'] / fast['ms']:.1f}×"
