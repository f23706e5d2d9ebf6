"""Reading the rows of `foveate compare`, and choosing among them."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from foveate import methods
from foveate.errors import DataError, UserError, unknown
from foveate.io.reading import read_jsonl
from foveate.lab.results.earlier import as_now
from foveate.lab.results.measurements import needed
from foveate.lab.results.resultfile import method_of
from foveate.lab.results.rows import LATER_FIELDS, ROW_FIELDS, check_row, each_once

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


def checked(files: Iterable[Path], check: Callable[[Any, str], None]) -> list[Row]:
    """The rows of some files, after a check of each row.

    `check` is called with a row and its place, the file and line. It raises a DataError that begins with the place.
    Raises `DataError` also for a file without rows, or a row that occurs twice.
    """
    rows = []
    for file in files:
        with _without_collections():
            found = list(each_once(file, read_jsonl(file)))
        if not found:
            raise DataError(f"{file}: no rows in this file")
        for number, row in found:
            check(row, f"{file}:{number}")
            rows.append(as_now(row))
    return rows


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Rows hold no cycles: looking for some took a fifth of the time of a report of 20,000 rows."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def read(files: Sequence[Path]) -> list[Row]:
    """The rows of `foveate compare` in some files. Raises DataError as :func:`checked` does."""
    rows = checked(files, lambda row, where: check_row(row, _NEEDED, where))
    return all_spelled(rows)


def read_any(file: Path) -> list[Row]:
    """The rows of a file, of `foveate compare` or of benches. Raises DataError as :func:`checked` does."""

    def check(row: Any, where: str) -> None:
        if not isinstance(row, dict) or "bench" not in row:
            check_row(row, ROW_FIELDS.keys() - LATER_FIELDS, where)
            return
        missing = [name for name in needed(row) if name not in row]
        if missing or not isinstance(row["case"], dict):
            name = (missing or ["case"])[0]
            raise DataError(f"{where}: not a row of foveate bench ('{name}' is missing or no object)")

    return checked([file], check)


def read_bench(files: Sequence[Path], bench: str) -> list[Row]:
    """The rows of one `foveate bench` in some files. Raises DataError as :func:`checked` does."""

    def check(row: Any, where: str) -> None:
        if not isinstance(row, dict) or row.get("bench") != bench or not row.keys() >= set(needed(row)):
            raise DataError(f"{where}: not a row of foveate bench {bench}")

    return checked(files, check)


def spelled(row: Row) -> Row:
    """A row whose method is spelled as it is now, and in whose settings methods are written as specs."""
    return all_spelled([row])[0]


def all_spelled(rows: Iterable[Row]) -> list[Row]:
    """Rows as :func:`spelled`; each method with its settings is made once."""
    known: dict[tuple[str, str], dict[str, Any]] = {}
    found = []
    for row in map(as_now, rows):
        settings = row["settings"]
        key = (row["method"], json.dumps(settings, sort_keys=True))
        if key not in known:
            method, named = method_of(row), [name for name, value in settings.items() if isinstance(value, dict)]
            known[key] = settings | ({} if method is None else {name: getattr(method, name) for name in named})
        found.append({**row, "settings": known[key]})
    return found


def chosen(rows: Sequence[Row], conditions: Sequence[str]) -> list[Row]:
    """The rows that meet the conditions ``NAME=VALUE``, where the name is a row's, a task's or a method's setting.

    Of several conditions on one name one has to be met, and the rows come in the order of these; spaces in values do
    not count, and a ``spec`` may be written in any way, or as a row of an earlier version has it. Rows of ``dense`` are
    there to compare with, and need not meet conditions on methods. Raises `UserError` for a condition of another form,
    a name, spec or method that no row has, or when no row is left.
    """

    def fields(row: Row) -> tuple[Row, ...]:
        return row, row["task_settings"], row["settings"]

    return _meeting(rows, conditions, fields, "--where")


def of_cases(rows: Sequence[Row], conditions: Sequence[str]) -> list[Row]:
    """The rows of a bench whose cases meet the conditions ``NAME=VALUE``; several on one name are as in :func:`chosen`.

    Raises `UserError` for a condition of another form, a name, spec or method that no case has, or when no row is left.
    """

    return _meeting(list(map(as_now, rows)), conditions, lambda row: (row["case"],), "condition")


def _meeting(
    rows: Sequence[Row], conditions: Sequence[str], fields: Callable[[Row], tuple[Row, ...]], where: str
) -> list[Row]:
    """See :func:`chosen`; ``fields`` gives what names are looked up in, the settings of a method third."""

    def value(row: Row, name: str) -> str | None:
        of = next((some for some in fields(row) if name in some), None)
        return None if of is None else str(of[name]).replace(" ", "")

    wanted: dict[str, list[str]] = {}
    names = {name for row in rows for some in fields(row) for name in some} if conditions else set()
    specs = {value(row, "spec") for row in rows}
    for condition in conditions:
        name, equals, text = condition.partition("=")
        if not equals:
            raise UserError(f"{where} {condition}: expected NAME=VALUE, such as task=niah or compressor=mean")
        if name not in names:
            raise unknown("name", name, sorted(names), where)
        text = text.replace(" ", "") if name != "spec" or text.replace(" ", "") in specs else _spelling(text)
        wanted.setdefault(name, []).append(text.replace(" ", ""))
    for name in wanted.keys() & {"spec", "method"}:
        there = {value(row, name) for row in rows}
        if lost := [text for text in wanted[name] if text not in there]:
            raise UserError(f"{where} {name}={lost[0]}: no row has it")
    for name, values in reversed(wanted.items()):  # sorting is stable: the first name decides first
        of_row = any(name in some for row in rows for some in fields(row)[:2])
        beside = name in ("method", "spec") or not of_row  # dense is compared with, whatever the method
        compared = [beside and row.get("method") == "dense" for row in rows]
        met = [row for row, exempt in zip(rows, compared) if exempt or value(row, name) in values]
        places = {text: place for place, text in enumerate(values)}
        rows = sorted(met, key=lambda row: places.get(value(row, name), 0)) if len(places) > 1 else met
        if not rows:
            raise UserError(f"{where} {' or '.join(f'{name}={text}' for text in values)}: no row is left")
    return list(rows)


def _spelling(spec: str) -> str:
    """A spec by the defaults of now, if it is one; its calibration may be on another machine."""
    for spell in (lambda: methods.parse(spec).spec, lambda: methods.spelled(spec)):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            return spell()
    return spec
