"""The methods by name: one short file each, found by being here."""

import importlib
import pkgutil

from foveate.methods.auto import Auto
from foveate.methods.base import REGISTRY, Method, Observation, Replay, replay_obstacle
from foveate.methods.budgets import budget
from foveate.methods.dense import Dense
from foveate.methods.h2o import H2O
from foveate.methods.h2o_as_published import H2OAsPublished
from foveate.methods.luka import LuKA, LuKAPaper
from foveate.methods.per_layer import Mixed, PerLayer, per_layer
from foveate.methods.shared_prompt import SharedPrompt
from foveate.methods.snapkv import SnapKV
from foveate.methods.spec import (
    check_made_for,
    get,
    make,
    names,
    parse,
    spelled,
)
from foveate.methods.streaming import Streaming
from foveate.methods.tova import TOVA
from foveate.methods.uniform import Uniform

__all__ = [
    "H2O",
    "REGISTRY",
    "TOVA",
    "Auto",
    "Dense",
    "H2OAsPublished",
    "LuKA",
    "LuKAPaper",
    "Method",
    "Mixed",
    "Observation",
    "PerLayer",
    "Replay",
    "SharedPrompt",
    "SnapKV",
    "Streaming",
    "Uniform",
    "budget",
    "check_made_for",
    "get",
    "make",
    "names",
    "parse",
    "per_layer",
    "replay_obstacle",
    "spelled",
]

for _module in pkgutil.iter_modules(__path__):  # a new file registers its method
    importlib.import_module(f"{__name__}.{_module.name}")
