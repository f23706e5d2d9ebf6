"""The one reader of files: it reads only regular files, and only up to a largest number of bytes."""

from __future__ import annotations

import errno
import lzma
import os
import stat
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from foveate.errors import DataError, FoveateWarning, UserError

MOST = 1 << 34
"""Bytes of the largest file that is read as a whole, and the most bytes that a compressed file may unpack to."""
MOST_OF_SETTINGS = 1 << 26
"""Bytes of the largest file of settings, such as a calibration."""
_BLOCK = 1 << 20
_NAMED = 5  # files at most that a message names


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A regular file, open for reading. It never waits, not even for the writer of a pipe.

    Raises `OSError`, whose `strerror` gives the reason, for a path that is no regular file or cannot be opened.
    """
    _check_kind(path, os.stat(path))  # opening a device may already do something
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(handle, "rb") as file:
        _check_kind(path, os.fstat(handle))
        yield file


def read(path: str | os.PathLike[str], most: int = MOST) -> bytes:
    """The content of a regular file. Raises `OSError` as :func:`opened` does, and for more than `most` bytes."""
    with opened(path) as file:
        return _bounded(path, iter(lambda: file.read(_BLOCK), b""), most)


def decompressed(path: Path, content: bytes, most: int = MOST) -> bytes:
    """What an .xz file's content holds. Raises `DataError` for a damaged one, and for more than `most` bytes."""

    def pieces() -> Iterator[bytes]:
        rest = content
        while rest:
            stream = lzma.LZMADecompressor()
            piece = stream.decompress(rest, _BLOCK)
            while piece or not (stream.eof or stream.needs_input):
                yield piece
                piece = b"" if stream.eof else stream.decompress(b"", _BLOCK)
            if not stream.eof:
                raise lzma.LZMAError("it ends before its end mark")
            rest = stream.unused_data.lstrip(b"\0")  # padding between streams

    try:
        return _bounded(path, pieces(), most)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except lzma.LZMAError as error:
        raise DataError(f"{path}: damaged .xz file ({error})") from None


def check(path: Path) -> None:
    """Raises `UserError` if there is no regular file at `path`, or it cannot be read; does not wait for a pipe."""
    try:
        with opened(path):
            pass
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None


@contextmanager
def plainly_named(path: str | os.PathLike[str]) -> Iterator[str]:
    """A name of a regular file for a library that takes only names of UTF-8: its own if it is such a name.

    Raises `OSError` as :func:`opened` does.
    """
    with opened(path) as file:
        try:
            os.fspath(path).encode()
            yield os.fspath(path)
        except UnicodeEncodeError:
            yield f"/dev/fd/{file.fileno()}"


def warn_of_unread(folder: Path, names: Sequence[str], kinds: Sequence[str]) -> None:
    """Warns of the files of a folder that are not read because they are of no such kind, if there are any."""
    if names:
        more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
        found = ", ".join(sorted(names)[:_NAMED]) + more
        warnings.warn(
            f"{folder}: {len(names):,} left out, of none of the kinds {', '.join(kinds)}: {found}",
            FoveateWarning,
            stacklevel=2,
        )


def _check_kind(path: str | os.PathLike[str], found: os.stat_result) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "is a folder, not a file", str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "is a device, pipe or socket, not a file", str(path))


def _bounded(path: str | os.PathLike[str], pieces: Iterator[bytes], most: int) -> bytes:
    found, size = [], 0
    for piece in pieces:
        found.append(piece)
        size += len(piece)
        if size > most:
            raise OSError(errno.EFBIG, f"holds more than {most:,} bytes", str(path))
    return b"".join(found)
