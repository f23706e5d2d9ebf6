"""The methods by name. Each method is one short file of this folder; a file here registers its method on import.

``__all__`` lists what the author of a method needs. The other modules of foveate use the remaining names.
"""

import importlib
import pkgutil

from foveate.methods._common import note_queries, recent, window_votes
from foveate.methods._settings import settings_of as settings_of
from foveate.methods.auto import Auto as Auto
from foveate.methods.base import REGISTRY as REGISTRY
from foveate.methods.base import About, Method, Observation, Replay, Role, register, setting
from foveate.methods.base import check_artefacts as check_artefacts
from foveate.methods.base import replay_obstacle as replay_obstacle
from foveate.methods.base import sparse_prompt as sparse_prompt
from foveate.methods.bases import KeepsByScore, ReadsChosen
from foveate.methods.budgets import budget, clamp
from foveate.methods.dense import Dense as Dense
from foveate.methods.per_layer import per_layer as per_layer
from foveate.methods.shared_prompt import SharedPrompt as SharedPrompt
from foveate.methods.spec import check_made_for as check_made_for
from foveate.methods.spec import get as get
from foveate.methods.spec import make as make
from foveate.methods.spec import names as names
from foveate.methods.spec import parse as parse
from foveate.methods.spec import respelled as respelled
from foveate.methods.spec import spelled as spelled
from foveate.ops import Choice, Rotary
from foveate.state import Channel, Evicts, Geometry, RowNumber, SlotCache

__all__ = [
    "About",
    "Channel",
    "Choice",
    "Evicts",
    "Geometry",
    "KeepsByScore",
    "Method",
    "Observation",
    "ReadsChosen",
    "Replay",
    "Role",
    "Rotary",
    "RowNumber",
    "SlotCache",
    "budget",
    "clamp",
    "note_queries",
    "recent",
    "register",
    "setting",
    "window_votes",
]

for _module in pkgutil.iter_modules(__path__):  # a new file registers its method
    importlib.import_module(f"{__name__}.{_module.name}")
