"""What the rows of `foveate compare` and the records that they are made of hold; errors name file, line and field."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from foveate.evaluation.errors import DataError

Kind = tuple[str, Callable[[Any], bool]]
"""What a value must be, in words, and whether one is."""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _all(kind: type, each: Callable[[Any], bool], least: int = 0) -> Callable[[Any], bool]:
    """Whether a value is a list or an object (`kind`) whose values, at least so many, are all of a kind."""

    def test(value: Any) -> bool:
        parts = value.values() if isinstance(value, dict) else value
        return isinstance(value, kind) and len(value) >= least and all(map(each, parts))

    return test


def _is_interval(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_number(value.get(name)) for name in ("value", "low", "high"))


_TEXT: Kind = ("a text", lambda value: isinstance(value, str))
_TEXTS: Kind = ("a list of texts", _all(list, _TEXT[1]))
_NUMBER: Kind = ("a finite number", _is_number)
_MAYBE: Kind = ("a finite number or null", lambda value: value is None or _is_number(value))
_OBJECT: Kind = ("an object", lambda value: isinstance(value, dict))
_LIST: Kind = ("a list", lambda value: isinstance(value, list))
_COLUMNS: Kind = ("an object of lists of finite numbers", _all(dict, _all(list, _is_number), 1))
_GRADES: Kind = ("a list of objects of finite numbers", _all(list, _all(dict, _is_number, 1), 1))
_INTERVALS: Kind = ("an object of intervals ('value', 'low', 'high')", _all(dict, _is_interval))

_ROW: Mapping[str, Kind] = {
    **dict.fromkeys(("method", "spec", "model", "task", "split", "timing", "peak_kind", "dtype", "device"), _TEXT),
    **dict.fromkeys(("commit", "command"), _TEXT),
    **dict.fromkeys(("settings", "architecture", "task_settings", "versions", "run"), _OBJECT),
    **dict.fromkeys(("length", "n", "score", "low", "high", "ceiling", "dense_score"), _NUMBER),
    **dict.fromkeys(("diff_to_dense", "diff_low", "diff_high", "resident_bytes", "decode_steps"), _NUMBER),
    **dict.fromkeys(("tokens_evicted", "pages_refined", "indices_reused", "peak_bytes", "batch_size"), _NUMBER),
    **dict.fromkeys(("limit", "seed"), _NUMBER),
    **dict.fromkeys(("keys_read_share", "kv_bytes_per_step", "prefill_ms", "decode_ms_per_token"), _MAYBE),
    "metrics": _INTERVALS,
    "notes": _TEXTS,
    "item_values": _COLUMNS,
    "examples": _LIST,
}
_STATS: Mapping[str, Kind] = {
    **dict.fromkeys(("keys_read_per_step", "keys_read_share", "kv_bytes_per_step"), _MAYBE),
    **dict.fromkeys(("decode_steps", "resident_bytes"), _NUMBER),
    "notes": _TEXTS,
}
_RECORD: Mapping[str, Kind] = {
    **dict.fromkeys(("key", "spec", "first", "timing", "peak_kind", "commit"), _TEXT),
    "values": _GRADES,
    "texts": _TEXTS,
    **dict.fromkeys(("prefill_ms", "decode_ms_per_token"), _MAYBE),
    "peak_bytes": _NUMBER,
    "stats": _OBJECT,
}


def check_row(row: Any, needed: Collection[str], where: str) -> None:
    """Refuses what is no row of `foveate compare`: a needed field is missing, or one holds another kind of value.

    Raises `DataError`, which begins with `where`.
    """
    fault = f"{where}: not a row of foveate compare"
    _check(row, {}, fault)
    _check(row, {name: kind for name, kind in _ROW.items() if name in needed or name in row}, fault)
    for name, values in row["item_values"].items():
        if len(values) != row["n"]:
            raise DataError(f"{where}: 'item_values' has {len(values)} of '{name}', and 'n' is {row['n']}")


def check_record(record: Mapping[str, Any], where: str) -> None:
    """Refuses what is no record of a batch's answers. Raises `DataError`, which begins with `where`."""
    fault = f"{where}: not a record of foveate compare"
    _check(record, _RECORD, fault)
    _check(record["stats"], _STATS, f"{fault}: 'stats'")
    if len(record["texts"]) != len(record["values"]):
        raise DataError(f"{fault}: {len(record['texts'])} 'texts' of {len(record['values'])} 'values'")


def each_once(path: Path, rows: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """Numbered rows of a file. Raises `DataError` for one that an earlier line holds, too, naming both lines."""
    seen: dict[str, int] = {}
    for number, row in rows:
        first = seen.setdefault(json.dumps(row, sort_keys=True), number)
        if first != number:
            raise DataError(f"{path}:{number}: the same row as in line {first}; leave one of them out")
        yield number, row


def _check(value: Any, kinds: Mapping[str, Kind], fault: str) -> None:
    if not isinstance(value, dict):
        raise DataError(f"{fault} (it is no object)")
    for name, (what, test) in kinds.items():
        if name not in value:
            raise DataError(f"{fault} ('{name}' is missing)")
        if not test(value[name]):
            raise DataError(f"{fault}: '{name}' must be {what}, not {_short(value[name])}")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
