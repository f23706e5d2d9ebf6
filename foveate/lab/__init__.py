"""What measures: tasks and rows, reports, benches, calibration and tuning of a model.

>>> from foveate import lab
>>> print(lab.check("mine"))  # does a method hold what every method promises?
>>> methods = ["snapkv:top_k=0.25", *lab.sweep("mine", top_k=[0.1, 0.25, 0.5])]
>>> run = lab.compare(model, tokenizer, lab.task("niah:length=4096", DATA), methods)
>>> print(run, run.difference("mine:top_k=0.25", "snapkv"))
>>> run.plot("frontier", "rows.png")
>>> print(lab.time_step(model, ["mine"], tokens=30_000, batch=8))
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foveate.lab.checks import check
    from foveate.lab.comparing import Run, compare, documents, sweep, task
    from foveate.lab.stepping import StepTime, time_step

_MODULES = {"check": "checks", "StepTime": "stepping", "time_step": "stepping"}
__all__ = ["Run", "StepTime", "check", "compare", "documents", "sweep", "task", "time_step"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'foveate.lab' has no attribute {name!r}")
    return getattr(importlib.import_module(f"foveate.lab.{_MODULES.get(name, 'comparing')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
