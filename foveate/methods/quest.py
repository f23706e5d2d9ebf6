"""Quest: pages by the largest logit that any of their keys can have."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveate.methods._boxes import PageBoxes
from foveate.methods._paged import SelectPages
from foveate.methods.base import setting
from foveate.methods.budgets import Number
from foveate.state import Channel, Geometry, SlotCache


@dataclass(frozen=True)
class Quest(SelectPages):
    """Each query head reads the pages whose keys could answer it best, by the corners of the box around their keys.

    The first layers are dense, and so is the prefill. The page that is still being filled competes with the others, by
    the box around the keys that it has.
    """

    name: ClassVar[str] = "quest"
    source: ClassVar[str] = "Quest, Tang et al. 2024, arXiv:2406.10774"
    full_budget: ClassVar[dict] = {"top_k": 1.0}
    small_budget: ClassVar[dict] = {"top_k": 6, "page_size": 3, "min_pages": 1, "dense_layers": 0}

    min_pages: int = setting(3, "least number of pages")
    pool: str = setting(
        "head", "who chooses pages: each query head, or the heads of a kv_head together (by the largest)"
    )
    dense_layers: int = setting(2, "first layers that read all keys")

    def __post_init__(self):
        super().__post_init__()
        self._check_count("min_pages", 1)
        self._check_choice("pool", "head", "kv_head")

    @functools.cached_property
    def boxes(self) -> PageBoxes:
        """What is kept of pages."""
        return PageBoxes(self.page_size)

    def channels(self, geometry: Geometry) -> dict[str, Channel]:
        return {} if self.dense else self.boxes.channels(geometry)

    def prompt_end(self, cache: SlotCache, scaling: float) -> None:
        if not self.dense:
            self.boxes.prompt_end(cache)

    def summarise_newest(self, cache: SlotCache) -> None:
        self.boxes.write_newest(cache)

    def choose(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        bounds = self.boxes.bounds(cache, q, scaling, self.pool)
        pages = self._best(cache, bounds.flatten(1, 2) if self.pool == "head" else bounds)
        cache.count_read(self._keys_of(cache, pages))
        return pages

    def scored(self, tokens: Number, geometry: Geometry, dtype: torch.dtype) -> float | Tensor:
        """Full pages count by their two corners, each of a key's size; the page that is being filled, by the keys
        around which its box is made."""
        if self.dense:
            return super().scored(tokens, geometry, dtype)
        return geometry.key_share * (2 * (tokens // self.page_size) + tokens % self.page_size)

    def least(self, length: Number) -> Number:
        return self.min_pages

    def most_of_least(self) -> int:
        return self.min_pages
