"""One dense prompt for several methods: its keys and values are kept once, beside what each method learns from it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from foveate import ops
from foveate.methods.base import Method, Observation, sparse_prompt
from foveate.state import Channel, Geometry, SlotCache


@dataclass(frozen=True)
class SharedPrompt(Method):
    """Reads a prompt on behalf of methods whose own prompts are dense; each then goes on from a branch of the cache.

    Methods with the same :attr:`~Method.observation` learn the same, which is computed and kept once.

    Raises:
        ValueError: for a method that is sparse in prefill.
    """

    methods: tuple[Method, ...] = ()

    def __post_init__(self):
        for method in self.methods:
            if sparse_prompt(method):
                raise ValueError(f"{method.spec} is sparse in prefill: its prompt is no other method's")

    @functools.cached_property
    def spec(self) -> str:
        return " + ".join(method.spec for method in self.methods)

    def for_model(self, facts: Callable[[], Mapping[str, Any]]) -> SharedPrompt:
        return SharedPrompt(tuple(method.for_model(facts) for method in self.methods))

    def for_layer(self, layer: int, num_layers: int, among: Sequence[int] | None = None) -> SharedPrompt:
        return SharedPrompt(tuple(method.for_layer(layer, num_layers, among) for method in self.methods))

    @property
    def needs_rotary(self) -> bool:  # type: ignore[override]
        return any(method.needs_rotary for method in self.methods)

    @property
    def observers(self) -> list[Method]:
        """One method for each distinct observation."""
        chosen = {method.observation: method for method in self.methods if method.observation is not None}
        return list(chosen.values())

    def channels(self, geometry: Geometry) -> dict[str, Channel]:
        return {
            f"{index}.{name}": spec
            for index, observer in enumerate(self.observers)
            for name, spec in _learnt(observer, geometry).items()
        }

    @property
    def observation(self) -> Observation:
        return Observation(self, any(observer.observation.needs_lse for observer in self.observers))

    def observe(self, cache: SlotCache, q: Tensor, attended: ops.Attended, scaling: float) -> None:
        for observer in self.observers:
            try:
                observer.observe(_part(cache, self.filled(observer, cache.geometry)), q, attended, scaling)
            except KeyError as error:
                spec = observer.channels(cache.geometry).get(error.args[0])
                if not getattr(spec, "recomputed", False):
                    raise
                raise ValueError(
                    f"{type(observer).__name__}.observe fills the channel {error.args[0]!r}, which is declared as "
                    "recomputed; leave recomputed=True away, or fill the channel in prompt_packed"
                ) from None

    def choose(self, cache: SlotCache, q: Tensor, scaling: float) -> ops.Choice | None:
        raise ValueError("a prompt was read for several methods, and none of them decodes on its cache: take a branch")

    def filled(self, method: Method, geometry: Geometry) -> dict[str, str]:
        """The channels that hold what a method has learnt: from the method's own channel names to the names here.

        Raises:
            ValueError: for a method for which the prompt was not read, unless it learns nothing from a dense prompt.
        """
        if method.observation is None and not sparse_prompt(method):
            return {}
        if method not in self.methods:
            raise ValueError(f"{method.spec} is not among the methods that the prompt was read for: {self.spec}")
        observers = self.observers
        index = [observer.observation for observer in observers].index(method.observation)
        alike = _learnt(observers[index], geometry).items() & _learnt(method, geometry).items()
        return {name: f"{index}.{name}" for name, _ in alike}


def _part(cache: SlotCache, names: Mapping[str, str]) -> SlotCache:
    """A view of a cache that has some of its channels under other names.

    Args:
        names: for each channel name in the view, the name in ``cache``.
    """
    one = copy.copy(cache)
    one.specs = {name: cache.specs[here] for name, here in names.items()}
    one.tensors = {name: cache.tensors[here] for name, here in names.items()}
    one.rows = {name: list(numbers) for name, numbers in cache.rows.items()}
    return one


def _learnt(method: Method, geometry: Geometry) -> dict[str, Channel]:
    """The channels that a prompt can fill. The other channels are written after the prompt, before they are read."""
    channels = method.channels(geometry)
    return {name: spec for name, spec in channels.items() if isinstance(spec, Channel) and not spec.recomputed}
