"""What a method knows of one model, in files: Kascade's anchors and head maps, and learned scores of eviction.

`foveate.lab.evaluation.calibration` measures and chooses anchors. :mod:`~foveate.calibration.kept` finds the
calibrations that the user has kept, or that come with foveate, for a model's weights.
"""

from foveate.calibration.artefact import Calibration as Calibration
from foveate.calibration.artefact import check_facts as check_facts
from foveate.calibration.artefact import kept_folder as kept_folder
from foveate.calibration.artefact import load as load
from foveate.calibration.artefact import say_once as say_once
from foveate.calibration.artefact import shipped as shipped
from foveate.calibration.kept import Known as Known
from foveate.calibration.kept import kept_name as kept_name
from foveate.calibration.kept import kept_path as kept_path
from foveate.calibration.kept import known as known
