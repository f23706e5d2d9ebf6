"""The reference of :func:`attend_summaries` for keys and values that are fetched only when they are read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foveate.ops._math import fold_group
from foveate.ops.attend.gather import page_slots
from foveate.ops.logits import Logits
from foveate.ops.summaries.masses import note_masses
from foveate.ops.summaries.reference import Reader, read
from foveate.ops.summaries.tree import Tree
from foveate.ops.summaries.types import Covered, Refinement, Sums

Fetch = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A function from slots, int64 ``[B, Hkv, N]``, to their keys and values ``[B, Hkv, N, D(v)]``; finite for slot -1."""


def attend_summaries_fetched(
    q: Tensor,
    fetch: Fetch,
    num_kv_heads: int,
    tree: Tree,
    how: Refinement,
    *,
    logits: Logits,
    sums: Sums | None = None,
) -> Covered:
    """:func:`attend_summaries` of keys and values that ``fetch`` returns: first sinks and tail, then refined pages.

    Args:
        q: ``[B, Hq, 1, D]``.
        fetch: see :data:`Fetch`.
        num_kv_heads: Hkv.
        tree, how, logits, sums: see :func:`attend_summaries`.
    """
    reader = _FetchingReader(tree, how, fetch, fold_group(q, num_kv_heads), logits)
    covered, masses, visited = read(reader, q.shape[1], logits.sinks is not None)
    if sums is not None:
        note_masses(masses, visited, tree, q.shape[1] // num_kv_heads, sums)
    return covered.beside(logits.sinks, need_lse=False)


class _FetchingReader(Reader):
    def __init__(self, tree: Tree, how: Refinement, fetch: Fetch, queries: Tensor, logits: Logits):
        super().__init__(tree, how, None, queries, logits)
        self._fetch = fetch

    def _first_and_last(self, sinks: int, start: int) -> tuple[Tensor, Tensor]:
        last = torch.arange(start, start + self.tree.rows.width - sinks, device=self.queries.device)
        slots = torch.cat([torch.arange(sinks, device=last.device), last])
        return self._fetch(slots.expand(*self.queries.shape[:2], -1))

    def _at(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self._fetch(slots)

    def _of_pages(self, pages: Tensor, complete: bool) -> tuple[Tensor, Tensor]:
        slots = page_slots(pages, self.tree.width, complete=complete).flatten(-2)
        return self._fetch(slots if not self.tree.sinks else (slots + self.tree.sinks).where(slots >= 0, -1))
