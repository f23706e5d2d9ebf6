"""The files that commands write: checked before any work, written in one step, and named in every error."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from foveate.results.errors import UserError


def check(out: Path) -> None:
    """Raises `UserError` if no file can be written to `out`; creates nothing.

    Devices and pipes are refused, too, since a resumed run reads its results back from the file.
    """
    if out.exists() and not out.is_file():
        kind = "a folder" if out.is_dir() else "a device, pipe or socket"
        raise UserError(f"{out}: is {kind}, and --out must name a regular file")
    _check_folder(out.parent, out)


def check_folder(folder: Path) -> None:
    """Raises `UserError` if `folder` cannot be made, or no file can be written to it; creates nothing."""
    _check_folder(folder, folder)


def new_folder(folder: Path) -> Path | None:
    """`folder` if it does not exist and can be made, else None."""
    return folder if not folder.exists() and _nearest(folder).is_dir() else None


def announce(out: Path | None) -> Path | None:
    """Callback of each ``--out``: names a folder that is about to be made, so that a misspelt one is seen."""
    if out is not None and (folder := new_folder(out.parent)):
        print(f"{folder} is a new folder: it is made", file=sys.stderr)
    return out


@contextmanager
def writing(path: Path, more: str = "") -> Iterator[None]:
    """Names `path` in an error of the system, which names no file where the disk is full; raised as `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written to ({error.strerror or error}){more}") from None


def write(out: Path, content: bytes, more: str = "") -> None:
    """Writes a file in one step (a temporary file, then a rename), into a folder that is made if it is not there.

    Raises `UserError`, which ends in `more`; what the file held before then stays.
    """
    with writing(out, more):
        out.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
        try:
            with open(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(scratch, 0o644)
            os.replace(scratch, out)
        except BaseException:
            Path(scratch).unlink(missing_ok=True)
            raise
        sync_folder(out.parent)


def sync_folder(folder: Path) -> None:
    """Waits until the names of a folder's files are on the disk."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # folders cannot be opened on this system
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def _check_folder(folder: Path, out: Path) -> None:
    """See :func:`check_folder`; `out` is what to call it."""
    there = _nearest(folder)
    if not there.is_dir():
        raise UserError(f"{out}: {there} is no folder; choose another --out")
    with writing(out):
        tempfile.TemporaryFile(dir=there).close()
