"""The schema of the rows of `foveate compare` and of the batch records they are made of, and its checks.

Errors name file, line and field.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from foveate.errors import DataError

ROW_SCHEMA = 1
_OF_ROWS = (("score", "low", "high"), ("diff_to_dense", "diff_low", "diff_high"))  # fields with an interval
_ROUNDING = 1e-6

Kind = tuple[str, Callable[[Any], bool]]  # what a value must be, in words, and whether one is


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _are_numbers(value: Any) -> bool:
    """Whether a value is a list of finite numbers. Floats alone, which are most, are looked at together."""
    if isinstance(value, list) and set(map(type, value)) <= {float}:
        return all(map(math.isfinite, value))
    return isinstance(value, list) and all(map(_is_number, value))


def _maybe_in(most: float) -> Kind:
    """A share, or null: nothing was decoded. Rounding may carry it a little further than `most`."""
    return (
        f"a number from 0 to {most:g}, or null",
        lambda value: value is None or (_is_number(value) and 0 <= value <= most * (1 + _ROUNDING)),
    )


def _within(low: float, value: float, high: float) -> bool:
    """Whether a value is in its interval, up to rounding."""
    slack = _ROUNDING * max(1.0, *map(abs, (low, value, high)))
    return low - slack <= value <= high + slack


def _all(kind: type, each: Callable[[Any], bool], least: int = 0) -> Callable[[Any], bool]:
    """A check that a value is a `kind` (list or object) of at least ``least`` values, which all pass ``each``."""

    def test(value: Any) -> bool:
        parts = value.values() if isinstance(value, dict) else value
        return isinstance(value, kind) and len(value) >= least and all(map(each, parts))

    return test


def _is_interval(value: Any) -> bool:
    parts = [value.get(name) for name in ("low", "value", "high")] if isinstance(value, dict) else [None]
    return all(map(_is_number, parts)) and _within(*parts)


_TEXT: Kind = ("a text", lambda value: isinstance(value, str))
_TEXTS: Kind = ("a list of texts", _all(list, _TEXT[1]))
_NUMBER: Kind = ("a finite number", _is_number)
_MAYBE: Kind = ("a finite number or null", lambda value: value is None or _is_number(value))
_BOUND: Kind = ("a whole number, or 'auto'", lambda value: value == "auto" or type(value) is int)
_OBJECT: Kind = ("an object", lambda value: isinstance(value, dict))
_LIST: Kind = ("a list", lambda value: isinstance(value, list))
_COLUMNS: Kind = ("an object of lists of finite numbers", _all(dict, _are_numbers, 1))
_GRADES: Kind = ("a list of objects of finite numbers", _all(list, _all(dict, _is_number, 1), 1))
_RECALL: Kind = (
    "an object of numbers from 0 to 1, or null",
    lambda value: (
        value is None or _all(dict, lambda share: _is_number(share) and 0 <= share <= 1 + _ROUNDING, 1)(value)
    ),
)
_RECALLS: Kind = ("a list of objects of numbers from 0 to 1, or nulls", _all(list, _RECALL[1]))
_INTERVALS: Kind = ("an object of intervals ('value', 'low', 'high')", _all(dict, _is_interval))

ROW_FIELDS: Mapping[str, Kind] = {
    "method": _TEXT,  # the method's name
    "spec": _TEXT,  # the method with its settings, as `foveate.attach` takes it
    "settings": _OBJECT,  # all settings of the method
    "model": _TEXT,  # the model folder's name
    "architecture": _OBJECT,  # the model's kind, layers, heads, widths, positions
    "task": _TEXT,  # the task's name
    "task_settings": _OBJECT,  # all settings of the task
    "split": _TEXT,  # the task's split
    "length": _NUMBER,  # prompt tokens: as asked for, or the mean where the task's prompts have their own
    "n": _NUMBER,  # items
    "score": _NUMBER,  # the task's main metric, 0..100
    "low": _NUMBER,  # lower end of its 95 % interval: exact (Clopper-Pearson) of shares of items, else by the bootstrap
    "high": _NUMBER,  # its upper end
    "metrics": _INTERVALS,  # every metric of the task: value, low, high
    "ceiling": _NUMBER,  # the best score that a reader of the prompts could reach, 0..100
    "dense_score": _NUMBER,  # dense attention's score on the same items; for method 'own' alone, its own score
    "diff_to_dense": _NUMBER,  # score - dense_score
    "diff_low": _NUMBER,  # lower end of its 95 % paired interval: exact of up to 1,000 items of 0 or 1, else bootstrap
    "diff_high": _NUMBER,  # its upper end
    "keys_read_share": _maybe_in(4.0),  # keys read in decode, as a share of dense attention's, 0..1; none for 'own'
    "kv_bytes_per_step": _MAYBE,  # keys and values read in a decode step, a sequence, all layers; none of method 'own'
    "resident_bytes": _NUMBER,  # of keys, values and state after an answer, all layers, the largest batch
    "cache_peak_bytes": _MAYBE,  # the most that the method's cache held at once, the largest batch; none if not known
    "decode_steps": _NUMBER,  # decode steps taken
    "dense_steps": _NUMBER,  # decode steps among them that read everything because contexts were short (`dense_below`)
    "tokens_evicted": _NUMBER,  # tokens that the method dropped, summed over layers and sequences
    "pages_refined": _NUMBER,  # pages that the method looked into
    "indices_reused": _NUMBER,  # decode steps that reused another layer's selection
    "mass_read_share": _maybe_in(1.0),  # attention that the keys read hold, by the method's own estimate, 0..1; or none
    "recall": _RECALL,  # exact attention that the tokens read hold, by layer, 0..1, of the first items; or none
    "notes": _TEXTS,  # what the method has to say, such as layers that it left as they are
    "prefill_ms": _MAYBE,  # of a batch's prompt, median; none where it was read for several methods at once
    "decode_ms_per_token": _MAYBE,  # of a decode step (a token of every sequence in the batch), median
    "request_ms": _MAYBE,  # of a batch, prompt and answer, median; a shared prompt counts for each method
    "timing": _TEXT,  # 'generate', or 'teacher-forced': fed in blocks, no speed; both also ', shared prompt'
    "peak_bytes": _NUMBER,  # the largest memory in use while answering
    "peak_kind": _TEXT,  # what peak_bytes counts; with a shared prompt, the memory of all its methods together
    "batch_size": _NUMBER,  # sequences answered at once
    "dense_below": _BOUND,  # tokens of all sequences below which decode steps read everything, or "auto": attach's rule
    "dtype": _TEXT,  # the model's number format
    "device": _TEXT,  # the device's name
    "versions": _OBJECT,  # versions of Python and the libraries
    "limit": _NUMBER,  # items, or examples, asked for
    "seed": _NUMBER,  # seed of the items and of the bootstrap
    "commit": _TEXT,  # `git describe` of the checkout, or 'unknown'
    "command": _TEXT,  # made this row and dense's, as it was at `commit`; paths shortened to their last names
    "run": _OBJECT,  # the run's fingerprint; rows of one file share it
    "item_values": _COLUMNS,  # the graded values of every item, in the order of the items
    "examples": _LIST,  # the first items: id, gold answers, what the method said
}
"""The fields of a result row, in their order. In shares of keys what is scored, of keys and summaries, counts, too."""
LATER_FIELDS = frozenset({"dense_steps", "request_ms", "dense_below", "recall"})
"""Fields that older rows lack, whose steps were never dense because of short contexts."""
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


def ordered(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its fields in the schema's order. Raises ValueError if a field is missing or unknown."""
    if row.keys() != ROW_FIELDS.keys():
        raise ValueError(f"row fields differ from the schema: {sorted(row.keys() ^ ROW_FIELDS.keys())}")
    return {field: row[field] for field in ROW_FIELDS}


def check_row(row: Any, needed: Collection[str], where: str) -> None:
    """Raises `DataError`, beginning with `where`, for a missing field or one of another kind."""
    fault = f"{where}: not a row of foveate compare"
    _check(row, {}, fault)
    _check(row, {name: kind for name, kind in ROW_FIELDS.items() if name in needed or name in row}, fault)
    for name, values in row["item_values"].items():
        if len(values) != row["n"]:
            raise DataError(f"{where}: 'item_values' has {len(values)} of '{name}', and 'n' is {row['n']}")
    for value, *bounds in _OF_ROWS:
        if {value, *bounds} <= row.keys() and not _within(row[bounds[0]], row[value], row[bounds[1]]):
            found = [_short(row[name]) for name in (value, *bounds)]
            raise DataError(f"{where}: '{value}' is {found[0]}, outside its interval of {found[1]} to {found[2]}")
    main = next(iter(row.get("metrics", ())), None)
    if main in row["item_values"] and {"score", "n"} <= row.keys():  # others than averages have no values of that name
        average = 100.0 * sum(row["item_values"][main]) / row["n"]
        if not _within(average, row["score"], average):
            raise DataError(
                f"{where}: 'score' is {_short(row['score'])}, and 'item_values' of '{main}' average {average:g}"
            )


def check_record(record: Mapping[str, Any], where: str) -> None:
    """Raises `DataError`, beginning with `where`, if `record` is not a record of a batch's answers."""
    fault = f"{where}: not a record of foveate compare"
    _check(record, _RECORD, fault)
    _check(record["stats"], _STATS, f"{fault}: 'stats'")
    _check(record, {"recall": _RECALLS} if "recall" in record else {}, fault)
    if len(record["texts"]) != len(record["values"]):
        raise DataError(f"{fault}: {len(record['texts'])} 'texts' of {len(record['values'])} 'values'")


def each_once(path: Path, rows: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """Numbered rows of a file. Raises `DataError` for one that an earlier line holds, too, naming both lines."""
    seen: dict[Any, list[tuple[int, Any]]] = {}
    for number, row in rows:
        words = row.items() if isinstance(row, dict) else ()
        alike = seen.setdefault(frozenset(one for one in words if isinstance(one[1], str | int)), [])
        text = json.dumps(row, sort_keys=True) if alike else ""  # only where what is plain is alike
        for first, other in alike:
            if text == json.dumps(other, sort_keys=True):
                raise DataError(f"{path}:{number}: the same row as in line {first}; leave one of them out")
        alike.append((number, row))
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
