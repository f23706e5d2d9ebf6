"""Layers of a method that do the same, of which one is timed for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from foveate.methods import Method


class Kind(NamedTuple):
    """Layers of a method that do the same."""

    name: str
    number: int
    policy: Method
    chooser: Method | None
    """The policy of the layer whose choice these read."""


def in_decode(policy: Method) -> str:
    """What a layer does with a decoded token, in a word."""
    place = getattr(policy, "place", None)
    if place is None:
        return "dense" if policy.name == "dense" or getattr(policy, "dense", False) else policy.name
    if place.reads_another:
        return "reading"
    if place.anchor is None or (place.dense and not place.has_readers):
        return "dense"
    return "dense, choosing" if place.dense else "choosing"


def in_prompt(policy: Method) -> str:
    """What a layer does with a prompt, in a word."""
    if not policy.sparse_prompt:
        return "dense" if policy.observation is None else "dense, learning"
    place = getattr(policy, "place", None)
    if place is not None and place.chooses and not place.has_readers and getattr(policy, "exact_anchors", False):
        return "dense"  # it would choose for nobody
    return in_decode(policy)


def kinds(method: Method, layers: int, name: Callable[[Method], str] = in_decode) -> list[Kind]:
    """What the layers of a method do, and how many do the same."""
    policies = [method.for_layer(layer, layers) for layer in range(layers)]
    alike: dict[tuple[str, str], list[int]] = {}
    for layer, policy in enumerate(policies):
        alike.setdefault((policy.spec, name(policy)), []).append(layer)
    found = []
    for same in alike.values():
        policy = policies[same[-1]]  # of layers that read, one behind all that choose
        place = getattr(policy, "place", None)
        reads = place is not None and place.reads_another
        found.append(Kind(name(policy), len(same), policy, policies[place.anchor] if reads else None))
    return found
