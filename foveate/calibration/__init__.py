"""What a method knows of one model, in files: Kascade's anchors and head maps, and learned scores of eviction.

`foveate.lab.evaluation.calibration` measures and chooses anchors; :mod:`~foveate.calibration.kept` finds those that are
kept or shipped for a model's weights.
"""

from foveate.calibration.artefact import Calibration, check_facts, kept_folder, load, say_once, shipped
from foveate.calibration.kept import Known, kept_name, kept_path, known

__all__ = [
    "Calibration",
    "Known",
    "check_facts",
    "kept_folder",
    "kept_name",
    "kept_path",
    "known",
    "load",
    "say_once",
    "shipped",
]
