"""Rows of `foveate bench indexer-study` as Markdown, beside the StreamIndex paper's tables 6 and 7."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foveate.report import streamindex_paper as paper
from foveate.report.indexer import NONE, cost, duration, published
from foveate.report.markdown import made_with, markdown_table

Row = Mapping[str, Any]

_SAID = {
    "top_k": "k, fused",
    "MB of scores held": "MB of scores held, fused",
    "query_chunk": "queries of a tile, chunked",
    "key_chunk": "keys of a tile, chunked",
}


def settings(rows: Sequence[Row]) -> str:
    """A line for each value of each setting; the paper's where it has the same at this length."""
    lines = [("setting", "value", "tokens", "ours", "recall, mean and least", "paper (chunked)")]
    for row in rows:
        case = row["case"]
        if case["study"] not in _SAID:
            continue
        theirs = paper.SETTINGS.get(case["study"], {}) if case["tokens"] == paper.SETTINGS_TOKENS else {}
        lines.append(
            (
                _SAID[case["study"]],
                f"{case['value']:,}",
                f"{case['tokens']:,}",
                cost(row["ms"], row["peak_bytes"]),
                f"{row['recall_mean']:.4f} and {row['recall_min']:.4f}",
                published(theirs.get(case["value"])),
            )
        )
    return f"{_heading(rows)}\n\n{markdown_table(lines)}"


def ablations(rows: Sequence[Row]) -> str:
    """Mean and least recall, and the share of queries with all, of every ablation; time of merging the scores."""
    rows = [row for row in rows if row["case"]["study"] == "ablation"]
    lines = [("variant", "mean", "least", "with all", "paper: mean", "least", "with all", "ms")]
    for row in rows:
        ours = _shares(row["recall_mean"], row["recall_min"], row["recall_whole"])
        theirs = paper.ABLATIONS.get(row["case"]["value"])
        lines.append((row["case"]["value"], *ours, *(_shares(*theirs) if theirs else [NONE] * 3), duration(row["ms"])))
    return f"{_heading(rows)}\n\n{markdown_table(lines)}"


def _shares(mean: float, least: float, whole: float) -> tuple[str, str, str]:
    return f"{mean:.4f}", f"{least:.4f}", f"{100 * whole:.2f} %"


def _heading(rows: Sequence[Row]) -> str:
    case = rows[0]["case"]
    lengths = {row["case"]["tokens"] for row in rows}
    length = f"{lengths.pop():,} tokens, " if len(lengths) == 1 else ""
    counts = {row["recall_n"] for row in rows}
    checked = f"recall of {min(counts):,}" + (f" to {max(counts):,}" if len(counts) > 1 else "") + " queries"
    return f"{length}{case['heads']} heads of {case['dim']}, {case['dtype']}; {checked} ({made_with(rows)}):"
