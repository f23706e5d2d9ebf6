"""Rows whose method had another name when they were written; files keep them as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foveate import methods
from foveate.methods._earlier import written_now


def as_now(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row of `foveate compare` or of a bench with its method as it is spelled now; any other as it is."""
    case = row.get("case")
    if isinstance(case, dict):
        method = case.get("method")
        now = methods.respelled(method) if isinstance(method, str) else method
        return row if now == method else {**row, "case": {**case, "method": now}}
    found = written_now(row["method"], row["settings"]) if "settings" in row else None
    if found is None:
        return row
    name, settings = found
    return {**row, "method": name, "spec": methods.respelled(row["spec"]), "settings": settings}
