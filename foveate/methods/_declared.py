"""Checks of the facts that an author's class declares: each error is one sentence with class, hook and remedy.

The checks skip foveate's own classes, which the matrix tests.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from typing import Any

from foveate.state import Evicts

_NAME = re.compile(r"[A-Za-z_][\w-]*")
_RESERVED = ("own",)
"""Names that no method may have, because commands use them for something else."""
_NEAR = 0.85
_GONE = {
    "decode": "choose, which returns what one token a row reads, and learn, which gets its attention",
    "decode_dense": "note_newest, which every step calls, and nothing else: dense steps are the runtime's",
}
"""Hooks of earlier versions, and the hooks that replaced them."""


def check_names(cls: type, base: type) -> None:
    """Check, when a class is made, that its name is valid and that `base` has its hooks. Raises ValueError."""
    if _own(cls):
        return
    name = cls.__dict__.get("name", "unnamed")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _RESERVED:
        raise ValueError(
            f"{cls.__name__}.name must be of letters, digits, _ and -, and not {' or '.join(_RESERVED)}; it is {name!r}"
        )
    if not isinstance(cls.about, type(base.about)):
        raise ValueError(f"{cls.__name__}.about must be About(...), not {cls.about!r}")
    if cls.evicts is Evicts.UNEVENLY:
        raise ValueError(f"{cls.__name__}.evicts says how, and not when: write Evicts.AT_PROMPT_END | Evicts.UNEVENLY")
    hooks = [hook for hook in dir(base) if not hook.startswith("_")]
    for given, value in cls.__dict__.items():
        if given.startswith("_") or given in hooks or isinstance(value, dataclasses.Field):
            continue
        if given in _GONE:
            raise ValueError(f"{cls.__name__}.{given} is no hook any more: define {_GONE[given]}")
        if given in vars(base.about):
            raise ValueError(f"{cls.__name__}.{given} is a part of about: write about = About({given}=...)")
        if near := difflib.get_close_matches(given.lower(), hooks, 1, _NEAR):
            raise ValueError(
                f"{cls.__name__}.{given} is no hook: did you mean {near[0]}? Begin the name of a helper with _"
            )


@functools.cache
def check_class(cls: type, base: type) -> None:
    """Check, when a method is chosen, that it is a dataclass with a name of its own. Raises ValueError."""
    if _own(cls):
        return
    name = cls.__name__
    if "name" not in cls.__dict__:
        raise ValueError(f'{name} has no name: give it one of its own, such as name: ClassVar[str] = "{name.lower()}"')
    if "__dataclass_params__" not in cls.__dict__:
        raise ValueError(f"{name} is no dataclass: write @register above it")
    for field in dataclasses.fields(cls):
        if hasattr(base, field.name) and "help" not in field.metadata:
            raise ValueError(f"{name}.{field.name} is declared as a setting: annotate it with ClassVar")


def check_hooks(method: Any, base: type) -> None:
    """Check, for a layer, that a method defines the hooks that its declarations require. Raises ValueError."""
    cls = type(method)
    if _own(cls):
        return
    check_class(cls, base)
    policy = ("choose", "prompt", "prompt_end", "evict")
    inherited = any(_own(one) and one.__dict__.get("name") for one in cls.__mro__)  # from a method of foveate
    if not inherited and all(getattr(cls, hook) is getattr(base, hook) for hook in policy):
        raise ValueError(
            f"{cls.__name__} neither chooses what is read nor evicts: define choose(self, cache, q, scaling), which "
            "returns a bool mask of the keys that one token a row reads, or prompt_end"
        )
    if method.evicts.in_decode and cls.evict is base.evict:
        raise ValueError(f"{cls.__name__}.evicts says IN_DECODE: define evict(self, cache, scaling)")


def _own(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "foveate"
