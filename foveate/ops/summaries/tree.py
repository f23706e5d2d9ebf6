"""Summaries of pages above the keys of a cache, level by level, and which of them each row has (LuKA)."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from foveate.ops.compress.low_rank import PageRecord
from foveate.ops.compress.reference import Nodes


class Level(NamedTuple):
    """Summaries of one level. Entries behind those that a row has are not read and may hold anything finite."""

    nodes: Nodes
    """Fields ``[B, Hkv, N, ...]``; what the rule does not look at is None."""
    size: int
    """Tokens beneath a node, where all have as many."""
    tokens: Tensor | None = None
    """fp32 ``[B, Hkv, N]``: tokens beneath each node; None where pages have one size."""
    recent: Tensor | None = None
    """fp32 ``[B, Hkv, N]``: attention that each node got lately, the mean over the group; None where it does not count.
    """

    records: Tensor | None = None
    """uint8 ``[B, Hkv, N, record.bytes]``: low-rank summaries of all the keys beneath; None where the rule does not
    score by them."""
    record: PageRecord | None = None
    """How these are stored."""

    @property
    def reads(self) -> float:
        """Bytes read of a summary, in those of a raw token (its key and its value)."""
        k, v = self.nodes.k, self.nodes.v
        own = 0.0 if self.record is None else self.record.bytes / ((k.shape[3] + v.shape[3]) * k.element_size())
        return 1.0 + 0.5 * (self.nodes.spread is not None) + 1.0 * (self.nodes.low is not None) + own


@dataclasses.dataclass(frozen=True)
class Rows:
    """Which slots and nodes each row has. Masks are None where all rows are alike, and made when they are asked for."""

    numbers: Tensor
    """int64 ``[2 + 2 * levels, B]`` on the device of the keys: slots in use; the first slot behind the pages, 0 in a
    row that has none; how many nodes of each level, the finest first, may be refined; and how many there are."""
    most: tuple[int, ...]
    """Places for nodes that are refined, by level."""
    places: int
    """Places for nodes of the top level."""
    width: int
    """Places for raw tokens."""
    sinks: int
    """Slots before the first page."""
    start: int | None
    """The first slot behind the pages; None where rows differ."""
    alike: bool
    """Whether as many nodes may be refined in all rows."""
    means: tuple[float, float] | None
    """Nodes of the top level, and raw tokens: means over the rows; None where the device alone knows."""
    captured: bool = False
    """Whether the step is captured, and later replayed with other numbers: no width may depend on those of now."""

    @property
    def nodes(self) -> float | Tensor:
        """Nodes of the top level: the mean over the rows, or ``[B, 1]``."""
        return self.numbers[-1].double()[:, None] if self.means is None else self.means[0]

    @property
    def raw(self) -> float | Tensor:
        """Raw tokens, likewise."""
        if self.means is not None:
            return self.means[1]
        lengths, start = self.numbers[:2]
        return (lengths - start + self.sinks * (start > 0)).double()[:, None]

    @property
    def raw_slots(self) -> Tensor | None:
        """int64 ``[B, 1, width]``: sinks and tail; a row's last slot where it has fewer."""
        return self._masks[0]

    @property
    def raw_hidden(self) -> Tensor | None:
        """bool ``[B, 1, 1, width]``: places of ``raw_slots`` that are not used."""
        return self._masks[1]

    @property
    def hidden(self) -> Tensor | None:
        """bool ``[B, 1, 1, places]``: nodes of the top level that a row does not have."""
        return self._masks[2]

    @functools.cached_property
    def _masks(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if self.start is not None:
            return None, None, None
        lengths, start, nodes = (self.numbers[n][:, None] for n in (0, 1, -1))
        with torch.inference_mode(False):  # they are kept for steps that may be outside of it
            raw, top = (torch.arange(number, device=lengths.device) for number in (self.width, self.places))
            slots = torch.where((start > 0) & (raw >= self.sinks), start + raw - self.sinks, raw)
            return slots.minimum(lengths - 1)[:, None], (slots >= lengths)[:, None, None], (top >= nodes)[:, None, None]


class Tree(NamedTuple):
    """Summaries, summaries of these, and so on, above the keys of a cache.

    The first ``sinks`` slots stay raw. Pages of keys follow without gaps, and raw slots behind them. Node n of a level
    stands for the nodes ``n * branch .. (n + 1) * branch - 1`` of the level below.
    """

    levels: tuple[Level, ...]
    """The finest first."""
    rows: Rows
    width: int
    """Tokens of a page, or the most that one has."""
    page_end: Tensor | None = None
    """``[B, Hkv, pages]``: the exclusive ends of pages, where they are of different sizes."""

    @property
    def sinks(self) -> int:
        """Slots before the first page."""
        return self.rows.sinks

    def branch(self, level: int) -> int:
        """Children of a node above the pages."""
        return self.levels[level].size // self.levels[level - 1].size
