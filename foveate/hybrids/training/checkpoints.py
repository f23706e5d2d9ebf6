"""Checkpoints of a training run: complete or not there, checked when they are read, in safetensors and JSON.

A checkpoint is a folder `step-00001500`: the model as a Hugging Face folder (config.json, model.safetensors, the
tokenizer), `optimizer.safetensors` with AdamW's and the feedback's tensors, and `state.json` with the step, the run's
fingerprint and the sha256 of all other files. It is written under another name, brought to the disk and renamed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from foveate.errors import DataError, UserError
from foveate.hybrids.training.journal import LOG
from foveate.io import infile, outfile
from foveate.io.digest import differences, sha256
from foveate.io.json_text import parse_json
from foveate.io.outfile import locked

KIND = "checkpoint of foveate train"
SCHEMA = 1
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
_NAME = re.compile(r"step-(\d{8})")
_UNFINISHED = ".unfinished-"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Snapshot:
    """All of a checkpoint, on the host.

    Attributes:
        step: steps done.
        model: the weights by name, tied ones once.
        optimizer: tensors of the optimiser and of the feedback by name.
        fingerprint: what the curve depends on.
        held_out: loss on the held-out text, if it was measured.
        extra: further JSON values to go on with.
    """

    step: int
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    fingerprint: Mapping[str, Any]
    held_out: float | None = None
    extra: Mapping[str, Any] | None = None


@contextlib.contextmanager
def run_folder(out: Path, resume: bool) -> Iterator[None]:
    """Keeps the folder of a run, which is made if it is not there, for this process.

    Raises `UserError` for a folder that cannot be written to, that another process keeps, or that holds a run unless
    `resume`.
    """
    outfile.check_folder(out)
    if not resume and (folders(out) or (out / LOG).exists()):
        raise UserError(f"{out} holds a run; --resume goes on with it, or choose another --out")
    with outfile.writing(out):
        out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        yield


def folders(out: Path) -> list[Path]:
    """The checkpoints of a run by their steps, whole or damaged."""
    if not out.is_dir():
        return []
    return sorted(path for path in out.iterdir() if path.is_dir() and _NAME.fullmatch(path.name))


def write(out: Path, snapshot: Snapshot, describe: Callable[[Path], None]) -> Path:
    """Writes a checkpoint in one step; `describe` writes configuration and tokenizer into a folder.

    Raises `UserError` if the disk is full or `out` cannot be written to; earlier checkpoints stay.
    """
    from safetensors.torch import save_file

    final = out / f"step-{snapshot.step:08d}"
    folder = out / f"{_UNFINISHED}{final.name}"
    with outfile.writing(final, "; earlier checkpoints are kept"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        describe(folder)
        save_file(dict(snapshot.model), folder / MODEL, metadata={"format": "pt"})
        save_file(dict(snapshot.optimizer), folder / OPTIMIZER)
        state = {
            "kind": KIND,
            "schema": SCHEMA,
            "step": snapshot.step,
            "held_out": snapshot.held_out,
            "fingerprint": dict(snapshot.fingerprint),
            "extra": dict(snapshot.extra or {}),
            "sha256": {str(path.relative_to(folder)): sha256(path) for path in _files(folder)},
        }
        state["digest"] = _digest(state)
        outfile.write(folder / STATE, (json.dumps(state, indent=1, allow_nan=False) + "\n").encode())
        for path in _files(folder):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        outfile.sync_folder(folder)
        shutil.rmtree(final, ignore_errors=True)  # a damaged one of the same step
        os.replace(folder, final)
        outfile.sync_folder(out)
    return final


def read_state(folder: Path) -> dict[str, Any]:
    """The state of a checkpoint, every file checked. Raises `DataError` that names what is missing or damaged."""
    path = folder / STATE
    try:
        state = parse_json(infile.read(path))
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: damaged ({error})") from None
    if not isinstance(state, dict) or state.get("kind") != KIND or not isinstance(state.get("sha256"), dict):
        raise DataError(f"{path}: not the state of a checkpoint")
    if state.get("schema") != SCHEMA:
        raise DataError(f"{path}: schema {state.get('schema')}, this version reads {SCHEMA}")
    if state.pop("digest", None) != _digest(state):
        raise DataError(f"{path}: damaged (its digest is not that of its content)")
    for name, digest in state["sha256"].items():
        if not (folder / name).is_file():
            raise DataError(f"{folder / name}: no such file")
        if sha256(folder / name) != digest:
            raise DataError(f"{folder / name}: damaged (its sha256 is not that in {STATE})")
    return state


def newest(out: Path, say: Say) -> tuple[Path, dict[str, Any]] | None:
    """The newest whole checkpoint and its state; None if the run has none at all.

    Each damaged one is named by `say`, and the one before it taken. What an interrupted write left is removed. Raises
    `DataError` if all are damaged.
    """
    for path in out.glob(f"{_UNFINISHED}*"):
        say(f"{path.name.removeprefix(_UNFINISHED)} was interrupted while it was written; it is removed")
        shutil.rmtree(path)
    found = folders(out)
    for folder in reversed(found):
        try:
            return folder, read_state(folder)
        except DataError as error:
            say(f"{error}; the checkpoint before {folder.name} is used")
    if found:
        raise DataError(f"{out}: all {len(found)} checkpoints are damaged; move them away to start anew")
    return None


def read_tensors(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of the model and of the optimiser."""
    from safetensors.torch import load_file

    return load_file(folder / MODEL), load_file(folder / OPTIMIZER)


def check_fingerprint(folder: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raises `UserError`, naming what differs, if a checkpoint belongs to a run with other settings."""
    if differ := differences(theirs, ours):
        raise UserError(f"{folder}: of a run with other settings: {differ}. Choose another --out, or the same settings")


def prune(out: Path, keep: int) -> None:
    """Removes all checkpoints but the newest `keep` and the one of the lowest held-out loss."""
    found = folders(out)
    losses = {}
    for folder in found:
        try:
            losses[folder] = parse_json(infile.read(folder / STATE)).get("held_out")
        except (OSError, ValueError):  # damaged: it goes when its turn comes
            losses[folder] = None
    measured = [folder for folder in found if losses[folder] is not None]
    best = min(measured, key=lambda folder: losses[folder], default=None)
    for folder in found[:-keep]:
        if folder != best:
            shutil.rmtree(folder)


def _digest(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
