"""Result rows as tables for the terminal, at most 100 columns wide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from foveate.report.lines import split_of
from foveate.report.markdown import NONE, number, percent
from foveate.report.rows import Row

WIDTH = 100
_DIM = "dim"


def console(stderr: bool = False) -> Console:
    """A console as wide as the terminal, or 100 columns where the output is no terminal."""
    made = Console(stderr=stderr, highlight=False)
    return made if made.is_terminal else Console(stderr=stderr, highlight=False, width=WIDTH)


def results(rows: Sequence[Row], answers: int = 0) -> RenderableType:
    """The comparison table of one run's rows (one per method), and below it the answers to the first items."""
    parts: list[RenderableType] = [comparison(rows), *_footnotes(rows)]
    if answers:
        parts += ["", answer_table(rows, answers)]
    return Group(*parts)


def comparison(rows: Sequence[Row]) -> Table:
    """One line of figures per method, intervals below their values."""
    table = _table(_title(rows[0]), "bold")
    table.add_column("method", overflow="fold")
    held = "resident\n/ peak" if _peaks(rows) else "resident"
    for name in ("score", "Δ to dense", "keys read", "KV/step", held, "prefill", "time/token"):
        table.add_column(name, justify="right", no_wrap=True)
    digits = 1 if max(row["high"] for row in rows) >= 10 else 2
    compared = any(row["method"] == "dense" for row in rows)  # a model that runs as it is may stand alone
    for row in rows:
        dense = row["method"] == "dense" or not compared
        table.add_row(
            _method(row),
            _interval(row["score"], row["low"], row["high"], digits),
            NONE if dense else _interval(row["diff_to_dense"], row["diff_low"], row["diff_high"], digits, "+"),
            percent(row["keys_read_share"]),
            size(row["kv_bytes_per_step"]),
            _resident(row),
            time(row["prefill_ms"]),
            time(row["decode_ms_per_token"] if row["timing"].startswith("generate") else None),
        )
    return table


def _table(title: str, style: str | None = None) -> Table:
    return Table(title=title, title_style=style, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def answer_table(rows: Sequence[Row], limit: int) -> Table:
    """What each method said to the first `limit` items, under the gold answers."""
    table = _table("Answers", "bold")
    table.add_column("item", no_wrap=True)
    table.add_column("method", overflow="fold", max_width=36)
    table.add_column("answer", overflow="fold")
    for index, example in enumerate(rows[0]["examples"][:limit]):
        if index:
            table.add_section()
        gold = " | ".join(example["gold"]) or NONE
        table.add_row(Text(example["id"]), Text("gold", style="green"), Text(gold, style="green"))
        for row in rows:
            table.add_row(
                "", _method(row, settings=False), Text(" ".join(row["examples"][index]["answer"].split()) or NONE)
            )
    return table


def reading(summary: Mapping[str, Any]) -> str:
    """One line on what a generation read, from the summary of `foveate.stats`."""
    share = summary["keys_read_share"]
    parts = [f"{summary['decode_steps']} decode steps"]
    if share is not None and summary["decode_steps"]:
        parts.append(f"{percent(share)} of the keys read ({size(summary['kv_bytes_per_step'])} a step)")
    peak = f" (peak {size(summary['cache_peak_bytes'])})" if summary.get("cache_peak_bytes") else ""
    parts.append(f"{size(summary['resident_bytes'])} resident{peak}")
    for counter in ("tokens_evicted", "pages_refined", "indices_reused"):
        if summary.get(counter):
            parts.append(f"{summary[counter]:,} {counter.replace('_', ' ')}")
    return " · ".join([*parts, *summary["notes"]])


def methods(entries: Sequence[Mapping[str, Any]]) -> RenderableType:
    """The methods with their sources and settings; entries as `foveate methods --json` prints them."""
    parts: list[RenderableType] = []
    for entry in entries:
        parts.append(Text.assemble((entry["name"], "bold cyan"), "  ", entry["summary"]))
        parts.append(Padding(Text(entry["source"], _DIM), (0, 0, 0, 4)))
        if entry["settings"]:
            table = Table(box=None, show_header=False, pad_edge=False)
            table.add_column(no_wrap=True)
            table.add_column(no_wrap=True)
            table.add_column(overflow="fold")
            for setting in entry["settings"]:
                table.add_row(Text(setting["name"]), Text(_value(setting["default"]), _DIM), Text(setting["help"]))
            parts.append(Padding(table, (0, 0, 0, 4)))
        parts.append("")
    return Group(*parts[:-1])


def facts(entries: Mapping[str, Any]) -> Table:
    """Names and values in two columns; lists a line each."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in entries.items():
        if isinstance(value, Mapping):
            value = "\n".join(f"{key} {version}" for key, version in value.items())
        table.add_row(name, Text(", ".join(value) if isinstance(value, list) else str(value)))
    return table


def _title(row: Row) -> str:
    parts = [f"{row['task']} / {split_of(row)}", f"{row['length']:,} tokens", f"{row['n']} items", row["model"]]
    parts += [row["dtype"], row["run"]["device"]]
    return " · ".join(parts + ([f"batch {row['batch_size']}"] if row["batch_size"] > 1 else []))


def _footnotes(rows: Sequence[Row]) -> list[RenderableType]:
    first = rows[0]
    main = next(iter(first["metrics"]))
    lines = [f"score: {main}, 0–100, with its 95 % interval; Δ is paired on the same items"]
    if _peaks(rows):
        lines.append("resident: the cache after an answer; peak: the most that it held, while the prompt was read")
    if first["ceiling"] < 100:
        lines.append(f"ceiling {first['ceiling']:.1f}: the share of questions whose answer is in the prompt")
    lines += [f"{row['spec']}: {others}" for row in rows if (others := _others(row))]
    if first["timing"].startswith("teacher-forced"):
        lines.append("decode was teacher-forced in blocks: its time is no speed of generation")
    if any("shared prompt" in row["timing"] for row in rows):
        lines.append("methods without a prefill time shared one reading of each prompt; --no-share-prompt times them")
    for note in dict.fromkeys(note for row in rows for note in row["notes"]):
        owners = [row["spec"] for row in rows if note in row["notes"]]
        lines.append(note if len(owners) == len(rows) else f"{', '.join(owners)}: {note}")
    return [Text(line, style=_DIM) for line in lines]


def _others(row: Row) -> str:
    """The metrics beside the score, but for those that say the same."""
    values = {name: metric["value"] for name, metric in list(row["metrics"].items())[1:]}
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items() if value != row["score"])


def _method(row: Row, settings: bool = True) -> Text:
    name, _, rest = row["spec"].partition(":")
    text = Text(name, style="bold")
    if rest and settings:
        text.append("\n" + rest.replace(",", "\n"), style="not bold dim")
    elif rest:
        text.append(" " + rest, style="not bold dim")
    return text


def _resident(row: Row) -> Text:
    """What the cache holds after an answer, over the most that it held."""
    text, peak = Text(size(row["resident_bytes"])), row.get("cache_peak_bytes")
    return text if peak is None else text.append(f"\n{size(peak)}", _DIM)


def _peaks(rows: Sequence[Row]) -> bool:
    """Whether some row says how much its cache held at most."""
    return any(row.get("cache_peak_bytes") for row in rows)


def _interval(value: float, low: float, high: float, digits: int, sign: str = "") -> Text:
    """A value over its interval; a signed one is red if surely below zero, green if surely above."""
    style = "bold red" if sign and high < 0 else "bold green" if sign and low > 0 else "bold"
    value_text, low_text, high_text = (number(one, digits, sign) for one in (value, low, high))
    return Text.assemble((value_text, style), (f"\n[{low_text}, {high_text}]", _DIM))


def size(count: float | None) -> str:
    """Bytes in B, kB, MB or GB."""
    if count is None:
        return NONE
    unit = "B"
    for larger in ("kB", "MB", "GB"):
        if count < 1000:
            break
        count, unit = count / 1000, larger
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"


def time(milliseconds: float | None) -> str:
    """A time in µs, ms or s, with three digits or more."""
    if milliseconds is None:
        return NONE
    if milliseconds < 1:
        return f"{1000 * milliseconds:#.3g}".rstrip(".") + " µs" if milliseconds < 0.9995 else "1.00 ms"
    if milliseconds < 10:
        return f"{milliseconds:.2f} ms"
    return f"{milliseconds:.1f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.2f} s"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}" if value.is_integer() else f"{value:.4g}"  # 1.0 is a share, 1 a number
    return "none" if value is None else str(value)
