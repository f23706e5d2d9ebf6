"""Finds calibrations by a model's weights, in the user's cache folder and in this package."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from foveate.calibration.artefact import KEPT_AS, Calibration, kept_folder, load, shipped

SHAPE = ("layers", "heads", "kv_heads", "head_dim")
"""What of a model's architecture a calibration, or a setting that `foveate tune` has found, is for."""


def kept_path(facts: Mapping[str, Any], weights: str, settings: Mapping[str, Any]) -> Path:
    """The file of a calibration in the cache folder.

    Args:
        facts: facts of the model's shape, see :meth:`Calibration.check_model`.
        weights: a fingerprint of the model's weights.
        settings: the settings of Kascade for which its anchors were chosen.
    """
    return kept_folder() / f"{_digest([facts.get(key) for key in SHAPE])}{_digest([weights, dict(settings)])}.json"


def kept_name(path: Path) -> str:
    """The name of a file of the cache folder in specs and rows. It contains no folder of the user."""
    return KEPT_AS + path.stem


class Known(NamedTuple):
    """The calibrations that are known for a model's weights."""

    calibrations: list[Calibration]
    """The calibrations that the user has kept, the newest first, then the calibration that comes with foveate."""
    obstacles: list[str]
    """Why others that are kept are not among them: they are damaged, or for other weights of this shape."""


def known(facts: Mapping[str, Any]) -> Known:
    """The calibrations for a model.

    Args:
        facts: see :meth:`Calibration.check_model`. Nothing is found unless they have the weights of each layer.
    """
    found, obstacles = [], []
    if facts and not all(facts.get("weights") or [None]):
        obstacles.append("the model's weights are not at hand to be compared (quantised, offloaded or adapted)")
        return Known(found, obstacles)
    for path in _newest(facts) if facts else ():
        try:
            one = load(kept_name(path))
            one.check_model(facts)
        except ValueError as error:
            obstacles.append(str(error))
        else:
            found.append(one)
    ours = shipped(facts)
    return Known(found + ([] if ours is None else [ours]), obstacles)


def _newest(facts: Mapping[str, Any]) -> list[Path]:
    """Kept files for models of this shape."""
    try:
        files = kept_folder().glob(f"{_digest([facts.get(key) for key in SHAPE])}*.json")
        return sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:  # no such folder, or one that cannot be read
        return []


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
