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

    def for_draft(self, slots: Tensor) -> Choice:
        """The same keys or pages, with -1 in the places that are not read, and of pages also the newest one.

        Args:
            slots: int64 ``[B]``, in use.
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
        """What a choice :meth:`for_draft` lacks to read the tokens of the draft since: int64 ``[B, 1, n]``.

        Args:
            slots: int64 ``[B]``, in use.
            number: int64 ``[B]``: how many of the last slots these tokens have. A choice of pages has the page of the
                slot before them already, so the pages after that one are added.
            most: the largest number that is possible.
        """
        if self.pages is None:
            newest = torch.arange(most, device=slots.device)
            return (slots[:, None] - 1 - newest).where(newest < number[:, None], -1)[:, None]
        first = (slots - number - 1) // self.page_size + 1
        pages = first[:, None] + torch.arange(-(-most // self.page_size), device=slots.device)
        return pages.where(pages * self.page_size < slots[:, None], -1)[:, None]

    def with_newest(self, newest: Tensor, number: Tensor) -> Choice:
        """A choice :meth:`for_draft` and what :meth:`newest` has found, ``number [B]`` keys."""
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
        """The same choice with ``keys`` and ``read`` on a device; what else it has stays where it is."""
        return self._replace(keys=self.keys.to(device), read=self.read.to(device))


def _of_one_head(chosen: Tensor) -> Tensor:
    """``[B, 1, K]`` of what all heads share in memory, ``[B, H, K]``; else all."""
    return chosen[:, :1] if chosen.stride(1) == 0 else chosen


ALL = Choice()
ALL_WITH_MASS = Choice(need_mass=True)
