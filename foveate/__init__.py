"""foveate: long-context inference that looks closely only where it matters.

>>> import foveate
>>> foveate.attach(model)  # chooses a method, or: foveate.attach(model, "luka")
>>> model.generate(**inputs)
>>> print(foveate.stats(model))
>>> foveate.detach(model)

What attaches and serves is here. :mod:`foveate.lab` measures and :mod:`foveate.hybrids` trains; neither is loaded.
"""

import importlib
from typing import TYPE_CHECKING, Any

from foveate import errors

errors.show_plainly()

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


def __getattr__(name: str) -> Any:
    """Import what is used when it is used: torch and Transformers take seconds, `foveate --help` should not."""
    if name not in __all__:
        raise AttributeError(f"module 'foveate' has no attribute {name!r}")
    module = importlib.import_module(_HOME.get(name, "foveate.integrations.transformers"))
    return module if name == "methods" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
