"""The settings of LuKA that its helpers need, without the method."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Paging:
    """Where pages end, what stands for them, and what is kept of them: see the settings of the same names."""

    name: str
    """Of the method, for errors."""
    spec: str
    """Of the method: the key of what a step computes once for all its layers."""
    sizes: tuple[int, ...]
    """Tokens of a page or node on each level, the finest first."""
    sinks: int
    tail: int
    compress_every: int
    segmenter: str
    page_deviation: float
    compressor: str
    temperature: float
    zero_values: bool
    seed: int
    window: int
    spread: bool
    """Whether nodes keep the variance of the keys beneath."""
    bounds: bool
    """Whether they keep the smallest and the largest of the keys beneath."""
    records: bool
    """Whether they keep low-rank summaries of the keys beneath."""
    entropy: bool
    """Whether they keep the entropy of their children's weights."""
    mass: bool
    """Whether accumulated attention is kept: :attr:`LuKA.weighs_mass`."""
    recent: bool
    """Whether recent attention is kept: :attr:`LuKA.looks_back`."""

    @property
    def fixed(self) -> bool:
        """Whether all pages have one size."""
        return self.segmenter == "fixed"


@dataclass(frozen=True)
class Budgets:
    """How many nodes may be refined: see the settings of the same names."""

    refine: str
    top_k: int | float
    expand: int | float
    max_refined: int | float
    epsilon: float
    pool: str


def nodes_over(sizes: tuple[int, ...], level: int, pages: int | Tensor) -> int | Tensor:
    """Complete nodes of a level over ``pages`` pages."""
    return pages // (sizes[level] // sizes[0])
