"""Which rows make a panel, which of them a line, and how both are called."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from foveate.lab.report.markdown import context_length
from foveate.lab.report.rows import Row, grouped

Cell = tuple  # names the items that rows have in common
Line = tuple[str, tuple[tuple[str, str], ...]]  # a method, and its settings that are the same along the line

_SPEAKING = ("compressor", "mass")  # settings whose values need no name beside them
_STANDS_FOR = {"calibration": ("anchors", "heads")}  # settings that a calibration's file determines


def once(rows: Sequence[Row], apart: Sequence[str] = ()) -> tuple[list[Row], list[str]]:
    """The first row of each method on the same items, and a note on the others.

    Args:
        apart: fields whose values tell rows on the same items apart, such as the size of batches for their times.
    """
    kept: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        kept.setdefault((cell(row), row["spec"], *(row[name] for name in apart)), row)
    repeated = len(rows) - len(kept)
    return list(kept.values()), [f"rows that repeat others, left out: {repeated}"] if repeated else []


def cell(row: Row) -> Cell:
    """The items of a row: model, task with its settings, and the fingerprint of the items."""
    settings = json.dumps(row["task_settings"], sort_keys=True)
    return (row["model"], row["task"], row["split"], row["length"], settings, row["dtype"], row["run"].get("items"))


def cells(rows: Sequence[Row]) -> dict[Cell, list[Row]]:
    """Rows on the same items, in the order of their first row."""
    return grouped(rows, cell)


def with_dense(shown: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """The rows to show, and dense attention's rows on the same items."""
    ids, places = {id(row) for row in shown}, {cell(row) for row in shown}
    return [row for row in rows if id(row) in ids or (row["method"] == "dense" and cell(row) in places)]


def line(row: Row, along: Sequence[str]) -> Line:
    """The line that a row is on, when the settings ``along`` differ along lines."""
    return row["method"], tuple(_fixed(row, along).items())


def names(rows: Sequence[Row], along: Sequence[str]) -> dict[Line, str]:
    """The lines with their names, in the order of the rows: a method, and the settings in which its lines differ."""
    lines = dict.fromkeys(line(row, along) for row in rows)
    values: dict[tuple[str, str], list[str]] = {}
    for method, settings in lines:
        for name, value in settings:
            values.setdefault((method, name), []).append(value)
    number = Counter(method for method, _ in lines)
    differ = {key for key, of in values.items() if len(set(of)) > 1 or len(of) < number[key[0]]}
    named = {}
    for method, settings in lines:
        own = [name for name, _ in settings if (method, name) in differ]
        values_of = dict(settings)
        words = [values_of[name] if name in _SPEAKING else f"{name}={values_of[name]}" for name in own]
        named[method, settings] = f"{method}: {', '.join(words)}" if words else method
    return named


def common(rows: Sequence[Row], along: Sequence[str]) -> str:
    """What :func:`names` leaves out: settings off their defaults that all lines of a method share."""
    found = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        settings, fixed = own[0]["settings"], _fixed(own[0], along)
        same = [name for name, value in fixed.items() if all(_fixed(row, along).get(name) == value for row in own)]
        same = [name for name in same if fixed[name] == _text(settings[name])]  # not a spec whose budget differs
        words = [f"{name}={fixed[name]}" for name in same if re.search(rf"[:,]{name}=", own[0]["spec"])]
        if words:
            found.append(f"{method} with {', '.join(words)}")
    return "; ".join(found)


def place(row: Row, rows: Sequence[Row]) -> str:
    """The items of a row in words; on a second line model, dtype and number, where the rows differ in these."""
    length, scored = row["length"], row["task_settings"].get("continuation")
    if scored is None:
        items = f"{row['task']} / {split_of(row)}, {context_length(length)} tokens"
    else:
        items = f"{row['task']} of {context_length(scored)} tokens after a prompt of {context_length(length)}"
    parts = {"model": f"{row['model']}", "dtype": f"{row['dtype']}", "n": f"n = {row['n']}"}
    differing = [part for name, part in parts.items() if len({other[name] for other in rows}) > 1]
    return "\n".join([items, ", ".join(differing)] if differing else [items])


def split_of(row: Row) -> str:
    """The split of a row's task, and that its question came after the context, if it did."""
    return row["split"] + (", question after" if row.get("task_settings", {}).get("question") == "after" else "")


def circumstances(rows: Sequence[Row]) -> str:
    """Model, number format, device and number of items of all rows."""
    parts = [", ".join(dict.fromkeys(row[name] for row in rows)) for name in ("model", "dtype", "device")]
    least, most = min(row["n"] for row in rows), max(row["n"] for row in rows)
    return " · ".join([*parts, f"n = {least}" if least == most else f"n = {least} to {most}"])


def _fixed(row: Row, along: Sequence[str]) -> dict[str, str]:
    """The settings that are the same along a line. Specs of other methods in them lose the settings that differ."""
    implied = {name for source, names in _STANDS_FOR.items() if row["settings"].get(source) for name in names}
    settings = {name: value for name, value in row["settings"].items() if name not in along and name not in implied}
    varying = re.compile(rf"\b(?:{'|'.join(along)})=[^,\"}}]*,?")
    return {name: re.sub(r"[:,](?=\"|$)", "", varying.sub("", _text(value))) for name, value in settings.items()}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
