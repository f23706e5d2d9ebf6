"""Layers of a method that do the same, of which one is timed for all."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

from foveate.methods import Method, sparse_prompt


class Kind(NamedTuple):
    """Layers of a method that do the same."""

    name: str
    number: int
    policy: Method
    chooser: Method | None
    """The policy of the layer whose choice these read."""


def in_prompt(policy: Method) -> str:
    """What a layer does with a prompt, in a word."""
    if not sparse_prompt(policy):
        return "dense" if policy.observation is None else "dense, learning"
    return policy.role.name


def kinds(method: Method, layers: int, name: Callable[[Method], str] = attrgetter("role.name")) -> list[Kind]:
    """What the layers of a method do, by name, and how many do the same; by default with a decoded token."""
    policies = [method.for_layer(layer, layers) for layer in range(layers)]
    alike: dict[tuple[str, str], list[int]] = {}
    for layer, policy in enumerate(policies):
        alike.setdefault((policy.spec, name(policy)), []).append(layer)
    found = []
    for same in alike.values():
        policy = policies[same[-1]]  # of layers that read, one after all that choose
        chooser = None if policy.role.reads_choice_of is None else policies[policy.role.reads_choice_of]
        found.append(Kind(name(policy), len(same), policy, chooser))
    return found
