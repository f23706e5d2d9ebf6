"""Reading the rows of `foveate compare`, and choosing among them."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from foveate import methods
from foveate.evaluation import tasks
from foveate.inputs.reading import read_jsonl
from foveate.results import measurements
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


def checked(files: Iterable[Path], check: Callable[[Any, str], None]) -> list[Row]:
    """The rows of some files, each of which passes a check.

    Args:
        check: is given a row, and its file and line; raises DataError that begins with these.

    Raises:
        DataError: also for a file without rows, or a row that is there twice.
    """
    rows = []
    for file in files:
        with _without_collections():
            found = list(each_once(file, read_jsonl(file)))
        if not found:
            raise DataError(f"{file}: no rows in this file")
        for number, row in found:
            check(row, f"{file}:{number}")
            rows.append(row)
    return rows


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Rows hold no cycles: looking for some among all that was read took a fifth of the time of a report of 20,000."""
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
    return all_spelled(map(tasks.estimated, rows))


def read_any(file: Path) -> list[Row]:
    """The rows of a file, of `foveate compare` or of benches. Raises DataError as :func:`checked` does."""

    def check(row: Any, where: str) -> None:
        if not isinstance(row, dict) or "bench" not in row:
            check_row(row, ROW_FIELDS, where)
            return
        missing = [name for name in needed(row) if name not in row]
        if missing or not isinstance(row["case"], dict):
            name = (missing or ["case"])[0]
            raise DataError(f"{where}: not a row of foveate bench ('{name}' is missing or no object)")

    return [measurements.present(row) if "bench" in row else tasks.estimated(row) for row in checked([file], check)]


def read_bench(files: Sequence[Path], bench: str) -> list[Row]:
    """The rows of one `foveate bench` in some files. Raises DataError as :func:`checked` does."""

    def check(row: Any, where: str) -> None:
        if not isinstance(row, dict) or bench_of(row) != bench or not row.keys() >= set(needed(row)):
            raise DataError(f"{where}: not a row of foveate bench {bench}")

    return list(map(measurements.present, checked(files, check)))


def spelled(row: Row) -> Row:
    """A row whose methods, those within its settings too, are written as specs by the defaults of now.

    Settings that its method has no more are left out.
    """
    return {**row, **_method_now(row)}


def all_spelled(rows: Iterable[Row]) -> list[Row]:
    """Rows as :func:`spelled`; each method with its settings is made once."""
    known: dict[tuple[str, ...], Row] = {}
    found = []
    for row in rows:
        key = (row["method"], row["spec"], json.dumps(row["settings"], sort_keys=True))
        if key not in known:
            known[key] = _method_now(row)
        found.append({**row, **known[key]})
    return found


def _method_now(row: Row) -> dict[str, Any]:
    """The fields of a row that name its method, by the defaults of now."""
    method = method_of(row)
    if method is None:
        spec = methods.restated(row["spec"], row["settings"])
        return {"method": methods.present(row["method"]), "spec": spec}
    known = {
        method.renamed.get(name, name): value for name, value in row["settings"].items() if name not in method.retired
    }
    short = {name: getattr(method, name) for name, value in known.items() if isinstance(value, dict)}
    return {"method": method.name, "spec": method.spec, "settings": known | short}


def chosen(rows: Sequence[Row], conditions: Sequence[str]) -> list[Row]:
    """The rows that meet the conditions ``NAME=VALUE``, where the name is a row's, a task's or a method's setting.

    A setting that a method has no more has the value under which it had no effect (:attr:`Method.retired`).

    Of several conditions on one name one has to be met, and the rows come in the order of these; spaces in values do
    not count, and a ``spec`` may be written in any way. Rows of ``dense`` are there to compare with, and need not meet
    conditions on methods.

    Raises:
        UserError: for a condition of another form, a name, spec or method that no row has, or when no row is left.
    """

    def fields(row: Row) -> tuple[Row, ...]:
        retired = methods.get(row["method"]).retired if row["method"] in methods.names() else {}
        return row, row["task_settings"], row["settings"], retired

    return _meeting(rows, conditions, fields, "--where")


def of_cases(rows: Sequence[Row], conditions: Sequence[str]) -> list[Row]:
    """The rows of a bench whose cases meet the conditions ``NAME=VALUE``; several on one name are as in :func:`chosen`.

    Raises:
        UserError: for a condition of another form, a name, spec or method that no case has, or when no row is left.
    """

    return _meeting(list(map(measurements.present, rows)), conditions, lambda row: (row["case"],), "condition")


def _meeting(
    rows: Sequence[Row], conditions: Sequence[str], fields: Callable[[Row], tuple[Row, ...]], where: str
) -> list[Row]:
    """See :func:`chosen`; ``fields`` gives what names are looked up in, the settings of a method third."""

    def value(row: Row, name: str) -> str | None:
        of = next((some for some in fields(row) if name in some), None)
        return None if of is None else str(of[name]).replace(" ", "")

    wanted: dict[str, list[str]] = {}
    for condition in conditions:
        name, equals, text = condition.partition("=")
        if not equals:
            raise UserError(f"{where} {condition}: expected NAME=VALUE, such as task=niah or compressor=mean")
        names = {name for row in rows for some in fields(row) for name in some}
        if name not in names:
            raise unknown("name", name, sorted(names), where)
        spell = {"spec": _spelling, "method": methods.present}.get(name, str)
        wanted.setdefault(name, []).append(spell(text).replace(" ", ""))
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
    return methods.present(spec)
