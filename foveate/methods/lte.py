"""Learned token eviction on a frozen model (laLTE's module, trained alone), and its training-free relative."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from foveate import ops
from foveate.calibration import eviction_scores
from foveate.methods._common import evict_weakest, eviction_setting, keep_heavy, recent
from foveate.methods.base import About, Method, Observation, Replay, register, setting
from foveate.methods.budgets import Number, budget, clamp
from foveate.ops.attend import gather_fields
from foveate.state import Channel, Evicts, Geometry, SlotCache


@register
class LTE(Method):
    """The tokens that a trained module expects later queries to need, whatever these ask, and the most recent ones.

    A module of ``foveate train lte`` reads each token's key, value and six neighbours on either side, and predicts the
    largest share that a later query will take of it. So a token is scored once its six followers are there, and before
    any question is. The prefill is dense. What exceeds the budget leaves when the prompt ends and, from then on, at
    every step. The module rotates keys back by the positions of a row's real tokens, as ``generate`` counts them.

    ``allocation=global`` gives the KV heads of all layers budgets of their own, by one threshold over the scores on the
    text of the training; ``layer`` gives the heads of a layer the mean of these, so that no slot of the cache stays
    empty. With ``score=key_norm`` no module is needed: tokens with the shortest keys stay (Devoto et al. 2024). Where a
    model normalises its keys without weights, as Llama 4 does, all have one length, and rounding chooses among them.
    """

    name: ClassVar[str] = "lte"
    about: ClassVar[About] = About(
        "laLTE, He and Garner 2025, section 3.1, on a frozen model",
        example="lte:file=lte.safetensors",
        full_budget={"top_k": 1.0, "score": "key_norm"},
        small_budget={"top_k": 0.25, "window": 13, "sinks": 2, "score": "key_norm"},
        estimates=lambda method: method._artefact is not None,
    )
    evicts: ClassVar[Evicts] = Evicts.IN_DECODE
    needs_prompt_end: ClassVar[bool] = True
    layer: ClassVar[int | None] = None
    """The layer that the method is applied to; set by :meth:`for_layer`."""
    weights: ClassVar[tuple[float, ...] | None] = None
    """The budgets of the layer's KV heads, divided by the mean budget of all heads; None: all heads have the same
    budget. Set by :meth:`for_layer`."""

    file: str = setting("", "file of `foveate train lte` for the model; needed with score=learned")
    top_k: int | float = setting(
        0.25,
        "tokens kept by a KV head, window and sinks included, on average: a number, or a share of the tokens so far",
    )
    window: int = setting(64, "recent tokens that are always kept")
    sinks: int = setting(4, "first tokens that are always kept")
    allocation: str = setting("uniform", "budgets of KV heads: uniform, layer (by layer), or global (by head)")
    score: str = setting("learned", "what ranks tokens: learned (by `file`), or key_norm (short keys stay, no file)")
    evict_every: int = eviction_setting()  # type: ignore[misc]

    def __post_init__(self):
        self._check_choice("score", "learned", "key_norm")
        self._check("file", isinstance(self.file, str), "a file of `foveate train lte`")
        if self.score == "learned":
            self._check("file", self.file != "", "a file of `foveate train lte` with score=learned")
        else:
            self._check("file", self.file == "", "left out with score=key_norm, which needs none")
        self._check_budget("top_k")
        self._check_count("window", 13 if self.score == "learned" else 1)  # what a score depends on
        self._check_count("sinks")
        self._check_count("evict_every")
        self._check_choice("allocation", "uniform", "layer", "global")
        if self.score == "key_norm":
            self._check("allocation", self.allocation == "uniform", "uniform with score=key_norm")
            return
        try:
            eviction_scores.read(self.file)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    def for_layer(self, layer: int, num_layers: int, among: Sequence[int] | None = None) -> LTE:
        if self.score != "learned":
            return self
        scores = eviction_scores.read(self.file)
        among = range(num_layers) if among is None else among
        missing = [one for one in among if one not in scores.layers]
        if missing:
            raise ValueError(
                f"{self.name}: file {self.file!r} has scores of layers {list(scores.layers)}, and not of layer "
                f"{missing[0]}; it is for another model"
            )
        own = dataclasses.replace(self)
        own.__dict__.update(_artefact=scores, layer=layer)
        if self.allocation != "uniform":
            share = self.top_k if isinstance(self.top_k, float) else min(1.0, self.top_k / scores.length)
            shares = _weights(scores, share, tuple(among))[list(among).index(layer)]
            same = self.allocation == "layer"
            own.__dict__["weights"] = tuple([shares.mean().item()] * len(shares) if same else shares.tolist())
            own.__dict__["evicts"] = Evicts.IN_DECODE if same else Evicts.IN_DECODE | Evicts.UNEVENLY
        return own

    @property
    def prompt_evicts_every(self) -> int:  # type: ignore[override]
        return self.evict_every

    # Budgets

    def allowed(self, length: int | Number) -> int | Number:
        """The number of tokens kept by the KV head that keeps most, of a row of ``length`` tokens."""
        return self._allowed(length, None if self.weights is None else max(self.weights))

    def allowed_by_head(self, length: int, heads: int) -> list[int]:
        """The number of tokens that each KV head keeps of a row of ``length`` tokens."""
        return [self._allowed(length, weight) for weight in self.weights or [None] * heads]

    def _allowed(self, length: int | Number, weight: float | None) -> int | Number:
        always = self.window + self.sinks
        if weight is None:
            return clamp(budget(self.top_k, length), always, _NO_BOUND)
        tokens = self.top_k * length if isinstance(self.top_k, float) else self.top_k
        return always + max(math.floor(weight * (tokens - always) + 1e-9), 0)  # grows by one a token at most

    def _over(self, live: Number, length: Number) -> bool | Tensor:
        return live > self.allowed(length)

    # Scores

    def channels(self, geometry: Geometry) -> dict[str, Channel]:
        if self._artefact is not None:
            shapes = (geometry.num_kv_heads, geometry.head_dim, geometry.value_dim)
            trained = (self._artefact.num_kv_heads, self._artefact.head_dim, self._artefact.value_dim)
            if shapes != trained:
                raise ValueError(
                    f"{self.name}: file {self.file!r} is for layers of {trained[0]} KV heads with keys and values of "
                    f"{trained[1]} and {trained[2]} dimensions, not {shapes[0]} of {shapes[1]} and {shapes[2]}"
                )
        return {"score": Channel()}

    @property
    def reach(self) -> int:
        """A token's score depends on this many tokens after it and on equally many before it."""
        return 0 if self._artefact is None else self._artefact.reach

    @property
    def observation(self) -> Observation:
        return Observation((LTE, self.score, self.file, self.sinks))

    def observe(self, cache: SlotCache, q: Tensor, attended: ops.Attended, scaling: float) -> None:
        tokens = min(q.shape[2] + 2 * self.reach, cache.used)  # new tokens, and older ones that they complete
        self._write_scores(cache, tokens)

    def _write_scores(self, cache: SlotCache, tokens: int) -> None:
        """Score the tokens whose neighbours on both sides are among the newest ``tokens`` of each row."""
        scores, reach = cache.channel("score"), self.reach
        fields = (cache.keys, cache.values, cache.positions, scores)
        slots = real = None
        if cache.full and cache.ordered:
            k, v, positions, old = (x[:, :, -tokens:] for x in fields)
        else:
            slots = cache.positions.topk(tokens, -1).indices.flip(-1)
            k, v, positions, old = gather_fields(fields, slots, complete=True)
            real = positions[:, 0] >= 0  # every KV head holds the same newest tokens; short rows have fewer
        index = torch.arange(tokens, device=positions.device)
        before, after = (index >= reach) | (index >= positions), positions < positions[:, :, -1:] + 1 - reach
        new = torch.where(before & after & (positions >= 0), self._score(k, v, positions, real), old)
        if slots is None:
            old.copy_(new)
        else:
            scores.scatter_(2, slots, new)

    def _score(self, k: Tensor, v: Tensor, positions: Tensor, real: Tensor | None) -> Tensor:
        """Scores of tokens in their order, fp32 ``[B, Hkv, L]``; sinks have the score infinity."""
        if self._artefact is None:
            wide = torch.promote_types(k.dtype, torch.float32)
            found = -torch.linalg.vector_norm(k, dim=-1, dtype=wide).float()
        else:
            found = self._artefact.score(self.layer, k, v, positions, real)
        return found.masked_fill(positions < self.sinks, float("inf"))

    # Eviction

    def prompt_end(self, cache: SlotCache, scaling: float) -> Tensor | None:
        length = cache.lengths[0]
        if not self.evicts.unevenly:
            return keep_heavy(cache, cache.channel("score"), self.allowed(length), self.window)
        allowed = self.allowed_by_head(length, cache.geometry.num_kv_heads)
        if cache.used <= min(allowed) and not cache.uneven:
            return None
        window = recent(cache, min(self.window, length))
        scores = cache.channel("score").masked_fill(window | (cache.positions < 0), float("-inf"))
        room = [max(min(own, length) - self.window, 0) for own in allowed]
        order = scores.sort(dim=-1, descending=True, stable=True)
        best = order.indices[..., : max(room)].masked_fill(order.values[..., : max(room)].isneginf(), -1)
        beyond = torch.arange(max(room), device=cache.device) >= cache.plan.constant(room)[:, None]
        newest = cache.positions.topk(min(self.window, length), -1).indices
        return torch.cat([best.masked_fill(beyond, -1), newest], -1)

    def learn(self, cache: SlotCache, choice: ops.Choice, attended: ops.Attended) -> None:
        self._write_scores(cache, min(2 * self.reach + 1, cache.used))

    def evict(self, cache: SlotCache, scaling: float) -> None:
        if not self.evicts.unevenly:
            evict_weakest(cache, cache.channel("score"), self._over, self.window)
            return
        heads = cache.geometry.num_kv_heads
        before = [[min(n - 1, own) + 1 for own in self.allowed_by_head(n - 1, heads)] for n in cache.lengths]
        most = [self.allowed_by_head(n, heads) for n in cache.lengths]
        over = [[own > limit for own, limit in zip(*row)] for row in zip(before, most)]
        cache.evict_by_head(over, before, cache.channel("score"), cache.plan.per_row(operator.sub, self.window))

    @functools.cached_property
    def replay(self) -> Replay:  # type: ignore[override]
        if self.allocation == "uniform":
            return Replay()
        return Replay(f"{self.name} with allocation={self.allocation} asks the host for the budget of each layer")


_NO_BOUND = 1 << 62


@functools.lru_cache(maxsize=16)
def _weights(scores: eviction_scores.EvictionScores, share: float, among: tuple[int, ...]) -> Tensor:
    """Budgets of the heads over the budget of all, fp64 ``[layers, Hkv]``; none exceeds the tokens that there are."""
    return scores.shares(share, among) / share
