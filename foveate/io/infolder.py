"""Folders of models: whether there is one, before anything is imported that takes seconds."""

from __future__ import annotations

from pathlib import Path

from foveate.errors import UserError


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
