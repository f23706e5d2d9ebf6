"""Bases for authors: methods that keep tokens by a score, and methods that choose the keys that a step reads.

A base implements the hooks, budgets, counting and padding; the author writes the policy. If a class sets a setting of
its base as a plain attribute, such as ``sinks = 0``, the attribute is fixed and no longer a setting.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveate import ops
from foveate.methods._common import (
    estimated_attention,
    evict_weakest,
    eviction_setting,
    keep_heavy,
    newest_slots,
)
from foveate.methods.base import About, Method, Replay, setting
from foveate.methods.budgets import Number, budget
from foveate.state import Channel, Evicts, Geometry, SlotCache


@dataclass(frozen=True)
class KeepsByScore(Method):
    """Keeps the tokens with the largest :meth:`scores`, for each KV head; prompts are dense.

    Tokens are evicted when a prompt ends, and after every ``evict_every`` tokens of it. Under ``evicts =
    Evicts.IN_DECODE`` each decode step then evicts one token, from rows that hold more than :meth:`allowed`.
    """

    evicts: ClassVar[Evicts] = Evicts.AT_PROMPT_END
    replay: ClassVar[Replay] = Replay()
    needs_prompt_end: ClassVar[bool] = True
    about: ClassVar[About] = About(full_budget={"top_k": 1.0})

    top_k: int | float = setting(0.25, "tokens kept beside the window, sinks included: a number, or a share")
    min_k: int = setting(0, "least number of tokens when top_k is a share")
    sinks: int = setting(4, "first tokens that are kept whatever their scores")
    window: int = setting(32, "recent tokens that are always kept")
    evict_every: int = eviction_setting()  # type: ignore[misc]

    def __post_init__(self) -> None:
        own = [field.name for field in dataclasses.fields(self)]  # the others are fixed
        for name in ("min_k", "sinks", "window", "evict_every"):
            if name in own:
                self._check_count(name, int(name == "window"))
        self._check_budget("top_k", max(1, self.sinks))

    @property
    def prompt_evicts_every(self) -> int:  # type: ignore[override]
        return self.evict_every

    def scores(self, cache: SlotCache, scaling: float) -> Tensor | None:
        """The worth of each token, fp32 ``[B, Hkv, used]``; tokens with larger scores stay. It is called when tokens
        are evicted. Empty slots may have any score. None, allowed where a prompt ends: keep all tokens."""
        raise NotImplementedError

    def note(self, cache: SlotCache, mass: Tensor) -> None:
        """Learn from the attention ``mass [B, Hkv, used]`` of a decode step, fp32, summed over the heads of a group."""

    def allowed(self, length: Number) -> Number:
        """The number of tokens that a KV head keeps of a row of ``length`` tokens."""
        return budget(self.top_k, length, max(self.min_k, self.sinks)) + self.window

    def _checked_scores(self, cache: SlotCache, scaling: float) -> Tensor | None:
        scores, wanted = self.scores(cache, scaling), list(cache.positions.shape)
        if scores is not None and list(getattr(scores, "shape", ())) != wanted:
            given = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(f"{type(self).__name__}.scores returned {given}; return a number for each slot, {wanted}")
        return scores

    def keep(self, cache: SlotCache, scores: Tensor, allowed: int) -> Tensor:
        """The slots to keep, int64 ``[B, Hkv, K]``, by their :meth:`scores`, when more than ``allowed`` slots are
        held."""
        return keep_heavy(cache, scores, allowed, self.window, self.sinks)

    def prompt_end(self, cache: SlotCache, scaling: float) -> Tensor | None:
        allowed = self.allowed(cache.lengths[0])
        scores = self._checked_scores(cache, scaling) if cache.used > allowed else None
        return None if scores is None else self.keep(cache, scores, allowed)

    @property
    def needs_mass(self) -> bool:  # type: ignore[override]
        return type(self).note is not KeepsByScore.note

    def learn(self, cache: SlotCache, choice: ops.Choice, attended: ops.Attended) -> None:
        if attended.mass is not None:
            self.note(cache, attended.mass)

    def evict(self, cache: SlotCache, scaling: float) -> None:
        evict_weakest(cache, lambda positions: self._weakest(cache, positions, scaling), self._over, self.window)

    def _weakest(self, cache: SlotCache, positions: Tensor, scaling: float) -> Tensor:
        scores = self._checked_scores(cache, scaling)
        return scores.masked_fill(positions < self.sinks, torch.inf) if self.sinks else scores

    def _over(self, live: Number, length: Number) -> bool | Tensor:
        return live > self.allowed(length)


@dataclass(frozen=True)
class ReadsChosen(Method):
    """Keeps all tokens. A decode step reads, for each KV head, the keys that :meth:`choose` names; prompts are dense.

    Stand-ins for the keys by which they are chosen, such as copies in fewer bits, are kept beside them; see
    :meth:`copies`.
    """

    stateful: ClassVar[bool] = False
    replay: ClassVar[Replay] = Replay()
    needs_prompt_end: ClassVar[bool] = True
    sparse_from_tokens: ClassVar[int | None] = 0

    def copies(self, keys: Tensor) -> dict[str, Tensor]:
        """Stand-ins for ``keys [..., D]``, by name: tensors ``[..., any]`` of a fixed shape and dtype."""
        return {}

    def choose(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        """The keys that one token a row reads: bool, broadcastable to ``[B, Hkv, used]``; empty slots may be True.

        ``cache.channel(name)`` holds the stand-in that :meth:`copies` made of each key, ``[B, Hkv, used, any]``.
        """
        raise NotImplementedError

    def attention(self, cache: SlotCache, q: Tensor, keys: Tensor, scaling: float) -> Tensor:
        """Attention of one token a row to ``keys [B, Hkv, used, D]``, which stand in for the cached keys.

        Returns:
            fp32 ``[B, Hkv, G, used]`` for the G query heads of each KV head; 0 in empty slots. Learned sinks take their
            share, and caps of logits apply.
        """
        return estimated_attention(cache, ops.fold_group(q, keys.shape[1]).float(), keys.float(), scaling)

    def _shapes(self, geometry: Geometry) -> dict[str, Tensor]:
        return self.copies(torch.zeros(geometry.head_dim))

    def channels(self, geometry: Geometry) -> dict[str, Channel]:
        made = self._shapes(geometry).items()
        return {name: Channel(tuple(one.shape), dtype=one.dtype, recomputed=True) for name, one in made}

    def prompt_packed(self, cache: SlotCache) -> None:
        self._copy(cache, slice(cache.used - cache.rows["observed"][0], cache.used))

    def rebuild(self, cache: SlotCache) -> None:
        self._copy(cache, slice(0, cache.used))

    def _copy(self, cache: SlotCache, slots: slice) -> None:
        for name, made in self.copies(cache.keys[:, :, slots]).items():
            cache.channel(name)[:, :, slots] = made

    def note_newest(self, cache: SlotCache, q: Tensor) -> None:
        newest = newest_slots(cache)
        for name, made in self.copies(ops.gather_slots(cache.keys, newest)).items():
            cache.channel(name).scatter_(2, newest[..., None].expand_as(made), made)

    def scored(self, tokens: Number, geometry: Geometry, dtype: torch.dtype) -> float | Tensor:
        """The bytes of all copies. A class that scores something else overrides this."""
        copied = sum(one.nbytes for one in self._shapes(geometry).values())
        return tokens * (copied / ((geometry.head_dim + geometry.value_dim) * dtype.itemsize))
