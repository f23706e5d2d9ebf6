"""foveate: long-context inference that looks closely only where it matters.

>>> import foveate
>>> foveate.attach(model)  # chooses a method, or: foveate.attach(model, "luka")
>>> model.generate(**inputs)
>>> print(foveate.stats(model))
>>> foveate.detach(model)

What attaches and serves is here. :mod:`foveate.lab` measures and :mod:`foveate.hybrids` trains; neither is loaded.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from foveate import methods
    from foveate.integrations.transformers import (
        Attachment,
        Cache,
        Stats,
        attach,
        attached,
        detach,
        load_cache,
        save_cache,
        stats,
    )
    from foveate.integrations.transformers.conversation import ask
    from foveate.methods import Method, per_layer

__all__ = [
    "Attachment",
    "Cache",
    "Method",
    "Stats",
    "ask",
    "attach",
    "attached",
    "detach",
    "load_cache",
    "methods",
    "per_layer",
    "save_cache",
    "stats",
]

_HOME = {
    "ask": "foveate.integrations.transformers.conversation",
    "methods": "foveate.methods",
    "Method": "foveate.methods",
    "per_layer": "foveate.methods",
}

_MOVED = {
    **{old: f"foveate.lab.{old}" for old in ("bench", "evaluation", "inputs", "report", "results")},
    **{old: f"foveate.hybrids.{old}" for old in ("models", "training")},
    "layers": "foveate.hybrids.layers, and its csa foveate.csa",
}


class _Moved:
    """Says where a package that is no longer below `foveate` is now."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        package, _, old = name.rpartition(".")
        if package == "foveate" and old in _MOVED:
            raise ImportError(f"{name} is now {_MOVED[old]}", name=name)


sys.meta_path.insert(0, _Moved)  # before an empty folder is taken for the package


def __getattr__(name: str) -> Any:
    """Import what is used when it is used: torch and Transformers take seconds, `foveate --help` should not."""
    if name not in __all__:
        raise AttributeError(f"module 'foveate' has no attribute {name!r}")
    module = importlib.import_module(_HOME.get(name, "foveate.integrations.transformers"))
    return module if name == "methods" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
