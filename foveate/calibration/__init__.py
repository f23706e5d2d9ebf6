"""Which layers Kascade chooses keys in: similarity of layers, importance, anchors, head maps, and their artefact.

Nothing here knows a model or a data set: `foveate.evaluation.calibration` reads tasks, an attached model its prompts.
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
from foveate.calibration.artefact import Calibration, check_facts, load, say_once, shipped
from foveate.calibration.similarity import Measured, Similarity, least_tokens

__all__ = [
    "BY",
    "OVER",
    "WEIGHTS",
    "AnchorChoice",
    "Calibration",
    "Measured",
    "Similarity",
    "best_anchors",
    "check_facts",
    "check_number",
    "choose",
    "counterparts",
    "grown",
    "improved",
    "least_tokens",
    "load",
    "objective",
    "say_once",
    "shipped",
]
