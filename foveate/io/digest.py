"""How a run is known again: by digests of its files, and by a fingerprint, a mapping of JSON values."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foveate.errors import DataError
from foveate.io import infile

_BLOCK = 1 << 22


def sha256(path: Path) -> str:
    """Hex digest of a file's content, read a piece at a time."""
    total = hashlib.sha256()
    with infile.opened(path) as file:
        while block := file.read(_BLOCK):
            total.update(block)
    return total.hexdigest()


def digest(paths: list[Path]) -> str:
    """sha256 (first 16 hex digits) over the names and contents of files, independent of the folder's path."""
    total = hashlib.sha256()
    for path in paths:
        try:
            with infile.opened(path) as file:
                total.update(f"{Path(path).name}\0{os.fstat(file.fileno()).st_size}\0".encode())
                while block := file.read(_BLOCK):
                    total.update(block)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}") from None
    return total.hexdigest()[:16]


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """The fields in which two fingerprints of runs differ, the first of them as it was read, in words; or nothing."""
    ours = json.loads(json.dumps(dict(ours)))
    fields = [key for key in dict.fromkeys([*theirs, *ours]) if theirs.get(key) != ours.get(key)]
    return "; ".join(f"{key} is {theirs.get(key)!r} there, {ours.get(key)!r} here" for key in fields)
