"""Result rows as tables that fit the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from foveate.lab.evaluation.verdict import judge
from foveate.lab.report.lines import split_of
from foveate.lab.report.markdown import NONE, context_length, number, percent
from foveate.lab.report.rows import Row

_DIM = "dim"
_LONG = 20  # characters of a spec above which a method goes by a shorter name, and the spec is below the table
_MEANING = {
    "keys\nread": "share of the keys that a decode step reads",
    "KV/step": "bytes of the keys and values that it reads",
    "resident": "bytes of the cache after an answer",
    "resident\n/peak": "bytes of the cache after an answer, and the most that it held while the prompt was read",
    "prefill": "time to read a prompt",
    "time\n/token": "of a decode step",
}
_DROPPED = ("prefill", "KV/step", "resident\n/peak", "resident", "time\n/token", "keys\nread", "Δ to dense")
"""Columns that a narrow terminal goes without, the first of them first; of these, those without a value before."""


class Comparison:
    """The table of one run's rows, a line of figures a method, intervals below their values, as wide as there is room:
    the method comes first and whole, and of the other columns the least important give way and are named below."""

    def __init__(self, rows: Sequence[Row]):
        self._rows, self._names = rows, short_names(rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        columns = self._columns()
        empty = [name for name in _DROPPED if all(str(cell) == NONE for cell in columns.get(name, ["?"]))]
        left = dict.fromkeys([*empty, *_DROPPED])
        dropped: list[str] = []
        unbounded = options.update(max_width=1000)
        while Measurement.get(console, unbounded, table := self._table(columns)).maximum > options.max_width:
            gone = next((name for name in left if name in columns), None)
            if gone is None:
                break
            del columns[gone]
            dropped.append(_worded(gone))
        yield Text(_title(self._rows[0]), style="bold")
        yield table
        if said := self._verdict():
            yield Text(said, overflow="fold")
        for line in _footnotes(self._rows, self._names, columns):
            yield Text(line, style=_DIM, overflow="fold")
        if dropped:
            yield Text(f"no room for {', '.join(dropped)}: foveate report shows all of the file", style=_DIM)

    def _verdict(self) -> str:
        """What the rows show, with the names that the table gives to methods."""
        names = {id(row): name for row, name in zip(self._rows, self._names)}
        return judge(self._rows, named=lambda row: names[id(row)]).words

    def _table(self, columns: Mapping[str, Sequence[Text | str]]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=0)
        table.add_column("method", overflow="fold", no_wrap=False)
        for name in columns:
            table.add_column(name, justify="right", no_wrap=True)
        for name, *cells in zip(self._names, *columns.values()):
            table.add_row(Text(name, style="bold"), *cells)
        return table

    def _columns(self) -> dict[str, list[Text | str]]:
        rows = self._rows
        digits = 1 if max(row["high"] for row in rows) >= 10 else 2
        compared = any(row["method"] == "dense" for row in rows)  # a model that runs as it is may stand alone

        def beside(row: Row) -> Text | str:
            if row["method"] == "dense" or not compared:
                return NONE
            return _interval(row["diff_to_dense"], row["diff_low"], row["diff_high"], digits, "+")

        held = "resident\n/peak" if any(row.get("cache_peak_bytes") for row in rows) else "resident"
        return {
            "score": [_interval(row["score"], row["low"], row["high"], digits) for row in rows],
            "Δ to dense": [beside(row) for row in rows],
            "keys\nread": [percent(row["keys_read_share"]) for row in rows],
            "KV/step": [size(row["kv_bytes_per_step"]) for row in rows],
            held: [_resident(row) for row in rows],
            "prefill": [time(row["prefill_ms"]) for row in rows],
            "time\n/token": [
                time(row["decode_ms_per_token"] if row["timing"].startswith("generate") else None) for row in rows
            ],
        }


def short_names(rows: Sequence[Row]) -> list[str]:
    """A name for each row's method: its spec, or of a long one the method's name, with a number if rows share it."""
    long = Counter(row["method"] for row in rows if len(row["spec"]) > _LONG)
    taken, names, number = {row["spec"] for row in rows}, [], Counter()
    for method, spec in ((row["method"], row["spec"]) for row in rows):
        number[method] += len(spec) > _LONG
        alone = long[method] == 1 and method not in taken
        names.append(spec if len(spec) <= _LONG else method if alone else f"{method} #{number[method]}")
    return names


def reading(summary: Mapping[str, Any]) -> str:
    """One line on what a generation read, from the summary of `foveate.stats`."""
    share = summary["keys_read_share"]
    parts = [f"{summary['decode_steps']} decode steps"]
    if share is not None and summary["decode_steps"]:
        parts.append(f"{percent(share)} of the keys read ({size(summary['kv_bytes_per_step'])} a step)")
    peak = f" (peak {size(summary['cache_peak_bytes'])})" if summary.get("cache_peak_bytes") else ""
    parts.append(f"{size(summary['resident_bytes'])} resident{peak}")
    if evicted := summary.get("tokens_evicted_per_sequence"):
        parts.append(f"{evicted:,.0f} tokens of each sequence evicted (mean over layers)")
    for counter in ("pages_refined", "indices_reused"):
        if summary.get(counter):
            parts.append(f"{summary[counter]:,} {counter.replace('_', ' ')}")
    return " · ".join([*parts, *summary["notes"]])


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
    parts = [f"{row['task']} / {split_of(row)}", f"{context_length(row['length'])} tokens", f"{row['n']} items"]
    parts += [row["model"], row["dtype"], row["run"]["device"]]
    return " · ".join(parts + ([f"batch {row['batch_size']}"] if row["batch_size"] > 1 else []))


def _footnotes(rows: Sequence[Row], names: Sequence[str], columns: Mapping[str, Any]) -> list[str]:
    """What the table's words stand for, and what else there is to know of its rows."""
    first = rows[0]
    main = next(iter(first["metrics"]))
    lines = [f"{name} is {row['spec']}" for row, name in zip(rows, names) if name != row["spec"]]
    lines.append(f"score: {main}, 0–100, with its 95 % interval; Δ is paired on the same items")
    lines.append("; ".join(f"{_worded(name)}: {_MEANING[name]}" for name in columns if name in _MEANING))
    if first["ceiling"] < 100:
        lines.append(f"ceiling {first['ceiling']:.1f}: the share of questions whose answer is in the prompt")
    lines += [f"{name}: {others}" for row, name in zip(rows, names) if (others := _others(row))]
    lines += _recalls(rows, names)
    if first["timing"].startswith("teacher-forced"):
        lines.append("decode was teacher-forced in blocks: its time is no speed of generation")
    if any("shared prompt" in row["timing"] for row in rows):
        lines.append("methods without a prefill time shared one reading of each prompt; --no-share-prompt times them")
    for note in dict.fromkeys(note for row in rows for note in row["notes"]):
        owners = [name for row, name in zip(rows, names) if note in row["notes"]]
        lines.append(note if len(owners) == len(rows) else f"{', '.join(owners)}: {note}")
    return list(filter(None, lines))


def _recalls(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """The recall of each method that has one."""
    measured = [(name, row["recall"]) for row, name in zip(rows, names) if row.get("recall")]
    if not measured:
        return []
    lines = ["recall: the share of exact attention that the tokens hold that a method reads, the mean over layers"]
    for name, by_layer in measured:
        worst = min(by_layer, key=by_layer.get)
        mean = percent(sum(by_layer.values()) / len(by_layer))
        lines.append(f"{name}: recall {mean}, least in layer {worst}, {percent(by_layer[worst])}")
    return lines


def _worded(column: str) -> str:
    """The head of a column on one line."""
    return column.replace("\n/", "/").replace("\n", " ")


def _others(row: Row) -> str:
    """The metrics beside the score, without metrics that equal it."""
    values = {name: metric["value"] for name, metric in list(row["metrics"].items())[1:]}
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items() if value != row["score"])


def _resident(row: Row) -> Text:
    """What the cache holds after an answer, over the most that it held."""
    text, peak = Text(size(row["resident_bytes"])), row.get("cache_peak_bytes")
    return text if peak is None else text.append(f"\n{size(peak)}", _DIM)


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
