"""OmniKV: the context that a few filter layers attend to, for all heads of later layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from foveate import ops
from foveate.methods._anchored import SharedSelection, anchor_role, dense_role, layer_numbers, nearest, reader_role
from foveate.methods._common import scored_lengths
from foveate.methods.base import About, Role, register, setting
from foveate.state import SlotCache


@register
class OmniKV(SharedSelection):
    """Filter layers are dense and choose, at every step, the keys of the highest attention of any head.

    The layers after a filter read these keys with all their heads; those before the first filter, and ``wait`` layers
    after each, in which the chosen keys would be fetched, are dense. The prefill is dense.

    ``score=softmax`` is the selector `softmax_before_last` of the published code, its default. ``score=logit`` is the
    selector `last` of the published configuration, by which heads of large logits choose more of the keys.
    """

    name: ClassVar[str] = "omnikv"
    about: ClassVar[About] = About(
        "OmniKV, Hao et al., ICLR 2025",
        full_budget={"top_k": 1.0},
        small_budget={"top_k": 9, "filters": [0.0], "wait": 0},
    )

    top_k: int | float = setting(0.1, "keys read: a number, or a share of the tokens so far")
    min_k: int = setting(128, "least number of keys when top_k is a share")
    filters: Any = setting(
        (2 / 32, 8 / 32, 18 / 32), "filter layers, or their depths as shares (Llama 8B: 2, 8, 18 of 32)"
    )
    wait: int = setting(1, "dense layers after a filter")
    score: str = setting(
        "softmax",
        "what ranks keys, the largest of any head: attention (softmax), or logit, as in the published configuration",
    )

    pools_layer: ClassVar[bool] = True

    def __post_init__(self):
        self._check_budget("top_k")
        self._check_count("min_k")
        self._check_count("wait")
        self._check_layers("filters")
        self._check_choice("score", "softmax", "logit")

    def role_of(self, layer: int, among: Sequence[int]) -> Role:
        filters = layer_numbers(self, "filters", among)
        chooser = nearest(filters, layer)
        if chooser is None or 0 < layer - chooser <= self.wait:
            return dense_role(layer)
        return anchor_role(layer, dense=True) if layer == chooser else reader_role(layer, chooser)

    def select(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        lengths = scored_lengths(cache)
        pooling = "max" if self.score == "softmax" else "max_logit"
        how = {"logits": cache.logits(scaling), "pooling": pooling, "pool": "layer"}
        scores = ops.pooled_mass(q, cache.view(lengths), **how)
        scores = cache.of_all_heads(scores)
        scores = scores if scores.shape[1] == 1 else scores.amax(1, keepdim=True)
        counts, most = cache.plan.per_row(self.count), self.count(cache.used)
        chosen = ops.topk_rows(scores, counts, most, lengths=lengths, dtype=torch.int32)
        return chosen.expand(-1, cache.geometry.num_kv_heads, -1)
