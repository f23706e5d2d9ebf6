"""The folder of partial results that a calibration keeps beside its artefact until it is complete."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from foveate.errors import UserError
from foveate.io import infile, outfile
from foveate.io.json_text import parse_json

_RUN = "run.json"
GOES_ON = "what was measured before is kept, and the same command goes on from there"


def partial_folder(out: Path) -> Path:
    """Where what each prompt has shown is kept until the artefact is written."""
    return out.with_name(out.name + ".partial")


def take_up(folder: Path, mark: dict[str, Any]) -> IO[bytes]:
    """Makes the folder of partial results, or takes up one of the same run; open for as long as it is written to."""
    path = folder / _RUN
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            if any(not one.name.startswith(f".{_RUN}.") for one in folder.iterdir()):  # which a killed run may leave
                raise UserError(f"{folder}: not a folder of partial results; choose another --out")
            outfile.write(path, json.dumps(mark).encode())
        content = infile.read(path, infile.MOST_OF_SETTINGS)
        file = path.open("rb")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written to ({error.strerror or error})") from None
    try:
        theirs = dict(parse_json(content))
    except (ValueError, TypeError):  # no JSON, or no object
        raise UserError(f"{path}: damaged; remove the folder to start anew") from None
    differ = differing(mark, theirs)
    if differ:
        raise UserError(
            f"{folder} belongs to another calibration (it differs in {', '.join(differ)}); choose another --out, or "
            "remove it to start anew"
        )
    outfile.lock(file, folder)
    return file


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """The names under which two records hold different values, or one of them none."""
    return [key for key in dict.fromkeys([*ours, *theirs]) if ours.get(key) != theirs.get(key)]


def write(path: Path, shown: dict[str, torch.Tensor], start: float, how: str = "") -> None:
    """A file of partial results, in one step, with the seconds since `start`, and how it was made.

    Raises `UserError` if it cannot be written.
    """
    kept = {**shown, "seconds": torch.tensor(time.perf_counter() - start)}
    outfile.write(path, save(kept, {"how": how}), f"; {GOES_ON}")


def made_how(path: Path) -> str | None:
    """How a file of partial results was made; None if it is damaged."""
    with contextlib.suppress(SafetensorError, OSError), safe_open(path, "pt") as file:
        return (file.metadata() or {}).get("how", "")
    return None


def drop_others(paths: Iterable[Path], how: str) -> None:
    """Removes files that were made under other settings, as after a batch that did not fit into memory."""
    for path in paths:
        if made_how(path) not in (how, None):
            path.unlink()


def read(path: Path, *names: str) -> list[torch.Tensor]:
    """The tensors ``names`` of a file. Raises `UserError` for a damaged file."""
    try:
        with safe_open(path, "pt") as file:
            return [file.get_tensor(name) for name in names]
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: damaged ({error}); remove it, and the same command makes it again") from None
