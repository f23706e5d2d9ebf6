"""What a layer reads for one token of each row: keys, pages, or a cover of summaries, instead of all that it holds."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from foveate.ops._math import first_keys
from foveate.ops.attend.attended import Attended
from foveate.ops.summaries.tree import Tree
from foveate.ops.summaries.types import Refinement, Sums


class Pooling(NamedTuple):
    """Which scores of keys a pass over all of them gives beside its output, see :func:`~foveate.ops.pooled_mass`."""

    pooling: str
    pool: str


class Cover(NamedTuple):
    """Summaries and the tokens of refined pages, which :func:`~foveate.ops.summaries.attend_summaries` chooses."""

    tree: Tree
    refinement: Refinement
    sums: Sums | None = None


class Rest(NamedTuple):
    """What stands for the keys that are not read."""

    value: Tensor
    """fp32 ``[B, Hq, 1, Dv]``."""
    share: Tensor
    """fp32 ``[B, Hq, 1]``: the share of the attention that it takes, 0 to 1."""


class Choice(NamedTuple):
    """What a layer reads for one token of each row. At most one of ``keys``, ``pages``, ``cover`` and ``attended`` is
    given; without any, all keys that the cache holds are read."""

    keys: Tensor | None = None
    """int ``[B, Hkv, K]``: slots, -1 for none."""
    pages: Tensor | None = None
    """int ``[B, H, P]``: pages of ``page_size`` slots, -1 for none, of the KV heads or of the query heads."""
    page_size: int = 0
    cover: Cover | None = None
    attended: Attended | None = None
    """Attention that the method has computed itself."""

    read: Tensor | None = None
    """``[B, Hkv or 1]``: keys that a KV head reads, raw or summary. None: all that are held, or those of the cover."""
    packed: bool = False
    """Whether ``keys`` are in the first ``read`` places of each row."""
    counts: Tensor | None = None
    """int ``[B]``: how many of the first places of ``pages`` are read; None: all."""
    heads: Tensor | None = None
    """int64 ``[Hkv]``: the head of ``keys`` that each KV head reads; None: its own."""
    rest: Rest | None = None
    """What stands for the keys that are not read; None: nothing."""

    need_mass: bool = False
    """Whether the mass of what is read is needed."""
    scores: Pooling | None = None
    """Which scores of all keys are needed, by which keys are chosen for later layers."""
    readers: Choice | None = None
    """What later layers read; None: the same."""
    fetched: bool = False
    """Of a cache in host memory: whether what is read is on the device, because it was scored."""

    @classmethod
    def of(cls, mask: Tensor) -> Choice:
        """The keys of a mask, bool ``[B, Hkv, N]``."""
        slots = torch.arange(mask.shape[2], dtype=torch.int32, device=mask.device)
        return cls(keys=slots.where(mask, -1), read=mask.sum(-1))

    def with_newest(self, slots: Tensor, number: Tensor, most: int) -> Choice:
        """The same keys or pages, and the newest of each row.

        Args:
            slots: int64 ``[B]``, in use.
            number: int64 ``[B]``: how many of the last slots are read, too. A choice of pages has the page of the slot
                before them already, so the pages after that one are added.
            most: the largest number that there can be.
        """
        read = self.read + number[:, None]
        if self.pages is not None:
            size, pages = self.page_size, self.pages
            if self.counts is not None:
                pages = pages.masked_fill(~first_keys(self.counts, pages.shape[2]), -1)
            first = (slots - number - 1) // size + 1
            added = first[:, None] + torch.arange(-(-most // size), device=slots.device)
            added = added.where(added * size < slots[:, None], -1).to(pages.dtype)
            pages = torch.cat([pages, added[:, None].expand(-1, pages.shape[1], -1)], 2)
            return self._replace(pages=pages, counts=None, read=read)
        newest, keys = torch.arange(most, device=slots.device), self.keys
        newest = (slots[:, None] - 1 - newest).where(newest < number[:, None], -1)
        if self.packed:
            keys = keys.masked_fill(~first_keys(self.read, keys.shape[2]), -1)
        newest = newest.to(keys.dtype)[:, None].expand(-1, keys.shape[1], -1)
        return self._replace(keys=torch.cat([keys, newest], 2), read=read, packed=False)

    @property
    def reads_all(self) -> bool:
        """Whether all keys that the cache holds are read."""
        return self.keys is None and self.pages is None and self.cover is None and self.attended is None

    def to(self, device: torch.device) -> Choice:
        """The same choice with ``keys`` and ``read`` on a device; what else it has stays where it is."""
        return self._replace(keys=self.keys.to(device), read=self.read.to(device))


ALL = Choice()
ALL_WITH_MASS = Choice(need_mass=True)
