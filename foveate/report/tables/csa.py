"""Rows of `foveate bench csa` and `foveate bench csa-model` as Markdown: a layer, and a whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foveate.report.markdown import made_with, markdown_table
from foveate.report.published import streamindex as paper
from foveate.report.tables.indexer import MEMORY, NONE, duration, published, size

Row = Mapping[str, Any]


def layer(rows: Sequence[Row]) -> str:
    """A layer, its indexer and its attention at every length, beside the paper's table 5."""
    case = rows[0]["case"]
    parts = ("layer", "peak", "indexer", "attention", "its TFLOP/s (of matmul)", "error")
    lines = [("tokens", "impl", "paper, materialised indexer", "paper, chunked indexer", *parts)]
    for row in rows:
        tokens = row["case"]["tokens"]
        materialised, chunked = paper.PIPELINE.get(tokens, (None, None))
        lines.append(
            (
                f"{tokens:,}",
                row["impl"],
                published(materialised, MEMORY if chunked else NONE),
                published(chunked),
                duration(row["ms"]),
                size(row["peak_bytes"]),
                duration(row["indexer_ms"]),
                duration(row["attention_ms"]),
                f"{row['attention_tflop_per_s']:,.0f} ({100 * row['attention_of_matmul']:.0f} %)",
                f"{row['error']:.1e}",
            )
        )
    dims = f"{case['heads']} heads of {case['dim']}, window {case['window']}, k = {case['top_k']:,}, {case['dtype']}"
    return f"{dims} ({made_with(rows)}):\n\n{markdown_table(lines)}"


def model(rows: Sequence[Row]) -> str:
    """A DeepSeek-V4's prompt and decode step by foveate, and by Transformers alone where it was measured."""
    case = rows[0]["case"]
    lines = [
        (
            "prompt",
            "by",
            "prompt read in",
            "tokens a second",
            "decode, a token",
            "peak above weights",
            "cache",
            "same top-1",
        )
    ]
    for row in rows:
        lines.append(
            (
                f"{row['case']['tokens']:,}",
                row["impl"],
                duration(row["ms"]),
                f"{row['tokens_per_s']:,.0f}",
                duration(row["decode_ms_per_token"]),
                size(row["peak_bytes"]),
                size(row["cache_bytes"]),
                f"{100 * row['same_top_1']:.0f} %" if "same_top_1" in row else NONE,
            )
        )
    dims = f"{case['layers']} layers, width {case['hidden']:,}, {case['heads']} heads of {case['head_dim']}"
    return (
        f"{dims}, chunks of {case['chunk']:,} tokens, {case['dtype']} ({made_with(rows)}):\n\n{markdown_table(lines)}"
    )
