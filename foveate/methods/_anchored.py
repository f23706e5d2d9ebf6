"""Layers that choose keys, and later layers that read the same: what Kascade, OmniKV and LessIsMore share."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from foveate import ops
from foveate.methods._common import attend_all, attend_chosen, attend_hot, count_scored
from foveate.methods.base import SPARSE_FROM_TOKENS, Method, Replay, Role
from foveate.methods.budgets import Number, budget, clamp
from foveate.ops.attend.gather import among
from foveate.state import Geometry, SlotCache


class LayerRole(NamedTuple):
    """What one layer does."""

    layer: int
    anchor: int | None
    """The layer that chooses the keys, this or an earlier one; None: all are read."""
    dense: bool = False
    """Whether the layer reads all keys nevertheless, and chooses for others alone."""
    heads: tuple[int, ...] | None = None
    """For each KV head the anchor's KV head whose keys it reads; None: that of its own number."""
    has_readers: bool = True
    """Whether a later layer reads what this one chooses."""
    remapped: bool = False
    """Whether a reader's KV heads read the choices of others than those of their own number."""
    before: int | None = None
    """The layer before this one whose choice others read; under a layer that chooses, all of them have done so."""

    @property
    def chooses(self) -> bool:
        return self.anchor == self.layer

    @property
    def reads_another(self) -> bool:
        """Whether the keys are those that an earlier layer has chosen."""
        return self.anchor is not None and not self.chooses


class SharedKeys(NamedTuple):
    """The keys that one layer has chosen for a decoded token, for later layers to read."""

    indices: Tensor
    """int ``[B, Hkv, K]``, -1 for none."""
    read: Tensor
    """How many keys these are, ``[B, Hkv]``; counted once for all layers that read them."""

    def to(self, device: torch.device) -> SharedKeys:
        """The same on another device."""
        return SharedKeys(*(x.to(device) for x in self))


@dataclass(frozen=True)
class SharedSelection(Method):
    """A method whose anchor layers choose keys for each decoded token, and whose other layers read the same."""

    stateful: ClassVar[bool] = False
    sparse_from_tokens: ClassVar[int] = SPARSE_FROM_TOKENS
    counters: ClassVar[tuple[str, ...]] = ("indices_reused",)
    """Decode steps times rows in which the layer read keys that an earlier layer had chosen."""
    replay: ClassVar[Replay] = Replay()
    packed: ClassVar[bool] = True
    """Whether keys that :meth:`select` chooses are in a row's first places, :meth:`count` of them."""
    layer_role: ClassVar[LayerRole] = LayerRole(-1, -1)
    """Set by :meth:`for_layer`; until then the method is like that of a layer that chooses."""

    def role_of(self, layer: int, among: Sequence[int]) -> LayerRole:
        """What a layer does, one of those that the method is applied to."""
        raise NotImplementedError

    def select(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        """Keys chosen for one token a row: slots, int ``[B, Hkv, K]``, -1 for none."""
        raise NotImplementedError

    def select_densely(self, cache: SlotCache, q: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """What :meth:`select` chooses, and attention over all keys, counted."""
        return self.select(cache, q, scaling), attend_all(cache, q, scaling).out

    @property
    def needs_prompt_end(self) -> bool:  # type: ignore[override]
        """A decoded token reads its own choice of keys, the tokens of a prompt all keys, or those of their tile."""
        return self.layer_role.anchor is not None and not self.layer_role.dense

    def for_layer(self, layer: int, num_layers: int, among: Sequence[int] | None = None) -> SharedSelection:
        own, among = dataclasses.replace(self), range(num_layers) if among is None else among
        roles = {other: self.role_of(other, among) for other in among}
        readers = [role for role in roles.values() if role.reads_another]
        read = {role.anchor for role in readers}
        more = {"has_readers": layer in read, "before": max((other for other in read if other < layer), default=None)}
        more["remapped"] = any(role.anchor == layer and role.heads is not None for role in readers)
        own.__dict__["layer_role"] = self.role_of(layer, among)._replace(**more)
        return own

    @property
    def role(self) -> Role:
        role = self.layer_role
        if role.reads_another:
            return Role("reading", role.anchor, role.heads, chooses=False)
        if role.anchor is None or (role.dense and not role.has_readers):
            return Role("dense", chooses=False, reads_all=True)
        return Role("dense, choosing", reads_all=True) if role.dense else Role("choosing")

    def scored(self, tokens: Number, geometry: Geometry, dtype: torch.dtype) -> float | Tensor:
        """A layer that chooses scores keys without their values; a dense one reads all keys and values anyway."""
        return tokens * (geometry.key_share if self.layer_role.chooses and not self.layer_role.dense else 0.0)

    def decode(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        role = self.layer_role
        if role.anchor is None or (role.dense and not role.has_readers):
            return attend_all(cache, q, scaling).out
        if role.chooses and role.dense:
            indices, out = self.select_densely(cache, q, scaling)
            self._hand_on(cache, self._of_all_heads(cache, indices, cache.plan.or_whole(self._read(cache, indices))))
            return out
        heads = None
        if role.chooses:
            indices = self.select(cache, q, scaling)
            read = cache.plan.or_whole(self._read(cache, indices))
            self._hand_on(cache, self._of_all_heads(cache, indices, read))
            count_scored(self, cache)
        else:
            (indices, read), heads = self._handed_on(cache)
            cache.count("indices_reused", 1)
            read = read if heads is None else read.index_select(1, heads)
        cache.count_read(read)
        if cache.offloaded:
            return self._attend_in_host(cache, q, indices if heads is None else indices[:, heads], read, scaling)
        lengths = None if cache.plan.alike or not self.packed else read
        return attend_chosen(cache, q, indices, scaling, lengths=lengths, heads=heads)

    def _attend_in_host(self, cache: SlotCache, q: Tensor, indices: Tensor, read: Tensor, scaling: float) -> Tensor:
        """Attention to chosen keys of a cache in host memory; a layer that has chosen them has their pages."""
        indices = indices.masked_fill(~ops.first_keys(read, indices.shape[2]), -1) if self.packed else indices
        if not self.layer_role.chooses:
            size = self.fetches.page_size
            pages, number = indices.div(size, rounding_mode="floor"), -(-cache.used // size)
            every = torch.arange(number, dtype=torch.int32, device=q.device)
            cache.fetch(every.where(among(pages, number), -1))
        return attend_hot(cache, q, indices, scaling)

    def decode_dense(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        return attend_all(cache, q, scaling).out

    def _check_layers(self, name: str) -> None:
        """A setting that lists layers, by number or by depth; kept as a tuple."""
        layers = getattr(self, name)
        self._check(name, isinstance(layers, (list, tuple)) and len(layers) > 0, "a list of layers")
        object.__setattr__(self, name, tuple(layers))
        kinds = {type(one) for one in layers}
        numbers = kinds == {int} and all(one >= 0 for one in layers)
        depths = kinds == {float} and all(0 <= one < 1 for one in layers)
        rising = (numbers or depths) and list(layers) == sorted(set(layers))
        self._check(name, rising, "rising layer numbers, or depths in [0, 1)")

    def count(self, length: Number) -> Number:
        """Keys that a row of this length may read."""
        return clamp(budget(self.top_k, length, self.min_k), 1, length)

    def _read(self, cache: SlotCache, indices: Tensor) -> Tensor:
        """How many keys are read, ``[B, Hkv]``: one tensor for all layers of a step."""
        return cache.plan.each(self.count)[:, None].expand(indices.shape[:2])

    def _of_all_heads(self, cache: SlotCache, indices: Tensor, read: Tensor) -> SharedKeys:
        """What readers need: the choices of other ranks' heads, too, if one of their heads reads such a choice."""
        if cache.ranks is None or not self.layer_role.remapped:
            return SharedKeys(indices, read)
        indices = cache.of_all_heads(indices)
        return SharedKeys(indices, read[:, :1].expand(indices.shape[:2]))  # as many of each head

    def _hand_on(self, cache: SlotCache, selection: SharedKeys | ops.TileKeys) -> None:
        """For the layers that read it, if any."""
        if self.layer_role.has_readers:
            own, before = ((self.name, layer) for layer in (self.layer_role.layer, self.layer_role.before))
            cache.forward.pop(cache.shared_key(before), None)
            cache.forward[cache.shared_key(own)] = selection

    def _handed_on(self, cache: SlotCache) -> tuple[Any, Tensor | None]:
        """The anchor's selection, and which of its heads each of this layer reads; None: its own."""
        key, heads = (self.name, self.layer_role.anchor), self.layer_role.heads
        if (selection := cache.forward.get(cache.shared_key(key))) is None:
            raise LookupError(f"no earlier layer of this forward pass has left {key!r}")
        selection = selection.to(cache.device)
        if cache.ranks is not None:
            return self._of_own_heads(cache, selection, heads), None
        if heads is None:
            return selection, None
        self.check_heads(cache.geometry.num_kv_heads)
        return selection, cache.plan.constant(heads)

    def _of_own_heads(self, cache: SlotCache, selection: SharedKeys, heads: tuple[int, ...] | None) -> SharedKeys:
        """Of a selection of all ranks' heads, what the heads that are here read."""
        own, ranks = cache.geometry.num_kv_heads, cache.ranks
        if selection.indices.shape[1] == own:
            return selection
        every = range(own * ranks.size) if heads is None else heads
        here = cache.plan.constant(every[own * ranks.rank :][:own])
        return SharedKeys(*(x.index_select(1, here) for x in selection))

    def check_heads(self, number: int) -> None:
        """Raise ValueError unless the layer's ``heads``, if it has any, are those of a model of ``number`` KV heads."""
        heads = self.layer_role.heads
        if heads is not None and (len(heads) != number or not all(head in range(number) for head in heads)):
            raise ValueError(
                f"{self.name}: heads of layer {self.layer_role.layer} must be {number} numbers below {number}, "
                f"one for each KV head, not {list(heads)}"
            )


def layer_numbers(method: Method, name: str, among: Sequence[int]) -> list[int]:
    """The layers that a setting lists, by their numbers in the model or by their depth among some layers.

    Raises:
        ValueError: for numbers of other layers.
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
    """The last of some layers, ascending, that is not after a layer; None if all are."""
    index = bisect.bisect_right(choosers, layer) - 1
    return choosers[index] if index >= 0 else None
