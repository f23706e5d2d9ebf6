"""Where calibrations are found by a model's weights: in the user's cache folder, and among those of this package."""

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
        facts: of the model's shape, as of :meth:`Calibration.check_model`.
        weights: a fingerprint of the model's weights.
        settings: those that its anchors are for.
    """
    return kept_folder() / f"{_digest([facts.get(key) for key in SHAPE])}{_digest([weights, dict(settings)])}.json"


def kept_name(path: Path) -> str:
    """What a file of the cache folder is called in specs and rows, which name no folder of the user's."""
    return KEPT_AS + path.stem


class Known(NamedTuple):
    """The calibrations that are known for a model's weights."""

    calibrations: list[Calibration]
    """Those that the user has kept, the newest first, then the one that comes with foveate."""
    obstacles: list[str]
    """Why others that are kept are not among them: they are damaged, or for other weights of this shape."""


def known(facts: Mapping[str, Any]) -> Known:
    """The calibrations for a model.

    Args:
        facts: as of :meth:`Calibration.check_model`; without weights of each layer nothing is found.
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
