"""What a run writes about itself: `log.jsonl`, and TensorBoard's events where that is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from foveate.io import infile, outfile
from foveate.io.json_text import parse_json

LOG, EVENTS = "log.jsonl", "tensorboard"


class Journal:
    """Rows of a run by their step, the newest last; a context manager.

    The first line describes the run. A run that goes on from `step` drops the rows after it, which are made again.
    """

    def __init__(self, out: Path, header: Mapping[str, Any], step: int):
        self._path = out / LOG
        kept = [row for row in read(out) if row["step"] <= step] if step else []
        lines = [json.dumps(dict(header)), *map(json.dumps, kept)]
        outfile.write(self._path, "".join(f"{line}\n" for line in lines).encode())
        with outfile.writing(self._path):
            self._file = self._path.open("a", encoding="utf-8")
        self._events = _writer(out / EVENTS, step)

    @property
    def has_events(self) -> bool:
        """Whether rows are written for TensorBoard, too."""
        return self._events is not None

    def add(self, row: Mapping[str, Any]) -> None:
        """Writes a row, which has a `step`, and numbers or mappings of such; lists are left out of the events."""
        with outfile.writing(self._path):
            self._file.write(json.dumps(dict(row)) + "\n")
            self._file.flush()
        if self._events:
            for name, value in _scalars(row):
                if name != "step":
                    self._events.add_scalar(name, value, row["step"])

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
        if self._events:
            self._events.close()


def read(out: Path) -> list[dict[str, Any]]:
    """The rows of a run's log, without its first line and without a last one that was torn."""
    try:
        lines = infile.read(Path(out) / LOG).split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    rows = []
    for line in lines:
        try:
            row = parse_json(line)
        except ValueError:
            continue
        if isinstance(row, dict) and type(row.get("step")) is int:
            rows.append(row)
    return rows


def _scalars(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        elif not isinstance(value, list):
            yield f"{prefix}{name}", value


def _writer(folder: Path, step: int) -> Any:
    """Where events go; None without TensorBoard."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step + 1 if step else None)
