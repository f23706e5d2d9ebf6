"""The configurations of an attached model: copies that name another attention implementation, until it is detached."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import transformers
from torch import nn


class Configurations:
    """Stands in for the configurations of some modules, which other models may share.

    The copies are shallow: what is not set anew stays shared. What was set anew in a copy is set in its original, too,
    when that returns.
    """

    def __init__(self):
        self._replaced: list[tuple[transformers.PreTrainedConfig, transformers.PreTrainedConfig, dict[str, Any]]] = []
        """Each original with its copy, and what the copy held at first."""

    def replace(self, modules: Iterable[nn.Module], implementation: str) -> None:
        """Give the modules copies of their configurations, one of each, with this attention implementation."""
        own = [one for module in modules if (one := _configuration(module)) is not None]
        own += [one.get_text_config(decoder=True) for one in own]
        originals = {id(one): one for one in own}
        copies = {key: copy.copy(one) for key, one in originals.items()}
        for key, given in copies.items():
            inner = {name: copies[id(value)] for name, value in given.__dict__.items() if id(value) in copies}
            given.__dict__.update(inner, _attn_implementation_internal=implementation)
            self._replaced.append((originals[key], given, dict(given.__dict__)))
        for module in modules:
            if id(_configuration(module)) in copies:
                module.config = copies[id(module.config)]

    def restore(self, modules: Iterable[nn.Module]) -> None:
        """Give the modules their configurations back, with what has changed since :meth:`replace`."""
        originals = {id(given): own for own, given, _ in self._replaced}
        for own, given, before in self._replaced:
            now = given.__dict__
            for name in [name for name in before if name not in now]:
                own.__dict__.pop(name, None)
            for name, value in now.items():
                if name not in before or (value is not before[name] and value != before[name]):
                    own.__dict__[name] = originals.get(id(value), value)
        for module in modules:
            if id(_configuration(module)) in originals:
                module.config = originals[id(module.config)]
        self._replaced.clear()


def _configuration(module: nn.Module) -> transformers.PreTrainedConfig | None:
    own = module.__dict__.get("config")
    return own if isinstance(own, transformers.PreTrainedConfig) else None
