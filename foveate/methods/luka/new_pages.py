"""Indexing of the pages that one round of compression makes: gathers their tokens or child nodes, writes their nodes.

:class:`UniformPages` indexes by slices and is used on the host. :class:`RaggedPages` indexes by tensors of row numbers
and is used in captured maintenance. Both have the same methods.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from foveate.state import SlotCache
from foveate.state.step_plan import StepPlan


class UniformPages(NamedTuple):
    """New pages ``first .. last - 1``, the same in all rows."""

    first: int
    last: int
    start: int
    """Slot of the first token of the first new page."""
    size: int
    """Tokens of a page."""

    def tokens(self, x: Tensor) -> Tensor:
        """The entries of the new pages' tokens, ``[B, Hkv, n, size, ...]``, of a field per slot
        ``[B, Hkv, L, ...]``."""
        number = self.last - self.first
        return x[:, :, self.start : self.start + number * self.size].unflatten(2, (number, self.size))

    def keys_and_values(self, cache: SlotCache) -> list[Tensor]:
        """Keys and values of the new pages' tokens, in the shape that :meth:`tokens` returns."""
        number = self.last - self.first
        found = cache.read_slots(self.start, self.start + number * self.size)
        return [x.unflatten(2, (number, self.size)) for x in found]

    def nodes(self, x: Tensor, pages_under: int, branch: int) -> Tensor:
        """Entries of the children of the new nodes of a level: ``[B, Hkv, n, branch, ...]``.

        Args:
            x: a field of the level below, ``[B, Hkv, N, ...]``.
            pages_under: pages under a node of the level.
            branch: children of a node.
        """
        first, last = self.first // pages_under, self.last // pages_under
        return x[:, :, first * branch : last * branch].unflatten(2, (-1, branch))

    def write(self, x: Tensor, pages_under: int, value: Tensor) -> None:
        """Write the entries ``[B, Hkv, n, ...]`` of the new nodes of a level to its field ``x [B, Hkv, N, ...]``."""
        x[:, :, self.first // pages_under : self.last // pages_under] = value


class RaggedPages(NamedTuple):
    """New pages at a different index in each row, but the same number in every row.

    Indices beyond the capacity are clamped to the last entry. No row uses that entry, because every row has a raw tail.
    """

    pages: Tensor
    """int64 ``[B]``: pages that a row has already, so the index of its first new page."""
    start: Tensor
    """int64 ``[B]``: slot of the first token of a row's first new page."""
    number: int
    """New pages of each row."""
    size: int
    """Tokens of a page."""
    plan: StepPlan
    spec: str
    """The method's spec. All layers of the method share the indices, which are computed once in a step."""

    def tokens(self, x: Tensor) -> Tensor:
        """See :meth:`UniformPages.tokens`."""
        return self._gather(x, 0, self.number * self.size, self.size)

    def keys_and_values(self, cache: SlotCache) -> list[Tensor]:
        """See :meth:`UniformPages.keys_and_values`."""
        number = self.number * self.size
        slots = self.start[:, None] + torch.arange(number, device=self.start.device)
        slots = slots.clamp_max(cache.capacity - 1)[:, None].expand(-1, cache.geometry.num_kv_heads, -1)
        return [x.unflatten(2, (self.number, self.size)) for x in cache.fetch_slots(slots)]

    def nodes(self, x: Tensor, pages_under: int, branch: int) -> Tensor:
        """See :meth:`UniformPages.nodes`."""
        return self._gather(x, pages_under, self.number // pages_under * branch, branch)

    def write(self, x: Tensor, pages_under: int, value: Tensor) -> None:
        """See :meth:`UniformPages.write`."""
        index = self._index(x, pages_under, self.number // pages_under, 1)
        x.scatter_(2, index.expand(value.shape), value.to(x.dtype))

    def _gather(self, x: Tensor, pages_under: int, number: int, branch: int) -> Tensor:
        index = self._index(x, pages_under, number, branch)
        return x.gather(2, index.expand(*x.shape[:2], number, *x.shape[3:])).unflatten(2, (number // branch, branch))

    def _index(self, x: Tensor, pages_under: int, number: int, branch: int) -> Tensor:
        """Indices of ``number`` entries of ``x [B, Hkv, N, ...]`` for each row: ``[B, 1, number, 1, ...]``.

        With ``pages_under`` 0 the entries are tokens. Otherwise they are nodes, ``branch`` of them for each
        ``pages_under`` new pages.
        """

        def indices() -> Tensor:
            first = self.pages // pages_under * branch if pages_under else self.start
            return (first[:, None] + torch.arange(number, device=x.device)).clamp_max(x.shape[2] - 1)

        index = self.plan.cached(("new places", self.spec, pages_under, number, branch, x.shape[2]), indices)
        return index.view(len(index), 1, number, *[1] * (x.dim() - 3))
