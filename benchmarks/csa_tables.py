"""Tables of compressed sparse attention and of Kascade's decode steps, beside what their papers report."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.table_kinds import Cells, Table, pivot
from foveate.lab.report.markdown import NONE, context_length, markdown_table, percent, titled
from foveate.lab.report.rows import Row, grouped

PUBLISHED = json.loads((Path(__file__).parent / "published.json").read_text(encoding="utf-8"))
"""The papers' numbers, with where they stand in them."""
PAPER = PUBLISHED["streamindex"]
_MEMORY = "out of memory"
_SETTINGS = {
    "top_k": "k, fused",
    "MB of scores held": "MB of scores held, fused",
    "query_chunk": "queries of a tile, chunked",
    "key_chunk": "keys of a tile, chunked",
}
_KASCADE = {"layer 0": "dense, choosing", "choosing": "choosing", "reading": "reading"}
"""Kinds of layers: the paper's, and the bench's."""


def _duration(ms: float) -> str:
    return f"{ms / 1000:.2f} s" if ms >= 1000 else f"{ms:.0f} ms" if ms >= 100 else f"{ms:.2f} ms"


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB"


def _cost(row: Row) -> str:
    return f"{_duration(row['ms'])}, {_size(row['peak_bytes'])}"


def _published(found: Sequence[float] | None, otherwise: str = NONE) -> str:
    """What the paper says, in its GB."""
    return otherwise if found is None else f"{_duration(found[0])}, {found[1]:.2f} GB"


def _heading(rows: Sequence[Row], recall: bool = False) -> str:
    """What was measured."""
    case, lengths = rows[0]["case"], {row["case"]["tokens"] for row in rows}
    parts = [f"{context_length(case['tokens'])} tokens"] if len(lengths) == 1 else []
    parts.append(f"{case['heads']} heads of {case['dim']}")
    if not recall:
        return ", ".join([*parts, f"k = {case['top_k']:,}", f"{case['ratio']} tokens a key", case["dtype"]])
    counts = sorted({row["recall_n"] for row in rows})
    checked = f"recall of {counts[0]:,}" + (f" to {counts[-1]:,}" if len(counts) > 1 else "") + " queries"
    return f"{', '.join([*parts, case['dtype']])}; {checked}"


def _by_tokens(rows: Sequence[Row]) -> dict[int, dict[str, Row]]:
    """The rows of each length that ours has, by implementation."""
    groups = grouped(sorted(rows, key=lambda row: row["case"]["tokens"]), lambda row: row["case"]["tokens"])
    found = {tokens: {row["impl"]: row for row in some} for tokens, some in groups.items()}
    return {tokens: some for tokens, some in found.items() if "foveate" in some}


def _names(rows: Sequence[Row]) -> list[str]:
    """The implementations, ours first."""
    return sorted(dict.fromkeys(row["impl"] for row in rows), key=lambda name: name != "foveate")


def indexer_parity(rows: Sequence[Row]) -> str:
    """Least recall of every implementation at every length, beside the paper's table 2."""
    cells, slower = {}, "materialised / ours"
    for tokens, found in _by_tokens(rows).items():
        if theirs := PAPER["parity"].get(str(tokens)):
            ours, slow = found["foveate"], found.get("materialised")
            shares = " and ".join(f"{share:.4f}" for share in theirs)
            line = (context_length(tokens), f"{tokens // ours['case']['ratio']:,}", shares)
            cells[line] = {f"{name}, least": f"{row['recall_min']:.4f}" for name, row in found.items()}
            cells[line][slower] = NONE if slow is None else f"{slow['ms'] / ours['ms']:.1f}×"
    names = [*(f"{name}, least" for name in _names(rows)), slower]
    return titled(_heading(rows), rows, pivot(["tokens", "keys", "paper, mean and least"], cells, names))


def indexer_lengths(rows: Sequence[Row]) -> str:
    """Time and peak memory of every implementation at every length, beside the paper's tables 3 and 4."""
    case = rows[0]["case"]
    k = str(case["top_k"]) if case["dtype"] == "bfloat16" else ""
    materialised, chunked = PAPER["materialised"].get(k, {}), PAPER["chunked"].get(k, {})
    theirs = ["paper, materialised", "paper, chunked"] if chunked else []
    rates = ["TFLOP/s (of matmul)", "GB/s", "selection, of scoring"]
    names = [*_names(rows), *rates, *(["paper's chunked / ours"] if chunked else []), "recall, least"]
    cells = {}
    for tokens, found in _by_tokens(rows).items():
        ours, its = found["foveate"], chunked.get(str(tokens))
        beyond = _MEMORY if tokens > max(map(int, materialised), default=tokens) else NONE
        paper = [_published(materialised.get(str(tokens)), beyond), _published(its)] if chunked else []
        selection = ours["select_ms"] / ours["score_ms"] if ours.get("select_ms") else None
        cells[(context_length(tokens), *paper)] = {name: _cost(row) for name, row in found.items()} | {
            "TFLOP/s (of matmul)": f"{ours['tflop_per_s']:,.0f} ({100 * ours['of_matmul']:.0f} %)",
            "GB/s": NONE if ours["gb_per_s"] is None else f"{ours['gb_per_s']:,.0f}",
            "selection, of scoring": percent(selection, 0),
            "paper's chunked / ours": f"{its[0] / ours['ms']:.1f}×" if its else NONE,
            "recall, least": f"{min(row['recall_min'] for row in found.values()):.4f}",
        }
    return titled(_heading(rows), rows, pivot(["tokens", *theirs], cells, names))


def indexer_gpus(rows: Sequence[Row]) -> str:
    """Time, memory of each and speed-up over one GPU, for every number of GPUs."""
    alone = next(row for row in rows if row["case"]["gpus"] == 1)
    cells: Cells = {
        "GPUs": lambda row: str(row["case"]["gpus"]),
        "time": lambda row: _duration(row["ms"]),
        "peak of each": lambda row: _size(row["peak_bytes"]),
        "TFLOP/s together": lambda row: f"{row['tflop_per_s']:,.0f}",
        "over one": lambda row: f"{alone['ms'] / row['ms']:.2f}×",
        "recall, least": lambda row: f"{row['recall_min']:.4f}",
    }
    return Table(_heading, cells)(rows)


def _of_setting(row: Row) -> str:
    case = row["case"]
    values = PAPER["settings"].get(case["study"], {}) if case["tokens"] == PAPER["settings_tokens"] else {}
    return _published(values.get(str(case["value"])))


indexer_settings = Table(
    lambda rows: _heading(rows, recall=True),
    {
        "setting": lambda row: _SETTINGS[row["case"]["study"]],
        "value": lambda row: f"{row['case']['value']:,}",
        "tokens": lambda row: context_length(row["case"]["tokens"]),
        "ours": _cost,
        "recall, mean and least": lambda row: f"{row['recall_mean']:.4f} and {row['recall_min']:.4f}",
        "paper (chunked)": _of_setting,
    },
    lambda rows: [row for row in rows if row["case"]["study"] in _SETTINGS],
)
"""A line for each value of each setting; the paper's where it has the same at this length."""


def indexer_ablations(rows: Sequence[Row]) -> str:
    """Mean and least recall, and the share of queries with all, of every ablation; time of merging the scores."""

    def shares(mean: float, least: float, whole: float) -> tuple[str, str, str]:
        return f"{mean:.4f}", f"{least:.4f}", f"{100 * whole:.2f} %"

    rows = [row for row in rows if row["case"]["study"] == "ablation"]
    lines = [("variant", "mean", "least", "with all", "paper: mean", "least", "with all", "ms")]
    for row in rows:
        theirs = PAPER["ablations"].get(row["case"]["value"])
        ours = shares(row["recall_mean"], row["recall_min"], row["recall_whole"])
        lines.append((row["case"]["value"], *ours, *(shares(*theirs) if theirs else [NONE] * 3), _duration(row["ms"])))
    return titled(_heading(rows, recall=True), rows, markdown_table(lines))


def indexer_study(rows: Sequence[Row]) -> str:
    """The settings and the ablations."""
    return f"{indexer_settings(rows)}\n\n{indexer_ablations(rows)}"


def _pipeline(row: Row, place: int) -> str:
    """Of the paper's table 5: over the materialised indexer, or over the chunked one."""
    theirs = PAPER["pipeline"].get(str(row["case"]["tokens"]))
    return NONE if theirs is None else _published(theirs[place], _MEMORY)


def _layer(rows: Sequence[Row]) -> str:
    case = rows[0]["case"]
    return f"{case['heads']} heads of {case['dim']}, window {case['window']}, k = {case['top_k']:,}, {case['dtype']}"


csa_layer = Table(
    _layer,
    {
        "tokens": lambda row: context_length(row["case"]["tokens"]),
        "impl": lambda row: row["impl"],
        "paper, materialised indexer": lambda row: _pipeline(row, 0),
        "paper, chunked indexer": lambda row: _pipeline(row, 1),
        "layer": lambda row: _duration(row["ms"]),
        "peak": lambda row: _size(row["peak_bytes"]),
        "indexer": lambda row: _duration(row["indexer_ms"]),
        "attention": lambda row: _duration(row["attention_ms"]),
        "its TFLOP/s (of matmul)": lambda row: (
            f"{row['attention_tflop_per_s']:,.0f} ({100 * row['attention_of_matmul']:.0f} %)"
        ),
        "error": lambda row: f"{row['error']:.1e}",
    },
)
"""A layer, its indexer and its attention at every length, beside the paper's table 5."""


def _model(rows: Sequence[Row]) -> str:
    case = rows[0]["case"]
    dims = f"{case['layers']} layers, width {case['hidden']:,}, {case['heads']} heads of {case['head_dim']}"
    return f"{dims}, chunks of {context_length(case['chunk'])} tokens, {case['dtype']}"


csa_model = Table(
    _model,
    {
        "prompt": lambda row: context_length(row["case"]["tokens"]),
        "by": lambda row: row["impl"],
        "prompt read in": lambda row: _duration(row["ms"]),
        "tokens a second": lambda row: f"{row['tokens_per_s']:,.0f}",
        "decode, a token": lambda row: _duration(row["decode_ms_per_token"]),
        "peak above weights": lambda row: _size(row["peak_bytes"]),
        "cache": lambda row: _size(row["cache_bytes"]),
        "same top-1": lambda row: percent(row.get("same_top_1"), 0),
    },
)
"""A DeepSeek-V4's prompt and decode step by foveate, and by Transformers alone where it was measured."""


def decode_kascade(rows: Sequence[Row]) -> str:
    """Kascade's milliseconds and speed-ups beside its paper's table 3, for every length and share that both have."""
    shape, decode = PUBLISHED["kascade"]["shape"].items(), PUBLISHED["kascade"]["decode"]
    rows = [row for row in rows if shape <= row["case"].items()]
    flash = {row["case"]["context"]: row["ms"] for row in rows if row["case"]["method"] == "flash-attention-3"}

    def scored(row: Row) -> str:
        """What anchors score, by the spec, which may have a setting that its method has lost since."""
        found = re.search(r"\bscore_keys=([^,]+)", row["case"]["method"])
        return "pages" if row["case"]["method"].startswith("kascade_pages") else found[1] if found else "exact"

    of_kascade = [row for row in rows if row["case"]["method"].startswith("kascade")]
    of_kascade.sort(key=lambda row: (scored(row), row["case"]["share"]))
    heads = ("FlashAttention-3", *_KASCADE, "mean", "over FlashAttention-3", "over the fastest dense")
    lines = [("keys read", "tokens", *heads)]
    for row in of_kascade:
        case, keys, first = row["case"], scored(row), "first_layer=pages" in row["case"]["method"]
        kinds = _KASCADE | ({"layer 0": "pages, choosing"} if first else {})
        fast = flash[case["context"]]
        ours = [fast, *(row["layers"][kind]["ms"] for kind in kinds.values()), row["ms"], fast / row["ms"]]
        theirs = decode.get(str(case["context"]), {}).get(str(case["share"])) if keys == "exact" else None
        chosen = "" if keys == "exact" else f", chosen by {keys if keys == 'pages' else f'{keys} keys'}"
        chosen += f" (recall {row['recall']:.3f})" if chosen else ""
        chosen += ", layer 0 by pages" if first else ""
        times = (f"{format(its, '.2f') if its else NONE} / {mine:.2f}" for its, mine in zip(theirs or [0] * 6, ours))
        lines.append(
            (f"{100 * case['share']:.0f} %{chosen}", context_length(case["context"]), *times, f"{row['speedup']:.2f}")
        )
    return titled("ms, and times as fast; the paper / here", of_kascade, markdown_table(lines))
