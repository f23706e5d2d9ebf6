"""What a layer reads for one token of each row instead of all keys: keys, pages, or a cover of summaries."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from foveate.ops._math import first_keys
from foveate.ops.attend.attended import Attended
from foveate.ops.summaries.tree import Tree
from foveate.ops.summaries.types import Refinement, Sums


class Pooling(NamedTuple):
    """The scores of keys that a pass over all keys returns beside its output, see :func:`~foveate.ops.pooled_mass`."""

    pooling: str
    pool: str


class Cover(NamedTuple):
    """A tree of summaries, in which :func:`~foveate.ops.summaries.attend_summaries` chooses the pages to refine."""

    tree: Tree
    refinement: Refinement
    sums: Sums | None = None


class Rest(NamedTuple):
    """A value that replaces the keys that are not read."""

    value: Tensor
    """fp32 ``[B, Hq, 1, Dv]``."""
    share: Tensor
    """fp32 ``[B, Hq, 1]``: the share of the attention that the value takes, 0 to 1."""


class Choice(NamedTuple):
    """What a layer reads for one token of each row.

    At most one of ``keys``, ``pages``, ``cover`` and ``attended`` is given. Without any of them the layer reads all
    keys that the cache holds.
    """

    keys: Tensor | None = None
    """int ``[B, Hkv, K]``: the slots to read; -1 marks an unused place."""
    pages: Tensor | None = None
    """int ``[B, H, P]``: pages of ``page_size`` slots, H counting the KV heads or the query heads; -1 marks an unused
    place."""
    page_size: int = 0
    cover: Cover | None = None
    attended: Attended | None = None
    """Attention that the method has computed itself."""

    read: Tensor | None = None
    """``[B, Hkv or 1]``: number of keys that a KV head reads, a summary counted by its bytes. None: all keys that the
    cache holds or, with a cover, the number that the attention returns."""
    packed: bool = False
    """Whether the slots in ``keys`` fill the first ``read`` places of each row."""
    counts: Tensor | None = None
    """int ``[B]``: number of first places of ``pages`` that are used; None: all places."""
    heads: Tensor | None = None
    """int64 ``[Hkv]``: the head of ``keys`` that each KV head reads; None: its own."""
    rest: Rest | None = None
    """A value that replaces the keys that are not read; None: they are left out."""

    need_mass: bool = False
    """Whether the attention must also return the mass of the keys that are read."""
    scores: Pooling | None = None
    """The scores of all keys that the attention must also return, to choose keys for later layers; None: no scores."""
    readers: Choice | None = None
    """The choice that later layers read; None: this choice."""
    fetched: bool = False
    """For a cache in host memory: whether the chosen keys are already on the device, because they were scored."""

    @classmethod
    def of(cls, mask: Tensor) -> Choice:
        """A choice of the keys of a mask, bool ``[B, Hkv, N]``."""
        slots = torch.arange(mask.shape[2], dtype=torch.int32, device=mask.device)
        return cls(keys=slots.where(mask, -1), read=mask.sum(-1))

    def for_draft(self, slots: Tensor) -> Choice:
        """The same keys or pages in the form that a draft repeats: -1 in all places that are not read. A choice of
        pages gets the newest page, too.

        Args:
            slots: int64 ``[B]``: number of slots in use.
        """
        if self.packed:
            keys = _of_one_head(self.keys) if self.read.shape[1] == 1 else self.keys
            keys = keys.masked_fill(~first_keys(self.read, keys.shape[2]), -1)
            return self._replace(keys=keys.expand_as(self.keys), packed=False)
        if self.pages is None:
            return self
        pages, newest = self.pages, ((slots - 1) // self.page_size)[:, None, None]
        if self.counts is not None:
            pages = pages.masked_fill(~first_keys(self.counts, pages.shape[2]), -1)
        lacks = (pages != newest).all(-1, keepdim=True)
        pages = torch.cat([pages, newest.to(pages.dtype).where(lacks, -1)], 2)
        heads = self.read.shape[1]
        of_heads = lacks.expand(-1, max(heads, lacks.shape[1]), -1).reshape(len(pages), heads, -1).any(-1)
        read = self.read + of_heads * (slots - newest.view(-1) * self.page_size)[:, None]
        return self._replace(pages=pages, counts=None, read=read)

    def newest(self, slots: Tensor, number: Tensor, most: int) -> Tensor:
        """The keys or pages to add to a choice of :meth:`for_draft` so that it includes the draft's tokens since then:
        int64 ``[B, 1, n]``.

        Args:
            slots: int64 ``[B]``: number of slots in use.
            number: int64 ``[B]``: number of last slots that hold these tokens. A choice of pages already has the page
                of the slot before them, so only later pages are added.
            most: an upper bound of ``number``.
        """
        if self.pages is None:
            newest = torch.arange(most, device=slots.device)
            return (slots[:, None] - 1 - newest).where(newest < number[:, None], -1)[:, None]
        first = (slots - number - 1) // self.page_size + 1
        pages = first[:, None] + torch.arange(-(-most // self.page_size), device=slots.device)
        return pages.where(pages * self.page_size < slots[:, None], -1)[:, None]

    def with_newest(self, newest: Tensor, number: Tensor) -> Choice:
        """A choice of :meth:`for_draft` with the keys or pages of :meth:`newest`, which add ``number [B]`` keys."""
        every = self.keys if self.pages is None else self.pages
        chosen = _of_one_head(every)
        chosen = torch.cat([chosen, newest.to(chosen.dtype).expand(-1, chosen.shape[1], -1)], 2)
        chosen = chosen.expand(-1, every.shape[1], -1)
        read = self.read + number[:, None]
        return self._replace(keys=chosen, read=read) if self.pages is None else self._replace(pages=chosen, read=read)

    @property
    def reads_all(self) -> bool:
        """Whether all keys that the cache holds are read."""
        return self.keys is None and self.pages is None and self.cover is None and self.attended is None

    def to(self, device: torch.device) -> Choice:
        """The same choice with ``keys`` and ``read`` on another device. The other fields are not moved."""
        return self._replace(keys=self.keys.to(device), read=self.read.to(device))


def _of_one_head(chosen: Tensor) -> Tensor:
    """``[B, 1, K]`` if all heads of ``chosen [B, H, K]`` share their memory; otherwise ``chosen``."""
    return chosen[:, :1] if chosen.stride(1) == 0 else chosen


ALL = Choice()
ALL_WITH_MASS = Choice(need_mass=True)
