"""What the indexer and a layer were to reach, and what the rows of `foveate bench indexer` and `csa` say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foveate.report import streamindex_paper as paper
from foveate.report.goals import NONE, Goal, Judge, Row, table
from foveate.report.indexer import cost, of_scoring, published

_MILLION = 1048576


def goals(rows: Sequence[Row]) -> str:
    """A line for each goal: the paper's number, the goal, what was measured, and whether the goal is met."""
    return table(_GOALS, rows)


def _within(most_ms: float, most_gb: float | None = None, **case: Any) -> Judge:
    def judge(rows: Sequence[Row]) -> tuple[str, bool] | None:
        row = _find(rows, **case)
        if row is None:
            return None
        enough = row["ms"] <= most_ms and (most_gb is None or row["peak_bytes"] <= 1e9 * most_gb)
        return cost(row["ms"], row["peak_bytes"]), enough

    return judge


def _never_slower(rows: Sequence[Row]) -> tuple[str, bool] | None:
    factors = []
    for tokens in (2048, 4096, 8192):
        pair = [_find(rows, impl=impl, tokens=tokens, **_FLASH) for impl in ("foveate", "materialised")]
        if None in pair:
            return None
        factors.append(pair[1]["ms"] / pair[0]["ms"])
    return f"{', '.join(f'{factor:.1f}×' for factor in factors)} faster", min(factors) >= 1


def _attention(least: float) -> Judge:
    def judge(rows: Sequence[Row]) -> tuple[str, bool] | None:
        row = _find(rows, **_LAYER)
        if row is None:
            return None
        return f"{100 * row['attention_of_matmul']:.1f} %", row["attention_of_matmul"] >= least

    return judge


def _gpus(number: int, least: float) -> Judge:
    def judge(rows: Sequence[Row]) -> tuple[str, bool] | None:
        flash = {name: value for name, value in _FLASH.items() if name != "gpus"}
        pair = [_find(rows, impl="foveate", tokens=_MILLION, gpus=gpus, **flash) for gpus in (1, number)]
        if None in pair:
            return None
        factor = pair[0]["ms"] / pair[1]["ms"]
        return f"{factor:.2f}×", factor >= least

    return judge


def _selection(most: float) -> Judge:
    def judge(rows: Sequence[Row]) -> tuple[str, bool] | None:
        row = _find(rows, impl="foveate", tokens=_MILLION, **_FLASH)
        share = None if row is None else of_scoring(row)
        return None if share is None else (f"{100 * share:.1f} %", share < most)

    return judge


def _exact(rows: Sequence[Row]) -> tuple[str, bool] | None:
    """Of lengths (tables 2 to 4) and settings (table 6); ablations are to lose."""
    ours = [row for row in rows if row["bench"] == "indexer" and row["impl"] == "foveate"]
    ours += [row for row in rows if row["bench"] == "indexer-study" and row["case"]["study"] != "ablation"]
    found = [row["recall_min"] for row in ours]
    return (f"{min(found):.4f} in {len(found)} rows", min(found) == 1) if found else None


def _find(rows: Sequence[Row], **case: Any) -> Row | None:
    return next((row for row in rows if all(row["case"].get(name) == value for name, value in case.items())), None)


_FLASH = {"heads": 64, "dim": 128, "top_k": 512, "ratio": 4, "dtype": "bfloat16", "gpus": 1}
_PRO, _EIGHTHS = {**_FLASH, "top_k": 1024}, {**_FLASH, "dtype": "float8_e4m3fn"}
_LAYER = {"impl": "foveate", "tokens": 262144, "index_heads": 64, "top_k": 512, "heads": 64, "dim": 512}
_GOALS = (
    Goal(
        "V4-Flash, 1,048,576 tokens, bf16",
        published(paper.CHUNKED[512][_MILLION]),
        "≤ 4.5 s, ≤ 3.0 GB",
        _within(4500, 3.0, impl="foveate", tokens=_MILLION, **_FLASH),
    ),
    Goal("the same, fp8", NONE, "≤ 2.6 s", _within(2600, impl="foveate", tokens=_MILLION, **_EIGHTHS)),
    Goal(
        "V4-Flash, 32,768 tokens, bf16",
        published(paper.CHUNKED[512][32768]),
        "≤ 5 ms",
        _within(5, impl="foveate", tokens=32768, **_FLASH),
    ),
    Goal(
        "V4-Pro (k = 1,024), 1,048,576 tokens, bf16",
        published(paper.CHUNKED[1024][_MILLION]),
        "≤ 4.8 s, ≤ 5.5 GB",
        _within(4800, 5.5, impl="foveate", tokens=_MILLION, **_PRO),
    ),
    Goal("2,048, 4,096, 8,192 tokens, to the materialised path", "slower at 8,192", "never slower", _never_slower),
    Goal(
        "layer of V4-Flash, 262,144 tokens",
        published(paper.PIPELINE[262144][1]),
        "≤ 0.6 s, ≤ 10 GB",
        _within(600, 10, **_LAYER),
    ),
    Goal("its attention, of a bf16 matmul", NONE, "≥ 40 %", _attention(0.4)),
    Goal("selection, of scoring: V4-Flash, 1,048,576 tokens", NONE, "< 15 %", _selection(0.15)),
    Goal("2 GPUs, 1,048,576 tokens", NONE, "≥ 1.9×", _gpus(2, 1.9)),
    Goal("4 GPUs, 1,048,576 tokens", NONE, "≥ 3.7×", _gpus(4, 3.7)),
    Goal("recall by the kernel's own scores, least", "0.9980", "1", _exact),
)
