"""Rows of `foveate bench csa` and `foveate bench csa-model` as Markdown: a layer, and a whole model."""

from __future__ import annotations

from collections.abc import Sequence

from foveate.report.markdown import NONE, columns, percent, titled
from foveate.report.published import streamindex as paper
from foveate.report.rows import Row
from foveate.report.tables.indexer import MEMORY, duration, published, size


def layer(rows: Sequence[Row]) -> str:
    """A layer, its indexer and its attention at every length, beside the paper's table 5."""

    def theirs(row: Row) -> tuple[paper.Cost | None, paper.Cost | None]:
        return paper.PIPELINE.get(row["case"]["tokens"], (None, None))

    def rate(row: Row) -> str:
        return f"{row['attention_tflop_per_s']:,.0f} ({100 * row['attention_of_matmul']:.0f} %)"

    cells = {
        "tokens": lambda row: f"{row['case']['tokens']:,}",
        "impl": lambda row: row["impl"],
        "paper, materialised indexer": lambda row: published(theirs(row)[0], MEMORY if theirs(row)[1] else NONE),
        "paper, chunked indexer": lambda row: published(theirs(row)[1]),
        "layer": lambda row: duration(row["ms"]),
        "peak": lambda row: size(row["peak_bytes"]),
        "indexer": lambda row: duration(row["indexer_ms"]),
        "attention": lambda row: duration(row["attention_ms"]),
        "its TFLOP/s (of matmul)": rate,
        "error": lambda row: f"{row['error']:.1e}",
    }
    case = rows[0]["case"]
    dims = f"{case['heads']} heads of {case['dim']}, window {case['window']}, k = {case['top_k']:,}, {case['dtype']}"
    return titled(dims, rows, columns(rows, cells))


def model(rows: Sequence[Row]) -> str:
    """A DeepSeek-V4's prompt and decode step by foveate, and by Transformers alone where it was measured."""
    cells = {
        "prompt": lambda row: f"{row['case']['tokens']:,}",
        "by": lambda row: row["impl"],
        "prompt read in": lambda row: duration(row["ms"]),
        "tokens a second": lambda row: f"{row['tokens_per_s']:,.0f}",
        "decode, a token": lambda row: duration(row["decode_ms_per_token"]),
        "peak above weights": lambda row: size(row["peak_bytes"]),
        "cache": lambda row: size(row["cache_bytes"]),
        "same top-1": lambda row: percent(row.get("same_top_1"), 0),
    }
    case = rows[0]["case"]
    dims = f"{case['layers']} layers, width {case['hidden']:,}, {case['heads']} heads of {case['head_dim']}"
    return titled(f"{dims}, chunks of {case['chunk']:,} tokens, {case['dtype']}", rows, columns(rows, cells))
