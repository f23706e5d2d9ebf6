"""Different methods in different layers, and the LuKA paper's mixed mode."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from foveate.methods._settings import settings_of
from foveate.methods.base import About, Method, Replay, register, setting
from foveate.methods.spec import keep_made_for, make


@dataclass(frozen=True)
class _OfLayers(Method):
    """Methods of different layers, whose declared facts hold for all of these methods together."""

    @property
    def _specs(self) -> Sequence[str]:
        """The specs of the methods."""
        raise NotImplementedError

    @functools.cached_property
    def _methods(self) -> list[Method]:
        return [make(spec) for spec in self._specs]

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        return any(one.stateful for one in self._methods)

    @functools.cached_property
    def replay(self) -> Replay | None:  # type: ignore[override]
        return Replay.of_all([one.replay for one in self._methods])

    def prompt_tile(self, group: int) -> int | None:
        tiles = {one.prompt_tile(group) for one in self._methods} - {0}
        return 0 if not tiles else None if None in tiles else math.lcm(*tiles)


@register
class PerLayer(_OfLayers):
    """A method for each layer: ``{"0-7": "h2o", "8-27": "luka:top_k=3", "-8--1": "h2o"}``.

    Keys are a layer, a range with both ends included, or "rest"; negative numbers count from the last layer.
    """

    name: ClassVar[str] = "per_layer"
    about: ClassVar[About] = About(
        "LuKA, section 3.3",
        example='per_layer:layers={"0-1":"dense","rest":"pages"}',
        full_budget={"layers": {"0": "dense", "rest": "luka:top_k=1.0,expand=1.0"}},
        small_budget={"layers": {"0": "streaming:sinks=2,window=11", "rest": "luka:page_size=4,tail=9,top_k=2"}},
    )

    layers: Any = setting(None, 'method specs by layer, e.g. {"0-1": "h2o", "rest": "luka"}')

    def __post_init__(self):
        self._check("layers", isinstance(self.layers, dict) and len(self.layers) > 0, "a dict of specs by layer")
        specs = {}
        for key, method in self.layers.items():
            key = f"{key[0]}-{key[-1]}" if isinstance(key, range) and key.step == 1 and len(key) else str(key)
            _bounds(key)
            if key in specs:
                raise ValueError(f"per_layer: {key!r} is given twice, as a number or range and as a text")
            specs[key] = _spec(method, self)
        object.__setattr__(self, "layers", specs)

    @property
    def _specs(self) -> Sequence[str]:
        return list(self.layers.values())

    def _settings(self) -> dict[str, Any]:
        return {"layers": {key: _complete(method) for key, method in self.layers.items()}}

    def __hash__(self):
        return hash(self.spec)

    def for_layer(self, layer: int, num_layers: int, among: Sequence[int] | None = None) -> Method:
        key, among = self._key(layer, num_layers), range(num_layers) if among is None else among
        alike = [other for other in among if self._key(other, num_layers) == key]
        return make(self.layers[key]).for_layer(layer, num_layers, alike)

    def _key(self, layer: int, num_layers: int) -> str:
        """The key of ``layers`` that names a layer."""
        keys = [key for key in self.layers if _covers(key, layer, num_layers)]
        if len(keys) > 1:
            raise ValueError(f"per_layer: layer {layer} is named by several keys of {sorted(self.layers)}")
        if not keys and "rest" not in self.layers:
            raise ValueError(f"per_layer: no method for layer {layer} of {num_layers}; add it, or the key 'rest'")
        return keys[0] if keys else "rest"


def per_layer(layers: dict[Any, str | Method]) -> PerLayer:
    """A method for each layer; see :class:`PerLayer`."""
    return PerLayer(layers=layers)


@register
class Mixed(_OfLayers):
    """Lined attention (H2O) in the first and last layers, clustered attention (LuKA) between them."""

    name: ClassVar[str] = "mixed"
    about: ClassVar[About] = About(
        "LuKA, sections 3.3 and 4.2",
        full_budget={"lined": "h2o:top_k=1.0", "clustered": "luka:top_k=1.0,expand=1.0"},
        small_budget={
            "lined": "h2o:top_k=9,window=8",
            "clustered": "luka:page_size=4,tail=9,top_k=2",
        },
    )
    needs_prompt_end: ClassVar[bool] = True

    lined: Any = setting("h2o", "method of the first and last layers")
    clustered: Any = setting("luka", "method of the layers between")

    def __post_init__(self):
        object.__setattr__(self, "lined", _spec(self.lined, self))
        object.__setattr__(self, "clustered", _spec(self.clustered, self))

    @property
    def _specs(self) -> Sequence[str]:
        return self.lined, self.clustered

    def _settings(self) -> dict[str, Any]:
        return {"lined": _complete(self.lined), "clustered": _complete(self.clustered)}

    def for_layer(self, layer: int, num_layers: int, among: Sequence[int] | None = None) -> Method:
        ends = max(1, round(8 / 36 * num_layers))  # of the depth, as in the paper

        def lined(layer: int) -> bool:
            return layer < ends or layer >= num_layers - ends

        alike = [other for other in among or range(num_layers) if lined(other) == lined(layer)]
        return make(self.lined if lined(layer) else self.clustered).for_layer(layer, num_layers, alike)


def _spec(method: str | Method | dict[str, Any], whole: Method) -> str:
    """The spec of a part of ``whole``, which may be given as :func:`_complete` writes it; without regard to any
    model."""
    if isinstance(method, dict) and not isinstance(method.get("method"), str):
        raise ValueError(f"a method that is written as an object has its name as 'method', and {method!r} has none")
    made = make(**method) if isinstance(method, dict) else make(method)
    keep_made_for(whole, made)
    return made.for_model(dict).spec


def _complete(spec: str) -> dict[str, Any]:
    """A method's name and all its settings, so that records stay true when a default changes."""
    method = make(spec)
    return {"method": method.name, **settings_of(method)}


def _bounds(key: str) -> tuple[int, int] | None:
    if key == "rest":
        return None
    cut = key.find("-", 1)
    try:
        return (int(key), int(key)) if cut < 0 else (int(key[:cut]), int(key[cut + 1 :]))
    except ValueError:
        raise ValueError(f"per_layer: {key!r} is not a layer, a range such as '0-7', or 'rest'") from None


def _covers(key: str, layer: int, num_layers: int) -> bool:
    bounds = _bounds(key)
    if bounds is None:
        return False
    first, last = (number + num_layers if number < 0 else number for number in bounds)
    if 0 <= last < first < num_layers:
        raise ValueError(f"per_layer: {key!r} runs backwards; write the lower layer first")
    if not 0 <= first <= last < num_layers:
        raise ValueError(f"per_layer: {key!r} names layers outside 0..{num_layers - 1}")
    return first <= layer <= last
