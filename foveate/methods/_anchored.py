"""Layers that choose keys, and later layers that read the same keys: the base of Kascade, OmniKV and LessIsMore."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveate import ops
from foveate.methods.base import SPARSE_FROM_TOKENS, Method, Replay, Role
from foveate.methods.budgets import Number, budget, clamp
from foveate.state import Geometry, SlotCache


def anchor_role(layer: int, dense: bool = False) -> Role:
    """The role of a layer that chooses keys. A ``dense`` layer chooses for its readers alone and itself reads all
    keys."""
    name = "dense, choosing" if dense else "choosing"
    return Role(name, chooses=True, layer=layer, reads_all=dense, has_readers=True)


def reader_role(layer: int, anchor: int, heads: Sequence[int] | None = None) -> Role:
    """The role of a layer that reads the keys that layer ``anchor`` chose. For ``heads`` see :attr:`Role.heads`."""
    return Role("reading", anchor, None if heads is None else tuple(heads), layer=layer)


def dense_role(layer: int) -> Role:
    """The role of a layer that reads all keys and chooses none."""
    return Role("dense", reads_all=True, layer=layer)


@dataclass(frozen=True)
class SharedSelection(Method):
    """A method whose anchor layers choose keys for each decoded token, and whose other layers read the same keys."""

    stateful: ClassVar[bool] = False
    sparse_from_tokens: ClassVar[int] = SPARSE_FROM_TOKENS
    counters: ClassVar[tuple[str, ...]] = ("indices_reused",)
    """Counts each row of each decode step in which the layer read keys that an earlier layer had chosen."""
    replay: ClassVar[Replay] = Replay()
    packed: ClassVar[bool] = True
    """Whether :meth:`select` writes the chosen slots to the first :meth:`count` places of each row, and -1 after
    them."""
    role: ClassVar[Role] = anchor_role(-1)
    """The layer's role, set by :meth:`for_layer`. An instance of no layer has the role of a layer that chooses."""

    def role_of(self, layer: int, among: Sequence[int]) -> Role:
        """The role of ``layer``, one of the layers ``among`` which the method is applied to.

        :meth:`for_layer` adds afterwards which later layers read its choice.
        """
        raise NotImplementedError

    def select(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        """The keys that one token a row reads: slots, int ``[B, Hkv, K]``; -1 marks an empty place."""
        raise NotImplementedError

    @property
    def needs_prompt_end(self) -> bool:  # type: ignore[override]
        """A decoded token reads the keys chosen for it; a prompt token reads all keys or the keys chosen for its
        tile."""
        return not self.role.reads_all

    def for_layer(self, layer: int, num_layers: int, among: Sequence[int] | None = None) -> SharedSelection:
        own, among = dataclasses.replace(self), range(num_layers) if among is None else among
        roles = {other: self.role_of(other, among) for other in among}
        readers = [role for role in roles.values() if role.reads_choice_of is not None]
        read = {role.reads_choice_of for role in readers}
        role = roles[layer]
        if role.chooses and layer in read:
            remapped = any(one.reads_choice_of == layer and one.heads is not None for one in readers)
            before = max((other for other in read if other < layer), default=None)
            role = role._replace(remapped=remapped, before=before)
        elif role.chooses:
            role = dense_role(layer) if role.reads_all else role._replace(has_readers=False)
        own.__dict__["role"] = role
        return own

    def attended_keys(self, tokens: int) -> int | None:
        return tokens if self.role.reads_all else self.count(tokens) if self.packed else None

    def scored(self, tokens: Number, geometry: Geometry, dtype: torch.dtype) -> float | Tensor:
        """A layer that chooses scores keys without their values; a dense one reads all keys and values anyway."""
        return tokens * (geometry.key_share if self.role.chooses and not self.role.reads_all else 0.0)

    def choose(self, cache: SlotCache, q: Tensor, scaling: float) -> ops.Choice | None:
        if not self.role.chooses:
            return None
        return self.choose_for_readers(cache, q, scaling) if self.role.reads_all else self._selected(cache, q, scaling)

    def choose_for_readers(self, cache: SlotCache, q: Tensor, scaling: float) -> ops.Choice:
        """What :meth:`choose` returns in a layer that reads all keys itself and chooses some for its readers."""
        return ops.Choice(readers=self._selected(cache, q, scaling))

    def _selected(self, cache: SlotCache, q: Tensor, scaling: float) -> ops.Choice:
        return self._choice(cache, self.select(cache, q, scaling))

    def _choice(self, cache: SlotCache, keys: Tensor) -> ops.Choice:
        return ops.Choice(keys=keys, read=self._read(cache, keys), packed=self.packed)

    def _check_layers(self, name: str) -> None:
        """Check a setting that lists layers by number or by depth, and store it as a tuple. Raises ValueError."""
        layers = getattr(self, name)
        self._check(name, isinstance(layers, (list, tuple)) and len(layers) > 0, "a list of layers")
        object.__setattr__(self, name, tuple(layers))
        kinds = {type(one) for one in layers}
        numbers = kinds == {int} and all(one >= 0 for one in layers)
        depths = kinds == {float} and all(0 <= one < 1 for one in layers)
        rising = (numbers or depths) and list(layers) == sorted(set(layers))
        self._check(name, rising, "rising layer numbers, or depths in [0, 1)")

    def count(self, length: Number) -> Number:
        """The number of keys that a row of ``length`` tokens may read."""
        return clamp(budget(self.top_k, length, self.min_k), 1, length)

    def _read(self, cache: SlotCache, indices: Tensor) -> Tensor:
        """The number of keys read, ``[B, Hkv]``. All layers of a step share one tensor."""
        return cache.plan.per_row(self.count)[:, None].expand(indices.shape[:2])


def layer_numbers(method: Method, name: str, among: Sequence[int]) -> list[int]:
    """The numbers of the layers that a setting lists, ascending.

    The setting lists layer numbers of the model, or depths in [0, 1) among the layers that the method is applied to.

    Raises:
        ValueError: for the number of a layer that the method is not applied to.
    """
    layers = getattr(method, name)
    if isinstance(layers[0], float):
        last = len(among) - 1
        return sorted({among[min(round(depth * len(among)), last)] for depth in layers})
    strange = sorted(set(layers) - set(among))
    if strange:
        raise ValueError(
            f"{method.name}: {name} must be among the layers that it is applied to, {list(among)}, not {strange[0]}"
        )
    return list(layers)


def nearest(choosers: Sequence[int], layer: int) -> int | None:
    """The last of ``choosers``, which ascend, that is not after ``layer``; None if all of them are after it."""
    index = bisect.bisect_right(choosers, layer) - 1
    return choosers[index] if index >= 0 else None
