"""What rows of `foveate compare` must share to stand in one table: the protocol by which they were measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from foveate.errors import UserError
from foveate.lab.report.rows import Row, grouped

FIELDS = {
    "weights": lambda row: row["run"]["weights"],
    "number format": lambda row: row["dtype"],
    "data": lambda row: row["run"]["data"],
    "PyTorch": lambda row: row["versions"]["torch"],
    "Transformers": lambda row: row["versions"]["transformers"],
    "bound of short contexts (dense_below)": lambda row: row.get("dense_below", 0),
}
"""What all methods of a comparison share: a comparison has one task with its settings, one seed and one model."""


def checked(rows: Sequence[Row]) -> list[Row]:
    """The rows, with the device in the name of a method that was measured on another device than dense attention.

    Raises:
        UserError: for rows of one comparison that differ in anything else that is no column of a table.
    """
    labels: dict[int, str] = {}
    for some in grouped(rows, _comparison).values():
        for what, of in FIELDS.items():
            found = list(dict.fromkeys(map(of, some)))
            if len(found) > 1:
                raise UserError(
                    f"{some[0]['task']} of {some[0]['model']}: rows of different {what} are not put side by side: "
                    f"{found[0]} and {found[1]}; choose some with a condition, or measure them again"
                )
        own = {row["device"] for row in some if row["spec"] == "dense"} or {some[0]["device"]}
        of_others = {id(row): f"{row['spec']} on {_short(row['device'])}" for row in some if row["device"] not in own}
        labels |= of_others
    return [row | {"spec": labels[id(row)]} if id(row) in labels else row for row in rows]


def _short(device: str) -> str:
    """H100 of "NVIDIA H100 80GB HBM3"."""
    return device.removeprefix("NVIDIA ").partition(" ")[0]


def _comparison(row: Row) -> tuple[Any, ...]:
    settings = json.dumps(row["task_settings"], sort_keys=True)
    return row["model"], row["task"], settings, row["seed"], row["limit"], row["run"]["items"]
