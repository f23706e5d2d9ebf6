"""Keys chosen in some layers and read in the layers behind them: what Kascade and its kin have in common."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from foveate import ops
from foveate.methods._common import attend_all, count_scored
from foveate.methods.base import Method, Number, budget, clamp, setting
from foveate.state import Geometry, SlotCache
from foveate.state.row_numbers import on_device


class Place(NamedTuple):
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
    before: int | None = None
    """The layer before this one whose choice others read; under a layer that chooses, all of them have done so."""

    @property
    def chooses(self) -> bool:
        return self.anchor == self.layer

    @property
    def reads_another(self) -> bool:
        """Whether the keys are those that an earlier layer has chosen."""
        return self.anchor is not None and not self.chooses


class Selection(NamedTuple):
    """The keys that one layer has chosen for a decoded token, for those behind it."""

    indices: Tensor
    """int ``[B, Hkv, K]``, -1 for none."""
    read: Tensor
    """How many keys these are, ``[B, Hkv]``; counted once for all layers that read them."""

    def to(self, device: torch.device) -> Selection:
        """The same on another device."""
        return Selection(*(x.to(device) for x in self))


@dataclass(frozen=True)
class SelectOnce(Method):
    """A method whose anchor layers choose keys for each decoded token, and whose other layers read the same."""

    stateful: ClassVar[bool] = False
    stands_in: ClassVar[bool] = True
    graphs: ClassVar[bool] = True
    place: ClassVar[Place] = Place(-1, -1)
    """Set by :meth:`for_layer`; until then the method is like that of a layer that chooses."""

    def place_of(self, layer: int, among: Sequence[int]) -> Place:
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
        return self.place.anchor is not None and not self.place.dense

    def for_layer(self, layer: int, num_layers: int, among: Sequence[int] | None = None) -> SelectOnce:
        own, among = dataclasses.replace(self), range(num_layers) if among is None else among
        places = {other: self.place_of(other, among) for other in among}
        read = {place.anchor for place in places.values() if place.reads_another}
        before = max((other for other in read if other < layer), default=None)
        own.__dict__["place"] = self.place_of(layer, among)._replace(has_readers=layer in read, before=before)
        return own

    @property
    def reads_other_layers(self) -> bool:
        return self.sparse_prompt and self.place.reads_another

    def scored_share(self, geometry: Geometry, dtype: torch.dtype) -> float:
        """A layer that chooses scores keys without their values; a dense one reads all keys and values anyway."""
        return geometry.key_share if self.place.chooses and not self.place.dense else 0.0

    def decode(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        place = self.place
        if place.anchor is None or (place.dense and not place.has_readers):
            return attend_all(cache, q, scaling).out
        if place.chooses and place.dense:
            indices, out = self.select_densely(cache, q, scaling)
            self._hand_on(cache, Selection(indices, self._read(cache, indices)))
            return out
        heads = None
        if place.chooses:
            indices = self.select(cache, q, scaling)
            read = self._read(cache, indices)
            self._hand_on(cache, Selection(indices, read))
            cache.count_read(read)
            count_scored(self, cache)
        else:
            (indices, read), heads = self._handed_on(cache)
            cache.counters.indices_reused += cache.batch_size
            cache.count_read(read if heads is None else read.index_select(1, heads))
        how = {"scaling": scaling, "heads": heads, "sink_logits": cache.sink_logits, "softcap": cache.softcap}
        return ops.attend_indices(q, cache.keys, cache.values, indices, **how).out

    def stand_in(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
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
        """How many keys are read, ``[B, Hkv]``."""
        return (indices >= 0).sum(-1)

    def _hand_on(self, cache: SlotCache, selection: Selection | ops.TileKeys) -> None:
        """For the layers that read it, if any."""
        if self.place.has_readers:
            own, before = ((self.name, layer) for layer in (self.place.layer, self.place.before))
            cache.hand_on(own, selection, instead_of=before)

    def _handed_on(self, cache: SlotCache) -> tuple[Any, Tensor | None]:
        """The anchor's selection, and which of its heads each of this layer reads; None: its own."""
        selection, heads = cache.handed_on((self.name, self.place.anchor)).to(cache.device), self.place.heads
        if heads is None:
            return selection, None
        number = cache.geometry.num_kv_heads
        if len(heads) != number or not all(head in range(number) for head in heads):
            raise ValueError(
                f"{self.name}: heads of layer {self.place.layer} must be {number} numbers below {number}, "
                f"one for each KV head, not {list(heads)}"
            )
        return selection, cache.on_device(list(heads))


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
    """The last of some layers, ascending, that is not behind a layer; None if all are."""
    index = bisect.bisect_right(choosers, layer) - 1
    return choosers[index] if index >= 0 else None


@dataclass(frozen=True)
class TopKByMass(SelectOnce):
    """Keys by their attention mass, which is computed exactly, pooled over the queries that share them.

    The mean of attention goes to the queries that attend to few keys; that of its square root lets each of them have
    keys of its own, as many as it attends to.
    """

    exact_anchors: ClassVar[bool] = False
    """Whether layers that choose read all keys in prompts."""

    top_k: int | float = setting(0.1, "keys read: a number, or a share of the tokens so far")
    min_k: int = setting(128, "least number of keys when top_k is a share")
    top_p: float = setting(1.0, "attention mass after which no more keys are chosen, however many top_k allows")
    pool: str = setting("kv_head", "whose attention is averaged: the heads of each kv_head, or of the whole layer")
    pooling: str = setting(
        "post_softmax", "what is averaged: attention (post_softmax), its square root (sqrt) or queries (pre_softmax)"
    )
    decode_only: bool = setting(False, "read prompts densely")
    tile: int = setting(128, "queries of a prompt that share their keys, the heads of a group counted")
    rest: str = setting(
        "none",
        "what stands for a prompt's keys that are not chosen: none, or their mean, counted as often as they are",
        before="none",
    )
    score_queries: float = setting(
        1.0, "share of a tile's queries whose attention is averaged: 1.0, or less (approximate)", later=True
    )
    tile_pooling: str = setting(
        "mean", "a key's score for a prompt's tile: the mean attention of its queries, or the largest (max)", later=True
    )
    dense_last: int = setting(0, "last tokens of a prompt, such as its question, that read all keys", later=True)
    window: int = setting(0, "keys right before a prompt's tile that are chosen first, whatever their mass", later=True)

    def __post_init__(self):
        self._check_budget("top_k")
        self._check_count("min_k")
        top_p = isinstance(self.top_p, float) and 0 < self.top_p <= 1
        self._check("top_p", top_p, "a float in (0, 1]")
        self._check_choice("pool", "kv_head", "layer")
        self._check_choice("pooling", "post_softmax", "sqrt", "pre_softmax")
        self._check("top_p", self.top_p == 1 or self.pooling == "post_softmax", f"1.0 with {self.pooling} pooling")
        self._check("decode_only", isinstance(self.decode_only, bool), "true or false")
        self._check_count("tile", 1)
        share = isinstance(self.score_queries, float) and 0 < self.score_queries <= 1
        self._check("score_queries", share, "a float in (0, 1]")
        if self.score_queries < 1:
            dense = self.decode_only or self.pooling == "pre_softmax"
            self._check("score_queries", not dense, "1.0 with decode_only, and with pre_softmax pooling")
        self._check_choice("tile_pooling", "mean", "max")
        if self.tile_pooling == "max":
            other = self.decode_only or self.pooling == "pre_softmax" or self.top_p < 1
            self._check("tile_pooling", not other, "mean with decode_only, pre_softmax pooling, or top_p below 1.0")
        self._check_choice("rest", "none", "mean")
        self._check(
            "rest", self.rest == "none" or not self.decode_only, "none with decode_only: prompts are read densely"
        )
        for name in ("dense_last", "window"):
            self._check_count(name)
            dense = self.decode_only and getattr(self, name) > 0
            self._check(name, not dense, "0 with decode_only: prompts are read densely")

    @property
    def causal_granularity(self) -> int:  # type: ignore[override]
        """The queries of a tile choose together."""
        return 1 if self.decode_only else self.tile

    # Decode

    def select(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        num_kv_heads = cache.geometry.num_kv_heads
        if self.pooling == "pre_softmax":
            rows = ops.fold_group(q, num_kv_heads)
            mean = rows.float().mean(2, keepdim=True).to(rows.dtype)
            scores = ops.key_logits(mean, cache.keys, scaling, cache.softcap)[:, :, 0]
            holes = cache.holes()
            scores = scores if holes is None else scores.masked_fill_(~holes, float("-inf"))
        else:
            mask, lengths = cache.stored()
            how = {"pooling": self.pooling, "pool": self.pool, "mask": mask, "lengths": lengths}
            how |= {"sink_logits": cache.sink_logits, "softcap": cache.softcap}
            k, key_scales = self._scored_keys(cache)
            scores = ops.pooled_mass(q, k, scaling=scaling, key_scales=key_scales, **how)
        return self._chosen(cache, scores)

    def _scored_keys(self, cache: SlotCache) -> tuple[Tensor, Tensor | None]:
        """The keys whose mass a decoded token goes by, ``[B, Hkv, used, D]``, and the scales of a copy in fp8."""
        return cache.keys, None

    def select_densely(self, cache: SlotCache, q: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        if self.pooling == "pre_softmax":
            return super().select_densely(cache, q, scaling)
        mask, lengths = cache.stored()
        cache.count_read(cache.held(mask, lengths))
        mask = None if mask is None else mask[:, :, None]
        how = {"pooling": self.pooling, "pool": self.pool, "mask": mask, "lengths": lengths}
        how |= {"sink_logits": cache.sink_logits, "softcap": cache.softcap}
        attended = ops.attend_pooled(q, cache.keys, cache.values, scaling=scaling, **how)
        return self._chosen(cache, attended.mass), attended.out

    def _chosen(self, cache: SlotCache, scores: Tensor) -> Tensor:
        """The keys of each row by their scores ``[B, Hkv or 1, N]``: ``[B, Hkv, K]``."""
        alike = cache.step is None and len(set(cache.lengths)) == 1
        best = self._best(scores, cache.each_row(self.count), cache.most(self.count), alike)
        return best.expand(-1, cache.geometry.num_kv_heads, -1)

    def _read(self, cache: SlotCache, indices: Tensor) -> Tensor:
        if self.top_p < 1 or cache.stored()[0] is not None:
            return super()._read(cache, indices)
        return cache.each_row(self.count)[:, None].expand(indices.shape[:2])  # one number for all layers of a step

    def _best(self, scores: Tensor, counts: Tensor, most: int, alike: bool) -> Tensor:
        """The keys of the highest scores ``[B, Hkv, N]``: ``[B, Hkv or 1, K]``.

        Args:
            counts: int64 ``[B]``: how many in each row.
            most: no row has more.
            alike: whether all have as many.
        """
        if self.pool == "layer" and scores.shape[1] > 1:
            scores = scores.mean(1, keepdim=True)
        if self.top_p < 1:
            order, enough = ops.by_mass(scores.clamp_min(0.0), 1 - self.top_p)
            return ops.first_of(order, enough.clamp_min(1).minimum(counts[:, None]), most)
        if scores.is_cuda or not (alike and most):
            return ops.topk_rows(scores, counts, most, dtype=torch.int32)
        return ops.topk(scores, most)

    # Prompt

    @property
    def sparse_prompt(self) -> bool:
        """Also in a dense layer that chooses for others."""
        return not self.decode_only and self.place.anchor is not None

    def prompt_tile(self, group: int) -> int:
        return max(1, self.tile // group) if self.sparse_prompt else 1

    def prompt(self, cache: SlotCache, q: Tensor, scaling: float) -> ops.Attended:
        place, length = self.place, q.shape[2]
        offset = cache.used - length
        sparse = min(max(length + cache.to_come - self.dense_last, 0), length)  # the first of them, in tiles
        idle = (place.dense or self.exact_anchors) and place.chooses and not place.has_readers
        if self.decode_only or place.anchor is None or idle or not sparse:
            return super().prompt(cache, q, scaling)
        tile, heads, first = self.prompt_tile(cache.geometry.group), None, q[:, :, :sparse]
        how = {"scaling": scaling, "sink_logits": cache.sink_logits, "softcap": cache.softcap}
        if place.chooses:
            attended = ops.attend_causal(q, cache.keys, cache.values, offset=offset, need_lse=True, **how)
            lse, exact = attended.lse[:, :, :sparse], place.dense or self.exact_anchors
            if not exact:  # the dense output is freed before scores are there
                outs, attended = [attended.out[:, :, sparse:].clone()], None
            with torch.no_grad():
                chosen = self.select_tiles(cache, first, lse, tile, scaling, offset)
            self._hand_on(cache, chosen)
            if exact:
                return attended
        else:
            chosen, heads = self._handed_on(cache)
            last = [q[:, :, sparse:]] if sparse < length else []
            outs = [ops.attend_causal(x, cache.keys, cache.values, offset=offset + sparse, **how).out for x in last]
        how |= {"tile": tile, "offset": offset, "heads": heads, "rest": self.rest == "mean"}
        tiles = ops.attend_tile_keys(first, cache.keys, cache.values, chosen, **how)
        return ops.Attended(torch.cat([tiles.out, *outs], 2)) if sparse < length else tiles

    def select_tiles(
        self, cache: SlotCache, q: Tensor, lse: Tensor, tile: int, scaling: float, offset: int
    ) -> ops.TileKeys:
        """Keys before each tile of a prompt. Scores are there of a few tiles at a time."""
        how = {"tile": tile, "offset": offset, "softcap": cache.softcap}
        if self.pooling == "pre_softmax":
            blocks = ops.tile_logits(q, cache.keys, scaling=scaling, **how)
        else:
            power = 0.5 if self.pooling == "sqrt" else 1.0  # exp(power (logit - lse)): attention to that power
            how["softcap"] = None if cache.softcap is None else power * cache.softcap
            how |= {"share": self.score_queries, "largest": self.tile_pooling == "max"}
            blocks = ops.tile_mass(q, cache.keys, power * lse, scaling=power * scaling, **how)
        start, end = offset // tile, -(-(offset + q.shape[2]) // tile)
        counts = [self.count(tile * t) for t in range(start, end)]
        places = tuple(itertools.accumulate(counts, initial=0))
        ends = tuple(itertools.accumulate((-(-tile * t // ops.WORD_KEYS) for t in range(start, end)), initial=0))
        heads = 1 if self.pool == "layer" else cache.geometry.num_kv_heads
        words = torch.zeros(len(q), heads, ends[-1], dtype=torch.int32, device=q.device)
        chosen = ops.TileKeys(words, on_device(ends, q.device), on_device(places, q.device), places)
        for first, scores in blocks:
            some = slice(first - start, first - start + scores.shape[2])
            own, begins = counts[some], chosen.begins[some.start : some.stop + 1]
            if self.pool == "layer" and self.tile_pooling == "max":
                scores = scores.amax(1, keepdim=True)
            if self.window:
                scores = self._window_first(scores, first, tile, own)
            how = (on_device(tuple(own), q.device), max(own), len(set(own)) == 1)
            for row in range(len(q)):
                best = self._best(scores[row].transpose(0, 1), *how)
                ops.set_bits(words[row, None], best.transpose(0, 1)[None], begins)
            del scores, best  # before those of the next tiles are there
        return chosen

    def _window_first(self, scores: Tensor, first: int, tile: int, counts: Sequence[int]) -> Tensor:
        """Scores ``[B, H, T, N]``, infinite for keys right before each tile: no more of them than are chosen."""
        begins = tile * torch.arange(first, first + len(counts), device=scores.device)[:, None]
        window = on_device(tuple(min(self.window, count) for count in counts), scores.device)[:, None]
        key = torch.arange(scores.shape[-1], device=scores.device)
        return scores.masked_fill((key < begins) & (key >= begins - window), float("inf"))
