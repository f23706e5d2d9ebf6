"""The files that foveate writes: checked before any work, written in one step or locked, named in every error."""

from __future__ import annotations

import glob
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from foveate.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_OF_MODEL = (
    *(
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "model-0",
        "tokenizer",
        "chat_template",
        "vocab",
        "merges",
    ),
    *("special_tokens_map.json", "added_tokens.json"),
)
"""How the names of files in a model folder begin."""
_SCRATCH, _LEFT = ".new", 60.0
"""How folders of unfinished files end, and after how many seconds one that no process holds is removed."""


def named(path: str | os.PathLike[str], what: str = "path") -> Path:
    """A path as a user gives it, with `~` for the home folder. Raises `UserError` for what is no path."""
    if not isinstance(path, (str, os.PathLike)) or not str(path) or "\0" in str(path):
        raise UserError(f"{what} must be the path of a file, not {path!r}")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{path}: {error}") from None


def check(out: Path, what: str = "--out", inputs: Iterable[Path] = ()) -> None:
    """Raises `UserError` if no file can be written to `out`, which `what` names; creates nothing.

    Devices and pipes are refused, too, since a resumed run reads its results back from the file; and so is a path that
    is one of `inputs`, by whatever name or link.
    """
    check_apart(out, inputs, what)
    _check_kind(out, what)
    _check_folder(out.parent, out, what)


def check_apart(out: Path, inputs: Iterable[Path], what: str = "--out") -> None:
    """Raises `UserError` if an output is one of the inputs, by whatever name or link, or a file of a model folder."""
    for path in inputs:
        real, its = Path(os.path.realpath(out)), Path(os.path.realpath(path))
        with suppress(OSError):  # a name that is none
            if real == its or (real.exists() and its.exists() and real.samefile(its)):
                raise UserError(f"{out}: {path} is the same file, which would be lost; choose another {what}")
            if real.parent == its and real.name.startswith(_OF_MODEL) and (its / "config.json").exists():
                raise UserError(f"{out}: is a file of the model {path}, which would be lost; choose another {what}")


def _check_kind(out: Path, what: str) -> None:
    with writing(out):
        if out.exists() and not out.is_file():
            kind = "a folder" if out.is_dir() else "a device, pipe or socket"
            raise UserError(f"{out}: is {kind}, and {what} must name a regular file")


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
    """Writes a file in one step, as :func:`replacing`."""
    with replacing(out, more) as scratch, writing(out, more):
        scratch.write_bytes(content)


@contextmanager
def replacing(out: Path, more: str = "") -> Iterator[Path]:
    """The path of a file to write, which replaces `out` when the block ends. Its folder is made if it does not exist.

    The file gets the mode of the file that it replaces, or the mode of any new file. Any number of processes may write
    to one path: the last one wins. The next process removes what a killed process has left behind.

    Raises `UserError`, which ends in `more`, for an error of the system outside the block. Errors in the block pass
    unchanged; :func:`writing` within it names the file. In both cases the old content of `out` stays.
    """
    _check_kind(out, "the path")
    with writing(out, more):
        real = Path(os.path.realpath(out))  # a link stays one
        real.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{real.name[:100]}."
        _remove_left(real.parent, prefix)
        folder = Path(tempfile.mkdtemp(_SCRATCH, prefix, real.parent))
    try:
        with _held(folder):
            with writing(out, more):
                scratch = folder / "file"
                scratch.touch()
                mode = (real if real.exists() else scratch).stat().st_mode & 0o777
            yield scratch
            with writing(out, more):
                with scratch.open("rb+") as file:
                    os.fsync(file.fileno())
                scratch.chmod(mode)
                os.replace(scratch, real)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    with writing(out, more):
        sync_folder(real.parent)


def lock(file: Any, path: Path) -> None:
    """Keeps an open file for this process; `path` is what to call it. Raises `UserError` if another has it."""
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{path}: another process is writing to it") from None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps a folder, or an empty file that is there meanwhile, for this process. Raises what :func:`lock` does."""
    folder = path.is_dir()
    with writing(path):
        handle = os.open(path, os.O_RDONLY if folder else os.O_RDWR | os.O_CREAT, 0o644)
    try:
        lock(handle, path)
        try:
            yield
        finally:
            if not folder:
                path.unlink(missing_ok=True)
    finally:
        os.close(handle)


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Locks a folder for this process, as long as the block runs; False if another process holds it, or none can."""
    try:
        handle = None if fcntl is None else os.open(folder, os.O_RDONLY)
    except OSError:
        handle = None
    try:
        yield handle is not None and _try_lock(handle)
    finally:
        if handle is not None:
            os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process holds it, or the file system has no locks
        return False
    return True


def _remove_left(parent: Path, prefix: str) -> None:
    """Removes the unfinished files of processes that were killed."""
    for folder in parent.glob(f"{glob.escape(prefix)}*{_SCRATCH}"):
        with suppress(OSError):  # it may be gone, or another user's
            if time.time() - folder.stat().st_mtime > _LEFT:
                with _held(folder) as mine:
                    if mine:
                        shutil.rmtree(folder, ignore_errors=True)


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


def _check_folder(folder: Path, out: Path, what: str = "--out") -> None:
    """See :func:`check_folder`; `out` is what to call it."""
    with writing(out):
        there = _nearest(folder)
        if not there.is_dir():
            raise UserError(f"{out}: {there} is no folder; choose another {what}")
        tempfile.TemporaryFile(dir=there).close()
