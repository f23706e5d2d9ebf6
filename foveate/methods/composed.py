"""Two methods in one: the first evicts tokens of a prompt, the second selects among the kept tokens (``snapkv+quest``).

A composition uses only what its two methods declare. :func:`obstacle` decides whether two methods fit together.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from foveate import ops
from foveate.methods._settings import settings_of
from foveate.methods.base import REGISTRY, About, Method, Observation, Replay, Role, register, setting
from foveate.methods.bases import KeepsByScore
from foveate.methods.budgets import Number
from foveate.methods.spec import COMPOSED, keep_made_for, make, spelled
from foveate.state import Channel, Evicts, Geometry, RowNumber, SlotCache

_KEPT = "kept."
"""Prefix for the name of the evicting method's channel if the selecting method has a channel of the same name."""


@dataclass(frozen=True)
class Composition(Method):
    """The cache keeps the tokens that :attr:`evicting` keeps; a decode step reads the keys that :attr:`selecting`
    chooses among them.

    Slots, pages, budgets given as shares, and counts of scored keys all refer to the kept tokens. A subclass defines
    :attr:`evicting` and :attr:`selecting`.
    """

    @property
    def evicting(self) -> Method:
        """The method that evicts."""
        raise NotImplementedError

    @property
    def selecting(self) -> Method:
        """The method that chooses what a step reads."""
        raise NotImplementedError

    @property
    def parts(self) -> tuple[Method, ...]:
        return self.evicting, self.selecting

    def for_layer(self, layer: int, num_layers: int, among: Sequence[int] | None = None) -> Method:
        """The method of one layer. Where one of the two methods does nothing in a layer, the layer has the other
        alone."""
        evicting, selecting = (one.for_layer(layer, num_layers, among) for one in self.parts)
        if not _chooses(selecting):
            return evicting
        if not evicting.evicts:
            return selecting
        return self if evicting is self.evicting and selecting is self.selecting else OfLayer(evicting, selecting)

    # Declared facts

    @property
    def evicts(self) -> Evicts:  # type: ignore[override]
        return self.evicting.evicts

    @property
    def sparse_from_tokens(self) -> int | None:  # type: ignore[override]
        """0: no pair's speed is measured, so that a step reads all kept tokens only where a user's ``dense_below`` asks
        for it. None if tokens leave in decode steps, or if the selecting method has no dense steps."""
        return None if self.evicts.in_decode or self.selecting.sparse_from_tokens is None else 0

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        return self.evicting.stateful or self.selecting.stateful

    @property
    def needs_prompt_end(self) -> bool:  # type: ignore[override]
        return self.evicting.needs_prompt_end or self.selecting.needs_prompt_end

    @property
    def prompt_evicts_every(self) -> int:  # type: ignore[override]
        return self.evicting.prompt_evicts_every

    @property
    def needs_rotary(self) -> bool:  # type: ignore[override]
        return self.evicting.needs_rotary or self.selecting.needs_rotary

    @property
    def needs_mass(self) -> bool:  # type: ignore[override]
        return self.selecting.needs_mass

    @property
    def scored_at(self) -> str:  # type: ignore[override]
        return self.selecting.scored_at

    @functools.cached_property
    def replay(self) -> Replay | None:  # type: ignore[override]
        return Replay.of_all([one.replay for one in self.parts])

    @property
    def pools_layer(self) -> bool:  # type: ignore[override]
        return self.evicting.pools_layer or self.selecting.pools_layer

    @functools.cached_property
    def counters(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(dict.fromkeys((*self.evicting.counters, *self.selecting.counters)))

    @property
    def _artefact(self) -> Any:  # type: ignore[override]
        return self.evicting._artefact if self.evicting._artefact is not None else self.selecting._artefact

    @functools.cached_property
    def role(self) -> Role:
        return self.selecting.role._replace(name=self.name)

    # The prompt

    def channels(self, geometry: Geometry) -> dict[str, Channel | RowNumber]:
        names, kept = self._names(geometry), self.evicting.channels(geometry)
        return {names.get(name, name): spec for name, spec in kept.items()} | dict(self.selecting.channels(geometry))

    def _names(self, geometry: Geometry) -> dict[str, str]:
        """The evicting method's channels that have another name in the composition: from their own names to those here.

        Raises:
            ValueError: when both methods have a channel of the same name, unless only prompts use it.
        """
        shared = self.evicting.channels(geometry).keys() & self.selecting.channels(geometry).keys()
        if shared and (_works_in_decode(self.evicting) or self.selecting.observation is None):
            raise ValueError(
                f"{self.spec}: {self.evicting.name} and {self.selecting.name} both keep a channel called "
                f"{sorted(shared)[0]!r}, which decode steps use; rename it in one of the classes"
            )
        return {name: _KEPT + name for name in shared}

    def _as_evicting(self, cache: SlotCache) -> SlotCache:
        """The cache as the evicting method sees it, with its channels under their own names."""
        names = self._names(cache.geometry)
        if not names:
            return cache
        one = copy.copy(cache)
        one.specs = cache.specs | {name: cache.specs[here] for name, here in names.items() if here in cache.specs}
        one.tensors = cache.tensors | {name: cache.tensors[here] for name, here in names.items()}
        return one

    @property
    def _reading_prompts(self) -> Method | None:
        """The method that reads prompts sparsely; None: prompts are dense."""
        return next((one for one in self.parts if _own_prompt(one)), None)

    def prompt(self, cache: SlotCache, q: Tensor, scaling: float) -> ops.Attended:
        own = self._reading_prompts
        return super().prompt(cache, q, scaling) if own is None else own.prompt(cache, q, scaling)

    def prompt_tile(self, group: int) -> int | None:
        own = self._reading_prompts
        return 0 if own is None else own.prompt_tile(group)

    @functools.cached_property
    def observation(self) -> Observation | None:
        both = [one.observation for one in self.parts]
        if None in both:
            return both[0] or both[1]
        return Observation(tuple(both), any(one.needs_lse for one in both))

    def observe(self, cache: SlotCache, q: Tensor, attended: ops.Attended, scaling: float) -> None:
        if self.evicting.observation is not None:
            self.evicting.observe(self._as_evicting(cache), q, attended, scaling)
        if self.selecting.observation is not None:
            self.selecting.observe(cache, q, attended, scaling)

    def prompt_end(self, cache: SlotCache, scaling: float) -> Tensor | None:
        return self.evicting.prompt_end(self._as_evicting(cache), scaling)

    def prompt_packed(self, cache: SlotCache) -> None:
        self.evicting.prompt_packed(self._as_evicting(cache))
        self.selecting.rebuild(cache)

    # Decode

    def note_newest(self, cache: SlotCache, q: Tensor) -> None:
        self.evicting.note_newest(cache, q)
        self.selecting.note_newest(cache, q)

    def choose(self, cache: SlotCache, q: Tensor, scaling: float) -> ops.Choice | Tensor | None:
        return self.selecting.choose(cache, q, scaling)

    def choose_by(self, cache: SlotCache, scores: Tensor) -> ops.Choice:
        return self.selecting.choose_by(cache, scores)

    def learn(self, cache: SlotCache, choice: ops.Choice, attended: ops.Attended) -> None:
        self.selecting.learn(cache, choice, attended)
        self.evicting.learn(cache, choice, attended._replace(mass=None))  # which it has not asked for

    def evict(self, cache: SlotCache, scaling: float) -> None:
        self.evicting.evict(cache, scaling)

    def attended_keys(self, tokens: int) -> int | None:
        return None  # how many are kept is not known

    def scored(self, tokens: Number, geometry: Geometry, dtype: torch.dtype) -> float | Tensor:
        return self.selecting.scored(tokens, geometry, dtype)


@dataclass(frozen=True)
class OfLayer(Composition):
    """A composition in one layer."""

    evicting: Method = None  # type: ignore[assignment]
    selecting: Method = None  # type: ignore[assignment]

    name: ClassVar[str] = COMPOSED

    def __post_init__(self) -> None:
        _check(self.evicting, self.selecting)

    @functools.cached_property
    def spec(self) -> str:
        return f"{self.evicting.spec}+{self.selecting.spec}"


@register
class Composed(Composition):
    """Evicts by one method, and reads of the kept tokens what another selects; written ``snapkv+quest``.

    Each method has its own settings: ``snapkv:top_k=0.5+quest:top_k=0.1``. The first evicts tokens and reads all that
    it keeps; the second selects keys or pages. A budget of the second method that is a share is a share of the tokens
    that the first keeps. Whether two methods fit together follows from what they declare
    (:attr:`Method.allows_eviction`).

    Raises:
        ValueError: for two methods that do not fit together. The error gives the reason, and methods that do fit.
    """

    name: ClassVar[str] = COMPOSED
    about: ClassVar[About] = About(
        "foveate; of the kind of RocketKV, arXiv:2502.14051",
        example="snapkv:top_k=0.5+quest:top_k=0.1",
        full_budget={"keeps": "snapkv:top_k=1.0", "reads": "quest:top_k=1.0"},
        small_budget={
            "keeps": "snapkv:top_k=17,window=8,kernel_size=3",
            "reads": "quest:top_k=9,page_size=3,dense_layers=0",
        },
        estimates=lambda method: any(one.about.chooses_by_estimates(one) for one in method.parts),
    )

    _unknown: ClassVar[str] = "; settings of its methods stand beside their names, as in snapkv:top_k=0.5+quest"

    keeps: Any = setting("snapkv", "method that evicts: its spec")
    reads: Any = setting("quest", "method that selects what a step reads of the tokens that are kept: its spec")

    def __post_init__(self) -> None:
        for name in ("keeps", "reads"):
            self._check(name, isinstance(getattr(self, name), str | dict | Method), "the spec of a method")
            made = _made(getattr(self, name))
            object.__setattr__(self, name, made.spec)
            keep_made_for(self, made)
        _check(self.evicting, self.selecting)

    @functools.cached_property
    def evicting(self) -> Method:  # type: ignore[override]
        return make(self.keeps)

    @functools.cached_property
    def selecting(self) -> Method:  # type: ignore[override]
        return make(self.reads)

    def for_model(self, facts: Callable[[], Mapping[str, Any]]) -> Composed:
        return Composed(*(one.for_model(facts) for one in self.parts))

    def with_full_budget(self) -> Method | None:
        both = [one.with_full_budget() for one in self.parts]
        return None if None in both else Composed(*both)

    def _settings(self) -> dict[str, Any]:
        return {name: {"method": one.name, **settings_of(one)} for name, one in zip(("keeps", "reads"), self.parts)}

    @classmethod
    def _spell(cls, settings: dict[str, Any]) -> str:
        both = ({"keeps": cls.keeps, "reads": cls.reads} | settings).values()
        return "+".join(spelled(one) if isinstance(one, str) else _made(one).spec for one in both)


def _made(method: str | Method | dict[str, Any]) -> Method:
    """A method from its spec, or from an object with its name as ``method`` and its settings."""
    if isinstance(method, dict) and not isinstance(method.get("method"), str):
        raise ValueError(f"a method that is written as an object has its name as 'method', and {method!r} has none")
    return make(**method) if isinstance(method, dict) else make(method)


# Which methods fit together


def obstacle(evicting: Method, selecting: Method) -> str:
    """Why one method cannot select among the tokens that another keeps; empty when it can."""
    first, second = evicting.name, selecting.name
    if not evicting.evicts:
        return f"{first} evicts nothing, and the method before the + decides which tokens are kept"
    if _chooses(evicting):
        return f"{first} selects what a step reads itself, and the method before the + reads all that it keeps"
    if evicting.needs_mass:
        return f"{first} learns from the attention to all keys that it keeps, and a step after the + reads some of them"
    if not _chooses(selecting):
        return f"{second} selects nothing, and the method after the + decides which of the kept tokens a step reads"
    if selecting.evicts:
        return f"{second} evicts, too, and the method before the + alone decides which tokens are kept"
    if selecting.role.has_readers or selecting.role.reads_choice_of is not None:
        return f"{second} hands slots on to other layers, which keep other tokens in these slots"
    allowed = selecting.allows_eviction
    if not allowed:
        return f"{selecting.spec} does not declare that another method may evict (allows_eviction)"
    if evicting.evicts.in_decode and not allowed.in_decode:
        return f"{first} evicts in decode steps, and {second} allows eviction when a prompt ends alone"
    if evicting.evicts.unevenly and not allowed.unevenly:
        return f"KV heads may keep different numbers of tokens under {first}, and {second} needs equal numbers"
    for one, other in ((evicting, selecting), (selecting, evicting)):
        if _own_prompt(one) and (_own_prompt(other) or getattr(other.observation, "needs_lse", False)):
            return f"{one.name} reads prompts in a way of its own, which {other.name} does not allow"
    for one in (evicting, selecting):
        if one.replay is not None and one.replay.maintains:
            return f"{one.name} does work between steps (Replay.maintain), which a composition does not"
    return ""


def _check(evicting: Method, selecting: Method) -> None:
    """Raises ValueError for two methods that do not fit together."""
    why = obstacle(evicting, selecting)
    if not why:
        return
    known = [found for name in sorted(REGISTRY) if (found := _under_small_budget(name)) is not None]
    after = [one.name for one in known if not obstacle(evicting, one)]
    before = [one.name for one in known if not obstacle(one, selecting)]
    allowed = [f"after {evicting.name}+ {' or '.join(after)} can follow"] if after else []
    allowed += [f"before +{selecting.name} {' or '.join(before)} can stand"] if before else []
    if not allowed and not obstacle(selecting, evicting):
        allowed = [f"write {selecting.spec}+{evicting.spec}"]
    hint = "; ".join(allowed) or "write A+B, where A evicts and B selects, such as snapkv+quest"
    raise ValueError(f"{evicting.spec}+{selecting.spec}: {why}; {hint}")


def _under_small_budget(name: str) -> Method | None:
    """A registered method with the tests' small settings; None for a composition, and for a method that needs more,
    such as a file."""
    cls = REGISTRY[name]
    if issubclass(cls, Composition):
        return None
    try:
        return cls(**(cls.about.small_budget or {}))
    except (TypeError, ValueError):  # needs something else, such as a file
        return None


def _chooses(method: Method) -> bool:
    return type(method).choose is not Method.choose


def _own_prompt(method: Method) -> bool:
    return type(method).prompt is not Method.prompt


def _works_in_decode(method: Method) -> bool:
    """Whether a method that evicts also does something in decode steps."""
    kind = type(method)
    own = kind.note_newest is not Method.note_newest or kind.learn not in (Method.learn, KeepsByScore.learn)
    return own or method.evicts.in_decode
