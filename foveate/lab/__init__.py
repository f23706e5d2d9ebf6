"""What measures: tasks and rows, reports, benches, calibration and tuning of a model.

>>> from foveate import lab
>>> print(lab.check("mine"))  # does a method hold what every method promises?
>>> run = lab.compare(model, tokenizer, lab.task("niah:length=4096"), ["snapkv:top_k=0.25", "mine"], data=DATA)
>>> print(run, run.difference("mine", "snapkv:top_k=0.25"))
>>> print(lab.time_step(model, ["mine"], tokens=30_000, batch=8))
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foveate.lab.checks import check
    from foveate.lab.comparing import Run, compare, documents, task
    from foveate.lab.stepping import StepTime, time_step

_MODULES = {"check": "checks", "StepTime": "stepping", "time_step": "stepping"}
__all__ = ["Run", "StepTime", "check", "compare", "documents", "task", "time_step"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'foveate.lab' has no attribute {name!r}")
    return getattr(importlib.import_module(f"foveate.lab.{_MODULES.get(name, 'comparing')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
