"""Where the pages lie that a round of compression makes, and how their children are read and their nodes written."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from foveate.state.device_rows import DeviceRows


class UniformPages(NamedTuple):
    """New pages of rows that all have the same ones: ``first .. last - 1``, of the tokens from ``start`` on."""

    first: int
    last: int
    start: int
    size: int
    """Tokens of a page, where all have as many."""

    def tokens(self, x: Tensor) -> Tensor:
        """Entries of their tokens in a field of slots ``[B, Hkv, L, ...]``: ``[B, Hkv, n, S, ...]``."""
        number = self.last - self.first
        return x[:, :, self.start : self.start + number * self.size].unflatten(2, (number, self.size))

    def nodes(self, x: Tensor, over: int, branch: int) -> Tensor:
        """Entries of the ``branch`` children of each new node that stands for ``over`` pages, likewise."""
        return x[:, :, self.first // over * branch : self.last // over * branch].unflatten(2, (-1, branch))

    def write(self, x: Tensor, over: int, value: Tensor) -> None:
        """Store the entries ``[B, Hkv, n, ...]`` of the new nodes that stand for ``over`` pages each."""
        x[:, :, self.first // over : self.last // over] = value


class RaggedPages(NamedTuple):
    """New pages that each row has in its own place, as many in every row: after its ``pages [B]``, of the tokens from
    its ``start [B]`` on.

    Places beyond the capacity are redirected to the last one, which no row uses, because every row keeps a tail.
    """

    pages: Tensor
    start: Tensor
    number: int
    """Pages that each row gets."""
    size: int
    """Tokens of a page."""
    step: DeviceRows
    spec: str
    """Of the method: the places of its new pages are computed once for all layers."""

    def tokens(self, x: Tensor) -> Tensor:
        """See :meth:`UniformPages.tokens`."""
        return self._taken(x, 0, self.number * self.size, self.size)

    def nodes(self, x: Tensor, over: int, branch: int) -> Tensor:
        """See :meth:`UniformPages.nodes`."""
        return self._taken(x, over, self.number // over * branch, branch)

    def write(self, x: Tensor, over: int, value: Tensor) -> None:
        """See :meth:`UniformPages.write`."""
        index = self._index(x, over, self.number // over, 1)
        x.scatter_(2, index.expand(value.shape), value.to(x.dtype))

    def _taken(self, x: Tensor, over: int, number: int, each: int) -> Tensor:
        index = self._index(x, over, number, each)
        return x.gather(2, index.expand(*x.shape[:2], number, *x.shape[3:])).unflatten(2, (number // each, each))

    def _index(self, x: Tensor, over: int, number: int, each: int) -> Tensor:
        """Indices into ``x``, to be broadcast along it: of ``number`` tokens (``over`` 0), or of ``number`` nodes, of
        which ``each`` belong to one that stands for ``over`` pages."""

        def places() -> Tensor:
            first = self.pages // over * each if over else self.start
            return (first[:, None] + torch.arange(number, device=x.device)).clamp_max(x.shape[2] - 1)

        index = self.step.once(("new places", self.spec, over, number, each, x.shape[2]), places)
        return index.view(len(index), 1, number, *[1] * (x.dim() - 3))
