"""Which layers Kascade chooses keys in: similarity of layers, importance, anchors, head maps, and their artefact.

Nothing here knows a model or a data set: `foveate.lab.evaluation.calibration` reads tasks, an attached model its
prompts.
"""

from foveate.calibration.anchors import (
    BY,
    OVER,
    WEIGHTS,
    AnchorChoice,
    best_anchors,
    check_number,
    choose,
    counterparts,
    grown,
    improved,
    objective,
)
from foveate.calibration.artefact import Calibration, check_facts, kept_folder, load, say_once, shipped
from foveate.calibration.kept import Known, kept_name, kept_path, known
from foveate.calibration.similarity import Measured, Similarity, least_tokens

__all__ = [
    "BY",
    "OVER",
    "WEIGHTS",
    "AnchorChoice",
    "Calibration",
    "Known",
    "Measured",
    "Similarity",
    "best_anchors",
    "check_facts",
    "check_number",
    "choose",
    "counterparts",
    "grown",
    "improved",
    "kept_folder",
    "kept_name",
    "kept_path",
    "known",
    "least_tokens",
    "load",
    "objective",
    "say_once",
    "shipped",
]
