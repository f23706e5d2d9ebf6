"""Folders of models: whether there is one, its config.json and its weights' files, without torch and Transformers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from foveate.errors import UserError
from foveate.io import infile
from foveate.io.json_text import parse_json

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHT_NAMES = f"{_SINGLE} or {_INDEX}"
NO_WEIGHTS = f"no weights in the model folder ({WEIGHT_NAMES})"


def check_model_folder(folder: Path) -> None:
    """Raises `UserError` unless a folder exists and has a config.json."""
    if not folder.is_dir():
        hint = ""
        if folder.name == "smollm2-135m":
            hint = f" (foveate fetch {folder.name} --out {folder} makes one)"
        elif len(folder.parts) == 2 and not folder.parent.is_dir():  # as the hub names models
            hint = f" (to use a model of the Hugging Face hub: hf download {folder} --local-dir DIR, and give DIR)"
        raise UserError(f"{folder}: no such model folder{hint}")
    if not (folder / "config.json").exists():
        raise UserError(f"{folder}: not a model folder (no config.json)")


def config_of(folder: Path) -> dict[str, Any]:
    """A model folder's config.json.

    Raises:
        UserError: for a folder or file that is not there, and for a file that is no JSON object.
    """
    check_model_folder(folder)
    path = folder / "config.json"
    try:
        config = parse_json(infile.read(path, infile.MOST_OF_SETTINGS))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: malformed JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: expected an object")
    return config


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that Transformers loads from a model folder, sorted; none where it holds none.

    Raises `UserError` for an index that is damaged or names files that are missing or outside the folder, and for an
    adapter, which Transformers would load on top of them.
    """
    folder = Path(folder)
    if (adapter := folder / "adapter_config.json").exists():
        raise UserError(f"{adapter}: adapters are not loaded; merge it into the model and save that")
    if (single := folder / _SINGLE).is_file():
        return [single]
    if not (index := folder / _INDEX).is_file():
        return []
    try:
        names = set(parse_json(infile.read(index, infile.MOST_OF_SETTINGS))["weight_map"].values())
        files = sorted(folder / name for name in names)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{index}: not an index of weights ({type(error).__name__}: {error})") from None
    for file in files:
        if not Path(os.path.abspath(file)).is_relative_to(os.path.abspath(folder)):
            raise UserError(f"{index}: names {str(file)!r}, which is outside the model folder")
        if not file.is_file():
            raise UserError(f"{index}: names {file.name!r}, which is missing")
    return files
