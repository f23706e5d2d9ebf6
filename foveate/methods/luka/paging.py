"""LuKA's settings as its helpers get them: :class:`Paging` for making pages, :class:`Budgets` for refining them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Paging:
    """Where pages end, how they are summarised, and which fields a summary has.

    Fields without a docstring are the settings of :class:`~foveate.methods.luka.LuKA` of the same names.
    """

    name: str
    """Of the method, for errors."""
    spec: str
    """Of the method; a key by which the layers of a step share results."""
    sizes: tuple[int, ...]
    """Tokens under a node of each level, level 0 (pages) first."""
    sinks: int
    tail: int
    compressor: str
    window: int
    spread: bool
    """Whether nodes keep the variance of the keys under them."""
    records: bool
    """Whether nodes keep low-rank summaries of the keys under them."""
    entropy: bool
    """Whether nodes keep the entropy of the weights of the tokens under them."""
    mass: bool
    """Whether accumulated attention mass is kept for tokens and nodes: :attr:`LuKA.weighs_mass`."""
    recent: bool
    """Whether a running average of attention is kept for tokens and nodes: :attr:`LuKA.looks_back`."""

    @property
    def compress_every(self) -> int:
        """Decoded tokens between two rounds of making pages: never more than a round's nodes hold."""
        return min(16, self.sizes[-1])


@dataclass(frozen=True)
class Budgets:
    """How many nodes may be refined: the settings of :class:`~foveate.methods.luka.LuKA` of the same names."""

    top_k: int | float
    expand: int | float


def nodes_over(sizes: tuple[int, ...], level: int, pages: int | Tensor) -> int | Tensor:
    """Complete nodes of a level over ``pages`` pages, an int or an int64 tensor."""
    return pages // (sizes[level] // sizes[0])
