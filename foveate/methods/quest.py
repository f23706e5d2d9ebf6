"""Quest: pages by the largest logit that any of their keys can have."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import ClassVar

from foveate.methods._page_summaries import PageBoxes
from foveate.methods.base import About, Method, register, setting
from foveate.methods.dense import Dense
from foveate.methods.pages import PageMethod


@register
class Quest(PageMethod):
    """Each query head reads the pages whose keys could answer it best, by the corners of the box around their keys.

    The first layers are dense, and so is the prefill. At least three pages are read. The page that is still being
    filled competes with the others, by the box around the keys that it has.
    """

    name: ClassVar[str] = "quest"
    about: ClassVar[About] = About(
        "Quest, Tang et al. 2024, arXiv:2406.10774",
        full_budget={"top_k": 1.0},
        small_budget={"top_k": 9, "page_size": 3, "dense_layers": 0},
    )
    fewest: ClassVar[int] = 3

    dense_layers: int = setting(2, "first layers that read all keys")

    def __post_init__(self):
        super().__post_init__()
        self._check_count("dense_layers")

    def for_layer(self, layer: int, num_layers: int, among: Sequence[int] | None = None) -> Method:
        return Dense() if layer < self.dense_layers else self

    @functools.cached_property
    def summaries(self) -> PageBoxes:
        return PageBoxes(self.page_size)
