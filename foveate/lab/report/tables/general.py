"""Rows of any kind, grouped by what they measure, as `foveate report` prints them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foveate.lab.evaluation.verdict import judge
from foveate.lab.report.lines import split_of
from foveate.lab.report.markdown import (
    NONE,
    context_length,
    difference,
    interval,
    lines_of,
    made_with,
    markdown_table,
    percent,
    score,
    titled,
)
from foveate.lab.report.pooled import perplexity_ratio
from foveate.lab.report.rows import Row, grouped

Lines = list[tuple[str, ...]]


def tables(rows: Sequence[Row]) -> str:
    """All rows, grouped by what they measure, each group under one line that says on what."""
    return "\n\n".join(titled(words, group, markdown_table(lines(group))) for words, group in alike(rows))


def alike(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Rows of one table each, with what they measure in words."""
    groups = grouped(rows, lambda row: (what(row), _lines(row), made_with([row], commits=False)))
    return [(words, group) for (words, *_), group in groups.items()]


def lines(rows: Sequence[Row]) -> Lines:
    """The lines of a table of rows of one kind, the head first; code is marked as in Markdown."""
    return _lines(rows[0])(rows)


def verdicts(rows: Sequence[Row]) -> str:
    """What the comparisons among some rows show, a paragraph for each. If a table has several comparisons, each
    paragraph begins with the circumstances in which they differ. Empty if there is nothing to judge.
    """
    found = []
    for words, group in alike([row for row in rows if "bench" not in row]):
        apart = grouped(group, lambda row: (str(row["task_settings"]), row["seed"], row["run"].get("items")))
        for (settings, seed, items), some in apart.items():
            latest = {row["spec"]: row for row in some}
            if said := judge(list(latest.values())).words:
                own = f", seed {seed}, items {items}, {settings}" * (len(apart) > 1)
                found.append(f"{words}{own}: {said}")
    return "\n\n".join(found)


def _lines(row: Row) -> Callable[[Sequence[Row]], Lines]:
    if "bench" in row:
        return _speeds
    return {"perplexity": _perplexities, "fidelity": _fidelities}.get(row["task"], _comparison)


def what(row: Row) -> str:
    """What a row measures, in words."""
    if "bench" in row:
        case = row["case"]
        batch = "" if case["batch"] == 1 else f", batch {case['batch']}"
        model = case.get("model") or f"a layer of {case['heads']} query and {case['kv_heads']} KV heads"
        model += " (random weights)" * (case.get("weights") == "random")
        chunk = f" in chunks of {context_length(case['chunk'])}" if case.get("chunk") else ""
        return f"{row['bench']}, {model}, {context_length(case['context'])} tokens{chunk}, {case['dtype']}{batch}"
    length = f", {context_length(row['length'])} tokens" if row["length"] else ""
    if scored := row["task_settings"].get("continuation"):
        length = f", {context_length(scored)} tokens after a prompt of {context_length(row['length'])}"
    task = " on ".join(filter(None, (row["task"], row["task_settings"].get("of"))))
    return f"{task} ({split_of(row)}), {row['model']}{length}, n = {row['n']}, {row['dtype']}"


def _comparison(rows: Sequence[Row]) -> Lines:
    compared = any(row["method"] == "dense" for row in rows)  # a model that runs as it is may stand alone

    def to_dense(row: Row) -> str:
        return "" if row["method"] == "dense" or not compared else difference(row)

    cells: dict[str, Callable[[Row], str]] = {
        "method": lambda row: f"`{row['spec']}`",
        "score [95 %]": score,
        "Δ to dense [95 %]": to_dense,
        "keys read": lambda row: percent(row["keys_read_share"]),
        "KV read a step": lambda row: (
            NONE if row["kv_bytes_per_step"] is None else f"{row['kv_bytes_per_step'] / 1e6:.1f} MB"
        ),
        "resident a sequence": lambda row: f"{row['resident_bytes'] / row['batch_size'] / 1e6:.1f} MB",
    }
    if all(row.get("cache_peak_bytes") for row in rows):
        cells["peak of a sequence"] = lambda row: f"{row['cache_peak_bytes'] / row['batch_size'] / 1e6:.1f} MB"
    if all("answer_tokens" in row["metrics"] for row in rows):
        cells["answer, tokens [95 %]"] = lambda row: interval(row["metrics"]["answer_tokens"], 0)
    return lines_of(rows, cells)


def _perplexities(rows: Sequence[Row]) -> Lines:
    dense = next((row for row in rows if row["method"] == "dense"), None)

    def ratio(row: Row) -> str:
        return "" if dense is None or row is dense else interval(vars(perplexity_ratio(row, dense)), 3)

    perplexity = "perplexity [95 %]", lambda row: interval(row["metrics"]["perplexity"], 2)
    return _beside_keys(rows, perplexity, ("over dense [95 %, paired]", ratio))


def _fidelities(rows: Sequence[Row]) -> Lines:
    kl = "KL to dense, nats a token [95 %]", lambda row: interval(row["metrics"]["kl"], 4)
    return _beside_keys(rows, kl, ("same choice, % [95 %]", score))


def _beside_keys(rows: Sequence[Row], *cells: tuple[str, Callable[[Row], str]]) -> Lines:
    keys = "keys read", lambda row: percent(row["keys_read_share"])
    return lines_of(rows, dict([("method", lambda row: f"`{row['spec']}`"), *cells, keys]))


def _speeds(rows: Sequence[Row]) -> Lines:
    """Times beside the baseline, and what else these rows have: quartiles, predictions, what the cache holds."""
    cells: dict[str, Callable[[Row], str]] = {
        "method": lambda row: f"`{row['case']['method']}`",
        "ms": lambda row: f"{row['ms']:.1f}",
        "speed-up": lambda row: f"{row['speedup']:.2f}×",
        "over": lambda row: f"`{row['baseline']}`",
        rows[0].get("peak_kind", "peak memory"): lambda row: f"{row['peak_bytes'] / 1e6:,.0f} MB",
    }
    return lines_of(
        rows, cells | {name: cell for field, name, cell in _BESIDE_SPEED if all(field in row for row in rows)}
    )


_BESIDE_SPEED: tuple[tuple[str, str, Callable[[Row], str]], ...] = (
    ("resident_bytes", "cache", lambda row: f"{row['resident_bytes'] / 1e6:,.0f} MB"),
    ("ms_quartiles", "quartiles, ms", lambda row: f"{row['ms_quartiles'][0]:.0f} to {row['ms_quartiles'][-1]:.0f}"),
    ("keys_read_share", "keys read", lambda row: f"{100 * row['keys_read_share']:.1f} %"),
    ("same_next_token", "same next token", lambda row: f"{100 * row['same_next_token']:.0f} %"),
)
"""Fields that some benches have, with a column's head and its cells."""
