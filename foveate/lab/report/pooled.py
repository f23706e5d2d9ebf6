"""Scores over several comparisons: each item counts once, and differences to dense stay paired."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from foveate.errors import UserError
from foveate.lab.evaluation.metrics import Interval, Mean, estimate, paired_bootstrap
from foveate.lab.evaluation.tasks.perplexity import nats_a_token
from foveate.lab.report.rows import Row, grouped

_AVERAGE = Mean("value")
_NUMBER = re.compile(r"_\d+$")


def difference(rows: Sequence[Row], dense: Sequence[Row]) -> Interval:
    """The mean difference of the main metric to `dense` over the items of several comparisons, points, with 95 %.

    Whatever their order: items are drawn by their numbers, which they have by task, split and length.
    """

    def place(pair: tuple[Row, Row]) -> tuple[Any, ...]:
        row, _ = pair
        return row["task"], row["split"], -row["length"], row["run"]["items"], *map(_values, pair)

    pairs = sorted(zip(rows, dense, strict=True), key=place, reverse=True)
    ours, theirs = ({"value": _items(side)} for side in zip(*pairs))
    return paired_bootstrap(_AVERAGE, ours, theirs)


def perplexity_ratio(row: Row, dense: Row) -> Interval:
    """Perplexity of a row divided by the dense row's of the same run, with its 95 % paired-bootstrap interval."""
    ours, theirs = ({key: np.array(column) for key, column in one["item_values"].items()} for one in (row, dense))
    log = paired_bootstrap(nats_a_token, ours, theirs, row["seed"])
    return Interval(*(math.exp(value) for value in (log.value, log.low, log.high)))


def averages(row: Row) -> bool:
    """Whether a row's score is the mean of its items' values, as perplexity is not."""
    return _main(row) in row["item_values"]


def over_splits(rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """Rows as if splits that differ in a last number, at one length and on one model, were one comparison.

    `rows`: of `foveate compare`, one a method on the same items. Returns the rows, and a line on each method that was
    left out because a split lacks it. Other splits stay as they are. Raises `UserError` when a split has no row of
    dense or several comparisons, or a metric that is no mean over items.
    """
    kept, notes = [], []
    for (model, task, family, length, _), pool in grouped(rows, _pool).items():
        splits = sorted({row["split"] for row in pool})
        if len(splits) == 1:
            kept += pool
            continue
        by_spec: dict[str, dict[str, Row]] = {}
        for row in pool:
            if not averages(row):
                raise UserError(f"the score of {task} is no mean over items, and cannot be pooled over splits")
            if by_spec.setdefault(row["spec"], {}).setdefault(row["split"], row) is not row:
                raise UserError(f"two comparisons of {task} {row['split']} on {model}; choose one with --where")
        dense = by_spec.get("dense", {})
        if missing := [split for split in splits if split not in dense]:
            raise UserError(f"no row of dense in {task} {missing[0]} on {model} to compare with")
        for spec, found in by_spec.items():
            if missing := [split for split in splits if split not in found]:
                what = f"{', '.join(missing)} of {task}{f', {length} tokens' if length else ''}"
                notes.append(f"{spec}: not measured on {what}, left out")
                continue
            kept.append(_pooled(family, [found[split] for split in splits], [dense[split] for split in splits]))
    return kept, notes


def _pool(row: Row) -> tuple[str, str, str, int, str]:
    """What rows that are pooled have in common."""
    length = row["task_settings"].get("length") or row["length"]
    return row["model"], row["task"], _NUMBER.sub("", row["split"]), length, row["dtype"]


def _pooled(family: str, rows: Sequence[Row], dense: Sequence[Row]) -> Row:
    first, counts = rows[0], [row["n"] for row in rows]
    own, theirs = (estimate(_AVERAGE, {"value": _items(side)}) for side in (rows, dense))
    beside = difference(rows, dense)

    def average(field: str) -> float | None:
        values = [row[field] for row in rows]
        return None if None in values else float(np.average(values, weights=counts))

    return {
        **first,
        "split": f"{family} ({len(rows)} splits)",
        "commit": ", ".join(dict.fromkeys(part for row in rows for part in row["commit"].split(", "))),
        "ceiling": float(np.average([row["ceiling"] for row in rows], weights=counts)),
        "task_settings": {name: value for name, value in first["task_settings"].items() if name != "split"},
        "length": round(np.average([row["length"] for row in rows], weights=counts)),
        "n": sum(counts),
        "item_values": {_main(first): [float(value) for value in _items(rows)]},
        "score": own.value,
        "low": own.low,
        "high": own.high,
        "dense_score": theirs.value,
        "diff_to_dense": beside.value,
        "diff_low": beside.low,
        "diff_high": beside.high,
        "keys_read_share": average("keys_read_share"),
        "kv_bytes_per_step": average("kv_bytes_per_step"),
        "run": {**first["run"], "items": " ".join(row["run"]["items"] for row in rows)},
    }


def _items(rows: Sequence[Row]) -> np.ndarray:
    return np.concatenate([np.array(_values(row), dtype=np.float64) for row in rows])


def _values(row: Row) -> list[float]:
    return row["item_values"][_main(row)]


def _main(row: Row) -> str:
    """The metric that is the score: a row's first."""
    return next(iter(row["metrics"]))
