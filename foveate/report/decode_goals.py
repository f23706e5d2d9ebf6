"""What decoding was to reach on an H100, and what the rows of `foveate bench decode` say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foveate.report.goals import NONE, Goal, Judge, Row, table

_OF_FLOOR = 0.9
"""A time is good enough, too, when memory alone needs so much of it."""
_KASCADE = "kascade:decode_only=true"
_PAGES = "luka:page_size=16,score=summary,prior=0.0,top_k=3"
_LUKA = "luka"


def goals(rows: Sequence[Row]) -> str:
    """A line for each goal: the paper's number, the goal, what was measured, and whether the goal is met."""
    return table(_GOALS, rows)


def _find(rows: Sequence[Row], **case: Any) -> list[Row]:
    """Rows of an H100 with such a case."""
    found = [row for row in rows if "H100" in row["device"]]
    return [row for row in found if all(row["case"].get(name) == value for name, value in case.items())]


def _kernel(rows: Sequence[Row], method: str, context: int, batch: int) -> Row | None:
    shape = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "float16"}
    found = _find(rows, level="kernel", method=_spelled(method), context=context, batch=batch, **shape)
    return found[0] if found else None


def _spelled(method: str) -> str:
    from foveate.methods import parse

    return parse(method).spec


def _speedup(method: str, context: int, batch: int, least: float) -> Judge:
    """So many times the fastest dense attention of the run."""

    def judge(rows: Sequence[Row]) -> tuple[str, bool] | None:
        row = _kernel(rows, method, context, batch)
        if row is None:
            return None
        share = row["floor_ms"] / row["ms"]
        return f"{row['speedup']:.2f}× ({100 * share:.0f} % of the floor)", row["speedup"] >= least or (
            share >= _OF_FLOOR
        )

    return judge


def _layer(kind: str, most_ms: float) -> Judge:
    def judge(rows: Sequence[Row]) -> tuple[str, bool] | None:
        row = _kernel(rows, _KASCADE, 131072, 64)
        if row is None:
            return None
        one = row["layers"][kind]
        enough = one["ms"] <= most_ms or one["floor_ms"] / one["ms"] >= _OF_FLOOR
        return f"{one['ms']:.2f} ms", enough

    return judge


def _managing(batch: int, most: float) -> Judge:
    """The share of choosing pages and of making new ones in what LuKA's kernels take."""

    def judge(rows: Sequence[Row]) -> tuple[str, bool] | None:
        row = _kernel(rows, _LUKA, 131072, batch)
        if row is None:
            return None
        (layer,) = row["layers"].values()
        whole = sum(layer["parts_ms"].values()) + layer["upkeep_ms"]
        share = (layer["parts_ms"]["select"] + layer["upkeep_ms"]) / whole
        return f"{100 * share:.1f} %", share < most

    return judge


def _tokens(methods: str, least: float, model: str, **case: Any) -> Judge:
    """So many times dense, by the fastest of a method's settings that were measured."""

    def judge(rows: Sequence[Row]) -> tuple[str, bool] | None:
        of_level = _find(rows, level="model", dense_below=0, **case)
        found = [
            row
            for row in of_level
            if row["case"]["method"].startswith(methods) and row["case"]["model"].lower() == model
        ]
        if not found:
            return None
        best = max(found, key=lambda row: row["speedup"])
        how = ", Liger's kernels under both" if best["case"]["liger"] else ""
        told = f"{best['speedup']:.2f}× (`{best['case']['method']}`{how})"
        return told, best["speedup"] >= least or best["floor_ms"] / best["ms"] >= _OF_FLOOR

    return judge


def _short(rows: Sequence[Row]) -> tuple[str, bool] | None:
    found = [
        row
        for row in _find(rows, level="model", batch=1, dense_below="auto")
        if row["case"]["context"] < 4096 and row["stats"] is not None
    ]
    if not found:
        return None
    worst = min(found, key=lambda row: row["speedup"])
    return f"{worst['speedup']:.2f}× at the least (`{worst['case']['method']}`)", worst["speedup"] >= 0.95


_GOALS = (
    Goal("Kascade, a tenth, 131,072 tokens, 64 sequences", "4.12×", "≥ 4.6×", _speedup(_KASCADE, 131072, 64, 4.6)),
    Goal(
        "the same, choosing by fp8 keys",
        NONE,
        "≥ 5.3×",
        _speedup(f"{_KASCADE},score_keys=fp8", 131072, 64, 5.3),
    ),
    Goal("a layer of it that chooses", "10.78 ms", "≤ 8.2 ms", _layer("choosing", 8.2)),
    Goal("one that reads", "1.24 ms", "≤ 1.22 ms", _layer("reading", 1.22)),
    Goal("Kascade, a tenth, 8,192 tokens", "2.91×", "≥ 3.6×", _speedup(_KASCADE, 8192, 64, 3.6)),
    Goal("32,768 tokens", "3.97×", "≥ 4.4×", _speedup(_KASCADE, 32768, 64, 4.4)),
    Goal("a fifth, 131,072 tokens", "2.92×", "≥ 3.2×", _speedup(f"{_KASCADE},top_k=0.2", 131072, 64, 3.2)),
    Goal("30 %, 131,072 tokens", "2.17×", "≥ 2.4×", _speedup(f"{_KASCADE},top_k=0.3", 131072, 64, 2.4)),
    *(
        Goal(
            f"LuKA, pages of 16, 3 refined by summaries alone, {context:,} tokens, {batch} sequence{'s' * (batch > 1)}",
            "slower than dense" if batch == 1 else NONE,
            f"≥ {least}×",
            _speedup(_PAGES, context, batch, least),
        )
        for batch, context, least in (
            (1, 8192, 1.5),
            (1, 32768, 3.5),
            (1, 131072, 7.5),
            (32, 8192, 6.5),
            (32, 32768, 10),
            (32, 131072, 12),
        )
    ),
    Goal("LuKA as recommended, 32,768 tokens, 32 sequences", NONE, "≥ 3×", _speedup(_LUKA, 32768, 32, 3)),
    Goal("131,072 tokens", NONE, "≥ 4×", _speedup(_LUKA, 131072, 32, 4)),
    Goal("choosing and making pages, of its step", "most of it", "< 15 %", _managing(32, 0.15)),
    Goal("the same, 1 sequence", "most of it", "< 15 %", _managing(1, 0.15)),
    Goal(
        "tokens/s, an 8B shape, 131,000 tokens, 1 sequence: Kascade",
        NONE,
        "≥ 1.6×",
        _tokens("kascade", 1.6, model="llama-3.1-8b", context=131000, batch=1),
    ),
    Goal("LuKA", NONE, "≥ 1.8×", _tokens("luka", 1.8, model="llama-3.1-8b", context=131000, batch=1)),
    Goal(
        "Qwen2.5-Coder-1.5B, 30,000 tokens, 16 sequences: Kascade",
        NONE,
        "≥ 2×",
        _tokens("kascade", 2, model="qwen2.5-coder-1.5b-instruct", context=30000, batch=16),
    ),
    Goal("LuKA", NONE, "≥ 2×", _tokens("luka", 2, model="qwen2.5-coder-1.5b-instruct", context=30000, batch=16)),
    Goal("below 4,096 tokens, 1 sequence, any method", NONE, "≥ 0.95×", _short),
)
