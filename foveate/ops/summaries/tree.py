"""The input of :func:`attend_summaries`: a tree of summaries above a cache's keys, and the numbers of each row."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from foveate.ops.compress.low_rank import PageRecord
from foveate.ops.compress.reference import Nodes


class Level(NamedTuple):
    """The nodes of one level. Entries after a row's last node are not used and may hold anything finite."""

    nodes: Nodes
    """Fields ``[B, Hkv, N, ...]``. A field that the rule does not need is None."""
    size: int
    """Number of tokens under a node."""
    recent: Tensor | None = None
    """fp32 ``[B, Hkv, N]``: moving average of the attention to each node, see :class:`Sums`; None: not kept."""
    records: Tensor | None = None
    """uint8 ``[B, Hkv, N, record.bytes]``: low-rank summaries of the keys under each node; None unless the rule scores
    by them."""
    record: PageRecord | None = None
    """Format of ``records``."""

    @property
    def reads(self) -> float:
        """Bytes read of a node, divided by the bytes of a token's key and value (D = Dv, except for records)."""
        k, v = self.nodes.k, self.nodes.v
        own = 0.0 if self.record is None else self.record.bytes / ((k.shape[3] + v.shape[3]) * k.element_size())
        return 1.0 + 0.5 * (self.nodes.spread is not None) + own


@dataclasses.dataclass(frozen=True)
class Rows:
    """The numbers of slots and nodes that each row has, of nodes that it may refine, and capacities for all rows.

    ``most``, ``places`` and ``width`` are capacities: in a captured step they suffice for all later replays.
    """

    numbers: Tensor
    """int64 ``[2 + 2 * levels, B]`` on the device, for each row: the slots in use; the first slot after the pages, 0
    without pages; for each level, level 0 first, the nodes that may be refined; and in the same order the nodes that
    exist."""
    most: tuple[int, ...]
    """For each level, level 0 first, the capacity for refined nodes."""
    places: int
    """Capacity for nodes of the top level."""
    width: int
    """Capacity for sinks and tail."""
    sinks: int
    """Number of slots before the first page."""
    start: int | None
    """The first slot after the pages; None if rows differ."""
    alike: bool
    """Whether all rows may refine equal numbers of nodes."""
    means: tuple[float, float] | None
    """Means over the rows: of the number of nodes of the top level, and of sinks and tail. None if only the device
    knows them."""

    @property
    def nodes(self) -> float | Tensor:
        """Number of nodes of the top level: the mean over the rows, or ``[B, 1]``."""
        return self.numbers[-1].double()[:, None] if self.means is None else self.means[0]

    @property
    def raw(self) -> float | Tensor:
        """Number of tokens of sinks and tail: the mean over the rows, or ``[B, 1]``."""
        if self.means is not None:
            return self.means[1]
        lengths, start = self.numbers[:2]
        return (lengths - start + self.sinks * (start > 0)).double()[:, None]

    @property
    def raw_slots(self) -> Tensor | None:
        """int64 ``[B, 1, width]``: slots of sinks and tail; unused places have a row's last slot. None: all rows are
        alike, and sinks and tail are the first ``sinks`` slots and the slots from ``start`` on."""
        return self._masks[0]

    @property
    def raw_hidden(self) -> Tensor | None:
        """bool ``[B, 1, 1, width]``: True at unused places of ``raw_slots``; None: all rows are alike."""
        return self._masks[1]

    @property
    def hidden(self) -> Tensor | None:
        """bool ``[B, 1, 1, places]``: True for nodes of the top level that a row does not have; None: rows are
        alike."""
        return self._masks[2]

    @functools.cached_property
    def _masks(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if self.start is not None:
            return None, None, None
        lengths, start, nodes = (self.numbers[n][:, None] for n in (0, 1, -1))
        with torch.inference_mode(False):  # cached for later steps, which may run outside inference_mode
            raw, top = (torch.arange(number, device=lengths.device) for number in (self.width, self.places))
            slots = torch.where((start > 0) & (raw >= self.sinks), start + raw - self.sinks, raw)
            return slots.minimum(lengths - 1)[:, None], (slots >= lengths)[:, None, None], (top >= nodes)[:, None, None]


class Tree(NamedTuple):
    """The levels of summaries above the keys of a cache.

    The first ``sinks`` slots are raw; pages follow without gaps; raw slots follow the last page. Node n of a level
    above the pages has the children ``n * branch .. (n + 1) * branch - 1`` on the level below.
    """

    levels: tuple[Level, ...]
    """The levels, level 0 (pages) first."""
    rows: Rows

    @property
    def width(self) -> int:
        """Number of tokens of a page."""
        return self.levels[0].size

    @property
    def sinks(self) -> int:
        """Number of slots before the first page."""
        return self.rows.sinks

    def branch(self, level: int) -> int:
        """Number of children of a node; ``level`` is above the pages."""
        return self.levels[level].size // self.levels[level - 1].size
