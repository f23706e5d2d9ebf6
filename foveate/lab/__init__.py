"""What measures: tasks and rows, reports, benches, calibration and tuning of a model.

>>> from foveate import lab
>>> print(lab.check("mine"))  # does a method hold what every method promises?
>>> run = lab.compare(model, tokenizer, lab.task("niah:length=4096"), ["snapkv:top_k=0.25", "mine"], data=DATA)
>>> print(run, run.difference("mine", "snapkv:top_k=0.25"))
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foveate.lab.checks import check
    from foveate.lab.comparing import Run, compare, documents, task

__all__ = ["Run", "check", "compare", "documents", "task"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'foveate.lab' has no attribute {name!r}")
    return getattr(importlib.import_module(f"foveate.lab.{'checks' if name == 'check' else 'comparing'}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
