"""The files of a resumable run: results so far in `OUT.partial`, batch by batch, and the finished rows in `OUT`.

Both carry the run's fingerprint, a mapping of JSON values. A file of another run is never written to.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foveate.errors import DataError, UserError
from foveate.io import infile, outfile
from foveate.io.digest import differences
from foveate.io.json_text import parse_json
from foveate.lab.results.rows import LATER_FIELDS, ROW_FIELDS, check_record, check_row
from foveate.methods import Method, make, settings_of

_KIND = "partial results of foveate compare"
Fingerprint = Mapping[str, Any]


def partial_path(out: Path) -> Path:
    """Where the results so far of the rows file `out` are kept."""
    return out.with_name(out.name + ".partial")


def read_rows(out: Path, run: Fingerprint) -> list[dict[str, Any]]:
    """The finished rows in `out`, none if it does not exist.

    Raises `UserError` if they are not this run's, `DataError` with the line if one is damaged or there twice.
    """
    rows, lines_of = [], {}
    for number, line in enumerate((_content(out) or b"").splitlines(), start=1):
        row = _parsed(out, number, line)
        if not isinstance(row.get("run"), dict) or "item_values" not in row:
            raise UserError(f"{out}:{number}: not a row of foveate compare; choose another --out")
        _same_run(out, row["run"], run)
        check_row(row, ROW_FIELDS.keys() - LATER_FIELDS, f"{out}:{number}")
        _note(out, number, lines_of, f"the method {row['spec']}", row["method"], row["settings"])
        rows.append(row)
    return rows


def method_of(row: Mapping[str, Any]) -> Method | None:
    """The method of a row, from its settings; None where the method has other settings by now."""
    try:
        method = make(row["method"], **row["settings"])
    except (KeyError, TypeError, ValueError):
        return None
    theirs, ours = (json.dumps(settings, sort_keys=True) for settings in (row["settings"], settings_of(method)))
    return method if theirs == ours else None


def read_partial(out: Path, run: Fingerprint) -> list[dict[str, Any]]:
    """The batch records kept for `out`, none if there is no partial file.

    A last line without its newline was torn by the kill and is left out. Raises `UserError` if it is another run's file
    or no partial file at all, `DataError` with the line if one is damaged or there twice.
    """
    path = partial_path(out)
    content = _content(path)
    return [] if content is None else _records(path, content, run)[0]


def _content(path: Path) -> bytes | None:
    """What a file holds; None if it is not there."""
    try:
        return infile.read(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


class PartialFile:
    """The partial file, open for appending. A context manager; each record is on the disk when `append` returns.

    `records` holds the records that were in the file already. Raises what `read_partial` does, and `UserError` if
    another process is writing to the file or the folder cannot be written to.
    """

    def __init__(self, out: Path, run: Fingerprint):
        path = self._path = partial_path(out)
        outfile.check(path)
        with outfile.writing(path):
            out.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab+")
        try:
            outfile.lock(self._file, path)
            self._file.seek(0)
            self.records, whole = _records(path, self._file.read(), run)
            self._file.truncate(whole)
            if not whole:
                self.append({"kind": _KIND, "run": dict(run)})
                outfile.sync_folder(path.parent)
        except BaseException:
            self._file.close()
            raise

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one JSON line, whole or, if killed meanwhile, to be dropped by the next reader.

        Raises `UserError` if the disk is full; nothing can be appended then.
        """
        with outfile.writing(self._path, "; the results before are kept, and the same command goes on from there"):
            try:
                self._file.write(_dumps(record))
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError:
                with contextlib.suppress(OSError):  # closing tries once more to write, and fails again
                    self._file.close()
                raise

    def __enter__(self) -> PartialFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()


def write_rows(out: Path, rows: Sequence[Mapping[str, Any]], keep_partial: bool = False) -> None:
    """Writes the rows to `out` in one step.

    The partial file is then removed, unless it also has results of methods that are not among the rows. Raises
    `UserError` if the file cannot be written.
    """
    kept = f"; the results are kept in {partial_path(out)}, and the same command writes the rows"
    outfile.write(out, b"".join(map(_dumps, rows)), kept)
    if not keep_partial:
        partial_path(out).unlink(missing_ok=True)


def _dumps(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _records(path: Path, content: bytes, run: Fingerprint) -> tuple[list[dict[str, Any]], int]:
    """The records of a partial file and the length of its whole lines; neither if not even its header is whole."""
    whole = content.rfind(b"\n") + 1
    begin = json.dumps({"kind": _KIND}).encode()[:-1]
    if not (content.startswith(begin) or (not whole and begin.startswith(content))):
        raise UserError(f"{path}: not a file of partial results; move it away or choose another --out")
    lines = [_parsed(path, number, line) for number, line in enumerate(content[:whole].splitlines(), start=1)]
    if lines:
        theirs = lines[0].get("run") or {}
        if not isinstance(theirs, dict):
            raise DataError(f"{path}:1: 'run' must be an object; move the file away or choose another --out")
        _same_run(path, theirs, run)
    lines_of: dict[str, int] = {}
    for number, record in enumerate(lines[1:], start=2):
        check_record(record, f"{path}:{number}")
        if (names := record["values"][0].keys()) != (known := lines[1]["values"][0].keys()):
            raise DataError(f"{path}:{number}: 'values' of {sorted(names)}, and line 2 has {sorted(known)}")
        batch = f"the batch of item {record['first']} with {record['spec']}"
        _note(path, number, lines_of, batch, record["key"], record["first"])
    return lines[1:], whole


def _note(path: Path, number: int, lines_of: dict[str, int], what: str, *key: Any) -> None:
    """Notes the line of a key. Raises `DataError` if an earlier line has the same."""
    first = lines_of.setdefault(json.dumps(key, sort_keys=True), number)
    if first != number:
        raise DataError(f"{path}:{number}: {what} is in line {first}, too; leave one of them out")


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    where, what_to_do = f"{path}:{number}", "move the file away or choose another --out"
    try:
        value = parse_json(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{where}: malformed JSON ({error}); {what_to_do}") from None
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected a JSON object; {what_to_do}")
    return value


def _same_run(path: Path, theirs: Fingerprint, ours: Fingerprint) -> None:
    if differ := differences(theirs, ours):
        raise UserError(
            f"{path} belongs to another run: {differ}. Choose another --out, or move that file away to start anew"
        )
