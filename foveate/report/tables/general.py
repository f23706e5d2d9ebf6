"""Rows of any kind, grouped by what they measure, as `foveate report` prints them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foveate.report.lines import split_of
from foveate.report.markdown import NONE, made_with, markdown_table
from foveate.report.ratio import perplexity_ratio
from foveate.report.rows import Row
from foveate.report.tables import page_scores


def tables(rows: Sequence[Row]) -> str:
    """All rows, grouped by what they measure, each group under one line that says on what."""
    groups: dict[tuple[str, Callable[[Sequence[Row]], str], str], list[Row]] = {}
    for row in rows:
        groups.setdefault((_what(row), _table(row), made_with([row], commits=False)), []).append(row)
    return "\n\n".join(f"{what} ({made_with(group)}):\n\n{table(group)}" for (what, table, _), group in groups.items())


def _share(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.1f} %"


def _table(row: Row) -> Callable[[Sequence[Row]], str]:
    if "bench" in row:
        return _page_scores if row["bench"] == "page-scores" else _speeds
    return {"perplexity": _perplexities, "fidelity": _fidelities}.get(row["task"], _comparison)


def _what(row: Row) -> str:
    if row.get("bench") == "page-scores":
        return page_scores.title(row)
    if "bench" in row:
        case = row["case"]
        batch = "" if case["batch"] == 1 else f", batch {case['batch']}"
        model = case.get("model") or f"a layer of {case['heads']} query and {case['kv_heads']} KV heads"
        model += " (random weights)" * (case.get("weights") == "random")
        chunk = f" in chunks of {case['chunk']:,}" if case.get("chunk") else ""
        return f"{row['bench']}, {model}, {case['context']:,} tokens{chunk}, {case['dtype']}{batch}"
    length = f", {row['length']:,.0f} tokens" if row["length"] else ""
    if scored := row["task_settings"].get("continuation"):
        length = f", {scored:,} tokens after a prompt of {row['length']:,}"
    task = " on ".join(filter(None, (row["task"], row["task_settings"].get("of"))))
    return f"{task} ({split_of(row)}), {row['model']}{length}, n = {row['n']}, {row['dtype']}"


def _comparison(rows: Sequence[Row]) -> str:
    lengths = all("answer_tokens" in row["metrics"] for row in rows)
    compared = any(row["method"] == "dense" for row in rows)  # a model that runs as it is may stand alone
    head = ("method", "score [95 %]", "Δ to dense [95 %]", "keys read", "KV read a step", "resident a sequence")
    lines = [(*head, "answer, tokens [95 %]") if lengths else head]
    for row in rows:
        difference = f"{row['diff_to_dense']:+.1f} [{row['diff_low']:+.1f}, {row['diff_high']:+.1f}]"
        cells = (
            f"`{row['spec']}`",
            f"{row['score']:.1f} [{row['low']:.1f}, {row['high']:.1f}]",
            "" if row["method"] == "dense" or not compared else difference,
            _share(row["keys_read_share"]),
            NONE if row["kv_bytes_per_step"] is None else f"{row['kv_bytes_per_step'] / 1e6:.1f} MB",
            f"{row['resident_bytes'] / row['batch_size'] / 1e6:.1f} MB",
        )
        length = "{value:.0f} [{low:.0f}, {high:.0f}]".format(**row["metrics"]["answer_tokens"]) if lengths else ""
        lines.append((*cells, length) if lengths else cells)
    return markdown_table(lines)


def _perplexities(rows: Sequence[Row]) -> str:
    dense = next((row for row in rows if row["method"] == "dense"), None)
    lines = [("method", "perplexity [95 %]", "over dense [95 %, paired]", "keys read")]
    for row in rows:
        metric, ratio = row["metrics"]["perplexity"], ""
        if dense is not None and row is not dense:
            ratio = "{0.value:.3f} [{0.low:.3f}, {0.high:.3f}]".format(perplexity_ratio(row, dense))
        lines.append(
            (
                f"`{row['spec']}`",
                f"{metric['value']:.2f} [{metric['low']:.2f}, {metric['high']:.2f}]",
                ratio,
                _share(row["keys_read_share"]),
            )
        )
    return markdown_table(lines)


def _fidelities(rows: Sequence[Row]) -> str:
    lines = [("method", "KL to dense, nats a token [95 %]", "same choice, % [95 %]", "keys read")]
    for row in rows:
        kl = row["metrics"]["kl"]
        lines.append(
            (
                f"`{row['spec']}`",
                f"{kl['value']:.4f} [{kl['low']:.4f}, {kl['high']:.4f}]",
                f"{row['score']:.1f} [{row['low']:.1f}, {row['high']:.1f}]",
                _share(row["keys_read_share"]),
            )
        )
    return markdown_table(lines)


def _speeds(rows: Sequence[Row]) -> str:
    """Times beside the baseline, and what else these rows have: quartiles, predictions, what the cache holds."""
    more = [(name, cell) for field, name, cell in _BESIDE_SPEED if all(field in row for row in rows)]
    head = ("method", "ms", "speed-up", "over", rows[0].get("peak_kind", "peak memory"))
    lines = [(*head, *(name for name, _ in more))]
    for row in rows:
        lines.append(
            (
                f"`{row['case']['method']}`",
                f"{row['ms']:.1f}",
                f"{row['speedup']:.2f}×",
                f"`{row['baseline']}`",
                f"{row['peak_bytes'] / 1e6:,.0f} MB",
                *(cell(row) for _, cell in more),
            )
        )
    return markdown_table(lines)


_BESIDE_SPEED: tuple[tuple[str, str, Callable[[Row], str]], ...] = (
    ("resident_bytes", "cache", lambda row: f"{row['resident_bytes'] / 1e6:,.0f} MB"),
    ("ms_quartiles", "quartiles, ms", lambda row: f"{row['ms_quartiles'][0]:.0f} to {row['ms_quartiles'][-1]:.0f}"),
    ("keys_read_share", "keys read", lambda row: f"{100 * row['keys_read_share']:.1f} %"),
    ("same_next_token", "same next token", lambda row: f"{100 * row['same_next_token']:.0f} %"),
)
"""Fields that some benches have, with a column's head and its cells."""


def _page_scores(rows: Sequence[Row]) -> str:
    return markdown_table(page_scores.cells(rows))
