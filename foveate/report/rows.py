"""Reading the rows of `foveate compare`, and choosing among them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from foveate import methods
from foveate.inputs.reading import read_jsonl
from foveate.results.errors import DataError, UserError, unknown
from foveate.results.measurements import bench_of, needed
from foveate.results.resultfile import method_of
from foveate.results.rows import ROW_FIELDS, check_row, each_once

Row = Mapping[str, Any]
Key = TypeVar("Key", bound=Hashable)

_NEEDED = (
    *("method", "spec", "settings", "model", "task", "task_settings", "split", "length", "n", "score", "low", "high"),
    *("metrics", "ceiling", "dense_score", "keys_read_share", "item_values", "dtype", "run"),
)


def grouped(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    """The rows that have the same key, in the order of the first of them."""
    found: dict[Key, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def numbered(file: Path) -> list[tuple[int, Any]]:
    """The rows of a file of any kind, with their lines.

    Raises:
        DataError: for a file without rows, or a row that is there twice.
    """
    found = list(each_once(file, read_jsonl(file)))
    if not found:
        raise DataError(f"{file}: no rows in this file")
    return found


def read(files: Sequence[Path]) -> list[Row]:
    """The rows of `foveate compare` in some files.

    Raises:
        DataError: for a file without rows, a line that is no such row, or one that is there twice.
    """
    rows = []
    for file in files:
        for number, row in numbered(file):
            check_row(row, _NEEDED, f"{file}:{number}")
            rows.append(spelled(row))
    return rows


def read_any(file: Path) -> list[Row]:
    """The rows of a file, of `foveate compare` or of benches.

    Raises:
        DataError: for a file without rows, a line that is no row, or one that is there twice.
    """
    rows = []
    for number, row in numbered(file):
        if isinstance(row, dict) and "bench" in row:
            missing = [name for name in needed(row) if name not in row]
            if missing or not isinstance(row["case"], dict):
                name = (missing or ["case"])[0]
                raise DataError(f"{file}:{number}: not a row of foveate bench ('{name}' is missing or no object)")
        else:
            check_row(row, ROW_FIELDS, f"{file}:{number}")
        rows.append(row)
    return rows


def read_bench(files: Sequence[Path], bench: str) -> list[Row]:
    """The rows of one `foveate bench` in some files.

    Raises:
        DataError: for a file without rows, a line that is not this bench's, or one that is there twice.
    """
    rows = []
    for file in files:
        for number, row in numbered(file):
            if not isinstance(row, dict) or bench_of(row) != bench or not row.keys() >= set(needed(row)):
                raise DataError(f"{file}:{number}: not a row of foveate bench {bench}")
            rows.append(row)
    return rows


def spelled(row: Row) -> Row:
    """A row whose methods, those within its settings too, are written as specs by the defaults of now."""
    method = method_of(row)
    if method is None:
        return row
    short = {name: getattr(method, name) for name, value in row["settings"].items() if isinstance(value, dict)}
    return {**row, "spec": method.spec, "settings": {**row["settings"], **short}}


def chosen(rows: Sequence[Row], conditions: Sequence[str]) -> list[Row]:
    """The rows that meet the conditions ``NAME=VALUE``, where the name is a row's, a task's or a method's setting.

    Of several conditions on one name one has to be met, and the rows come in the order of these; spaces in values do
    not count, and a ``spec`` may be written in any way. Rows of ``dense`` are there to compare with, and need not meet
    conditions on methods.

    Raises:
        UserError: for a condition of another form, a name that no row has, or when no row is left.
    """
    wanted: dict[str, list[str]] = {}
    for condition in conditions:
        name, equals, value = condition.partition("=")
        if not equals:
            raise UserError(f"--where {condition}: expected NAME=VALUE, such as task=niah or compressor=mean")
        if all(_value(row, name) is None for row in rows):
            names = {*rows[0], *(name for row in rows for name in (*row["task_settings"], *row["settings"]))}
            raise unknown("name", name, sorted(names), "--where")
        wanted.setdefault(name, []).append((_spelling(value) if name == "spec" else value).replace(" ", ""))
    for name, values in reversed(wanted.items()):  # sorting is stable: the first name decides first
        of_method = name in ("method", "spec") or all(name not in {**row, **row["task_settings"]} for row in rows)
        to_compare = [of_method and row["method"] == "dense" for row in rows]
        met = [row for row, exempt in zip(rows, to_compare) if exempt or _value(row, name) in values]
        places = {value: place for place, value in enumerate(values)}
        rows = sorted(met, key=lambda row: places.get(_value(row, name), 0)) if len(places) > 1 else met
        if not rows:
            raise UserError(f"--where {' or '.join(f'{name}={value}' for value in values)}: no row is left")
    return list(rows)


def of_cases(rows: Sequence[Row], conditions: Sequence[str]) -> list[Row]:
    """The rows of a bench whose cases meet the conditions ``NAME=VALUE``; several on one name are as in :func:`chosen`.

    Raises:
        UserError: for a name that no case has, or when no row is left.
    """
    wanted: dict[str, list[str]] = {}
    for condition in conditions:
        name, _, value = condition.partition("=")
        if all(name not in row["case"] for row in rows):
            raise unknown("name", name, sorted({name for row in rows for name in row["case"]}), "condition")
        wanted.setdefault(name, []).append(value)
    for name, values in reversed(wanted.items()):
        met = [row for row in rows if str(row["case"].get(name)) in values]
        rows = sorted(met, key=lambda row: values.index(str(row["case"].get(name))))
        if not rows:
            raise UserError(f"condition {' or '.join(f'{name}={value}' for value in values)}: no row is left")
    return list(rows)


def _spelling(spec: str) -> str:
    """A spec by the defaults of now, if it is one; its calibration may be on another machine."""
    for spell in (lambda: methods.parse(spec).spec, lambda: methods.spelled(spec)):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            return spell()
    return spec


def _value(row: Row, name: str) -> str | None:
    for fields in (row, row["task_settings"], row["settings"]):
        if name in fields:
            return str(fields[name]).replace(" ", "")
    return None
