"""Making pages: at which tokens they end, and the summaries of each level that stand for them.

Terms are defined in :mod:`foveate.methods.luka`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveate import ops
from foveate.methods.base import Replay
from foveate.methods.budgets import Number
from foveate.methods.luka.new_pages import RaggedPages, UniformPages
from foveate.state import Channel, Geometry, RowNumber, SlotCache
from foveate.state.step_plan import StepPlan

_record = functools.cache(ops.PageRecord)  # whose layout is computed once

_TEMPERATURE = 7.0
"""Temperature tau of the attention-weighted compressor (LuKA, section 3.2)."""


@dataclass(frozen=True)
class PageLevels:
    """Makes the pages of one LuKA method and the levels above them. All state is in the cache.

    Slots ``0 .. sinks - 1`` stay raw; pages follow without gaps. Node n of a level has the children ``n * branch .. (n
    + 1) * branch - 1`` on the level below. Pages are made in groups. A group is the pages under one node of the top
    level, and is made together with all nodes above these pages. Tokens that do not fill a group stay raw. Row numbers:
    ``pages`` is a row's number of pages, ``paged`` the first slot after them (0 without pages).
    """

    spec: str
    """The method's spec, a key by which the layers of a step share results."""
    sizes: tuple[int, ...]
    """Tokens under a node of each level, level 0 (pages) first."""
    sinks: int
    tail: int
    """Number of newest slots that stay raw, see :class:`~foveate.methods.luka.LuKA`."""
    spread: bool
    """Whether nodes keep the variance of the keys under them."""
    records: bool
    """Whether nodes keep low-rank summaries of the keys under them."""
    entropy: bool
    """Whether nodes keep the entropy of the weights of the tokens under them."""
    mass: bool
    """Whether accumulated attention mass is kept for tokens and nodes, and weighs summaries."""
    recent: int
    """Number of queries in the running average of attention that tokens and nodes keep; 0: no average is kept."""

    @property
    def every(self) -> int:
        """Decoded tokens between two rounds of making pages: never more than the tokens of one round's pages."""
        return min(16, self.sizes[-1])

    @property
    def group(self) -> int:
        """The number of pages under a node of the top level. These pages are made together."""
        return self.pages_under(len(self.sizes) - 1)

    def pages_under(self, level: int) -> int:
        """The number of pages under a node of a level."""
        return self.sizes[level] // self.sizes[0]

    def branch(self, level: int) -> int:
        """The number of children of a node; ``level`` is above the pages."""
        return self.sizes[level] // self.sizes[level - 1]

    def count(self, level: int, pages: Number) -> Number:
        """The number of complete nodes of a level over ``pages`` pages, an int or an int64 tensor."""
        return pages // self.pages_under(level)

    def most(self, length: int) -> int:
        """An upper bound of the number of pages of a row of ``length`` tokens."""
        return max(0, length - self.tail - self.sinks) // self.sizes[0]

    @property
    def most_raw(self) -> int:
        """An upper bound of the number of a row's tokens that no page holds, just before pages are made."""
        return self.sinks + self.tail + self.sizes[-1] + self.every

    def even(self, cache: SlotCache) -> bool:
        """Whether all rows have the same length and the same pages."""
        return cache.plan.alike and all(len(set(cache.rows[name])) == 1 for name in ("pages", "paged"))

    def channels(self, geometry: Geometry) -> dict[str, Channel | RowNumber]:
        """See :meth:`Method.channels`: for each level a channel for each field, with room for all possible nodes."""
        channels = {}
        for level, per in enumerate(self.sizes):
            vector = Channel((geometry.head_dim,), per=per, dtype=None, recomputed=True)
            number = Channel(per=per, recomputed=True)
            fields = {"k": vector, "v": Channel((geometry.value_dim,), per=per, dtype=None, recomputed=True)}
            if self.spread:
                fields["spread"] = vector
            if self.entropy:
                fields["entropy"] = number
            if self.records:
                record = self.record(level, geometry)
                fields["records"] = Channel((record.bytes,), per=per, dtype=torch.uint8, recomputed=True)
            channels |= {self.channel(field, level): channel for field, channel in fields.items()}
            if self.mass and level < len(self.sizes) - 1:
                channels[self.channel("mass", level)] = number
            if self.recent:
                channels[self.channel("recent", level)] = Channel(per=per, least=0.0)
        channels |= {"pages": RowNumber(self.check_numbers), "paged": RowNumber()}
        if self.mass:
            channels["mass"] = Channel(least=0.0)
        if self.recent:
            channels["recent"] = Channel(least=0.0)
            channels["queries"] = Channel((geometry.num_heads, self.recent, geometry.head_dim), per=0, dtype=None)
        return channels

    @staticmethod
    def channel(field: str, level: int) -> str:
        """The name of the channel that holds a field of the nodes of a level."""
        return f"summary_{field}" + (f"_{level}" if level else "")

    def record(self, level: int, geometry: Geometry) -> ops.PageRecord:
        """The format of the low-rank summaries of a level."""
        return _record(geometry.head_dim, self.sizes[level])

    @functools.cached_property
    def fields(self) -> tuple[tuple[str, ...], ...]:
        """For each level, the names of its channels: the fields of :class:`ops.Nodes`, then ``recent`` and ``records``.
        The cache may lack some of these channels."""
        names = (*ops.Nodes._fields, "recent", "records")
        return tuple(tuple(self.channel(name, level) for name in names) for level in range(len(self.sizes)))

    # Making pages

    def extend(self, cache: SlotCache) -> None:
        """Make all groups of pages that fit before the tail, and the nodes above them."""
        if self.even(cache):
            self._extend(cache)
            return
        for b in range(cache.batch_size):
            with cache.row(b) as row:
                self._extend(row)

    def extend_in_step(self, cache: SlotCache) -> None:
        """:meth:`extend` in captured maintenance: for all rows at once, by row numbers on the device.

        A captured graph cannot make a number of pages that depends on the row, so it makes one group in every row. A
        group that is not due yet is not counted in ``pages``. No step reads it, and it is made again when it is due.
        """
        plan = cache.plan
        pages, start, after = plan.cached(("new pages", self.spec), lambda: self._due(plan))
        new = RaggedPages(pages, start, self.group, self.sizes[0], plan, self.spec)
        self._make(cache, new)
        plan.after(("new pages", self.spec), lambda: [plan[name].copy_(after[name]) for name in after])

    def _due(self, rows: Mapping[str, Tensor] | StepPlan) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Decide which rows are due for a group of pages.

        Args:
            rows: row numbers, int64 ``[B]`` for each name.

        Returns:
            ``(pages, start, after)``: each row's pages so far and the first slot of its next page, int64 ``[B]``; and
            the row numbers after the due pages are made.
        """
        pages, paged = rows["pages"].clone(), rows["paged"]
        start = torch.where(paged > 0, paged, self.sinks)
        due = rows["lengths"] - self.tail - start >= self.sizes[-1]
        after = {"pages": pages + due * self.group, "paged": torch.where(due, start + self.sizes[-1], paged)}
        return pages, start, after

    def numbers_after(self, rows: Mapping[str, list[int]]) -> dict[str, list[int]]:
        """The row numbers on the host that equal the row numbers on the device after :meth:`extend_in_step`."""
        numbers = {name: torch.tensor(rows[name]) for name in ("lengths", "pages", "paged")}
        return {name: after.tolist() for name, after in self._due(numbers)[2].items()}

    def check_numbers(self, rows: Mapping[str, list[int]]) -> None:
        """Raise ValueError if a row's number of pages contradicts the end of its pages or its length."""
        for length, pages, paged in zip(*(rows[name] for name in ("lengths", "pages", "paged"))):
            end = self.sinks + pages * self.sizes[0] if pages else 0
            if pages % self.group or paged != end or (pages and end > length - self.tail):
                raise ValueError(f"rows.pages: {pages} pages to slot {paged} cannot be of {length} tokens")

    def _extend(self, cache: SlotCache) -> None:
        """:meth:`extend` for rows that have the same lengths and pages."""
        first, start = cache.rows["pages"][0], cache.rows["paged"][0] or self.sinks
        groups = max(0, cache.lengths[0] - self.tail - start) // self.sizes[-1]
        if not groups:
            return
        new = UniformPages(first, first + groups * self.group, start, self.sizes[0])
        self._make(cache, new)
        cache.rows["pages"] = [new.last] * cache.batch_size
        cache.rows["paged"] = [start + groups * self.sizes[-1]] * cache.batch_size

    def _children(self, cache: SlotCache, name: str, level: int, new: UniformPages | RaggedPages) -> Tensor:
        """A field of the children of new nodes, ``[B, Hkv, n, branch, ...]``, for a level above the pages."""
        return new.nodes(cache.channel(self.channel(name, level - 1)), self.pages_under(level), self.branch(level))

    def _made_of(
        self, cache: SlotCache, level: int, new: UniformPages | RaggedPages, tokens: list[Tensor]
    ) -> ops.Nodes:
        """The children of new nodes, fields ``[B, Hkv, n, S, ...]``: tokens, or nodes of the level below.

        Args:
            tokens: keys and values of the tokens under the new pages, ``[B, Hkv, n, size, D(v)]``.
        """
        if not level:
            keys, values = tokens
            entropy = keys.new_zeros(keys.shape[:4], dtype=torch.float32) if self.entropy else None
            return ops.Nodes(keys, values, entropy=entropy)
        return ops.Nodes(
            *(
                self._children(cache, name, level, new) if self.channel(name, level - 1) in cache.specs else None
                for name in ops.Nodes._fields
            )
        )

    def _make(self, cache: SlotCache, new: UniformPages | RaggedPages) -> None:
        """Compute the new nodes of each level from their children and write them to the cache."""
        tokens = new.keys_and_values(cache)
        for level in range(len(self.sizes)):
            self._make_level(cache, level, new, self._made_of(cache, level, new, tokens), tokens[0])

    def _make_level(
        self, cache: SlotCache, level: int, new: UniformPages | RaggedPages, children: ops.Nodes, keys: Tensor
    ) -> None:
        """Compute the new nodes of one level and write them to the cache.

        Args:
            children: the children of the new nodes, fields ``[B, Hkv, n, S, ...]``.
            keys: keys of the tokens under the new nodes, ``[B, Hkv, n, size, D]``, by pages.
        """
        pages_under = self.pages_under(level)
        mass = self._attention("mass", cache, level, new) if self.mass else None
        recent = self._attention("recent", cache, level, new) if self.recent else None
        weights = None if mass is None else (mass / _TEMPERATURE).softmax(-1)
        nodes = ops.summarise(children, weights, spread=self.spread)
        fields = dict(zip(ops.Nodes._fields, nodes))
        if self.records:  # made of raw keys on every level
            fields["records"] = ops.compress_pages(keys.flatten(2, 3), self.record(level, cache.geometry))
        for name, attention in (("mass", mass), ("recent", recent)):
            if attention is not None and self.channel(name, level) in cache.specs:
                fields[name] = attention.sum(-1)
        for name, value in fields.items():
            if value is not None:
                new.write(cache.channel(self.channel(name, level)), pages_under, value)

    def _attention(self, name: str, cache: SlotCache, level: int, new: UniformPages | RaggedPages) -> Tensor:
        """Attention to each child, accumulated (``mass``) or ``recent``: the mean over the group,
        ``[B, Hkv, n, S]``."""
        if level:
            return self._children(cache, name, level, new)
        attention = new.tokens(cache.channel(name))
        return attention / cache.geometry.group if name == "mass" else attention

    def look_back(self, cache: SlotCache, recent: Tensor, share: float) -> None:
        """Move the running average of attention to tokens and nodes towards the attention of a prompt's last queries.

        Args:
            recent: fp32 ``[B, Hkv, used]``: the attention of these queries to each token, the mean over queries and
                group.
            share: weight of these queries in the running average: their number divided by ``window``.
        """
        cache.channel("recent").lerp_(recent, share)
        if not self.even(cache):
            for b in range(cache.batch_size):
                with cache.row(b) as row:
                    self._look_back(row, recent[b : b + 1], share)
        else:
            self._look_back(cache, recent, share)

    def _look_back(self, cache: SlotCache, recent: Tensor, share: float) -> None:
        """:meth:`look_back` for the nodes of rows with the same pages."""
        pages = cache.rows["pages"][0]
        if not pages:
            return
        start, size = self.sinks, self.sizes[0]
        attention = recent[:, :, start : start + pages * size].unflatten(2, (pages, size)).sum(-1)
        for level in range(len(self.sizes)):
            nodes = self.count(level, pages)
            if level:
                branch = self.branch(level)
                attention = attention[:, :, : nodes * branch].unflatten(2, (nodes, branch)).sum(-1)
            if nodes:
                cache.channel(self.channel("recent", level))[:, :, :nodes].lerp_(attention, share)


class MakesPages(Replay):
    """Capture of LuKA's decode steps; maintenance makes pages after some of them, see :attr:`PageLevels.every`."""

    maintains: ClassVar[bool] = True

    def __init__(self, pages: PageLevels):
        super().__init__()
        self.pages = pages

    def maintenance_due(self, decoded: int) -> bool:
        return decoded % self.pages.every == 0

    def maintain(self, cache: SlotCache) -> None:
        self.pages.extend(cache)

    def maintain_captured(self, cache: SlotCache) -> None:
        self.pages.extend_in_step(cache)

    def rows_after_maintenance(self, rows: Mapping[str, list[int]]) -> dict[str, list[int]]:
        return self.pages.numbers_after(rows)
