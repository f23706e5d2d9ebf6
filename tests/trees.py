"""Trees of summaries with random contents, for the kernels of :func:`foveate.ops.summaries.attend_summaries`."""

from __future__ import annotations

import torch
from torch import Tensor

from foveate import ops


class Problem:
    """Rows of different lengths above one cache, whose unused entries are NaN.

    Args:
        pages: pages of each row, multiples of what a node of the top level stands for.
        sizes: tokens of a node, by level, the finest first.
        allowed: nodes that may be refined, by level: a number for all rows, or a share of each row's.
        same: whether all rows end alike (the first one's pages and tail).
    """

    def __init__(
        self,
        pages=(9, 3, 0),
        sizes=(4,),
        allowed=(3,),
        heads=4,
        kv_heads=2,
        dim=16,
        value_dim=None,
        sinks=2,
        tail=11,
        dtype=torch.float32,
        device="cpu",
        same=False,
        seed=0,
        loudness=3.0,
    ):
        self.generator, self.device, self.dtype = torch.Generator(device).manual_seed(seed), device, dtype
        self.loudness = loudness
        pages = [pages[0]] * len(pages) if same else list(pages)
        batch, value_dim, self.kv_heads, self.sizes = len(pages), value_dim or dim, kv_heads, sizes
        starts = [sinks + n * sizes[0] if n else 0 for n in pages]
        lengths = [start + tail + (0 if same else 3 * b) for b, start in enumerate(starts)]
        counts = [[n * sizes[0] // size for n in pages] for size in sizes]
        allowed = [
            [max(1, int(share * n)) if isinstance(share, float) else share for n in of_level]
            for share, of_level in zip(allowed, counts)
        ]
        self.q = self.draw(batch, heads, 1, dim)
        self.k = self.draw(batch, kv_heads, max(lengths), dim)
        self.v = self.draw(batch, kv_heads, max(lengths), value_dim)
        for b, length in enumerate(lengths):
            self.k[b, :, length:], self.v[b, :, length:] = torch.nan, torch.nan
        levels = []
        for size, of_level in zip(sizes, counts):
            shape = (batch, kv_heads, max(of_level) + 5)
            nodes = ops.Nodes(
                self.draw(*shape, dim),
                self.draw(*shape, value_dim),
                (self.uniform(*shape, dim) / 4).to(dtype),
            )
            recent = self.uniform(*shape) / shape[2]
            for b, number in enumerate(of_level):
                for field in (*(x for x in nodes if x is not None), recent):
                    field[b, :, number:] = torch.nan
            levels.append(ops.summaries.Level(nodes, size, recent))
        rows = self._rows(lengths, starts, pages, sinks, counts, allowed)
        self.tree = ops.summaries.Tree(tuple(levels), rows)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(self.dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)

    def _rows(self, lengths, starts, pages, sinks, counts, allowed) -> ops.summaries.Rows:
        even = len(set(zip(lengths, starts, pages))) == 1
        raw = [length - start + (sinks if start else 0) for length, start in zip(lengths, starts)]
        return ops.summaries.Rows(
            torch.tensor([lengths, starts, *allowed, *counts], device=self.device),
            tuple(max(of_level) for of_level in allowed),
            max(counts[-1]),
            max(raw),
            sinks,
            starts[0] if even else None,
            all(len(set(of_level)) == 1 for of_level in allowed),
            (sum(counts[-1]) / len(raw), sum(raw) / len(raw)),
        )

    def looked_at(self, how: ops.summaries.Refinement, as_read: bool) -> ops.summaries.Tree:
        """The tree with the fields that a rule looks at; ``as_read``: finite everywhere, as the reference wants it."""

        def field(x: Tensor | None, wanted: bool = True) -> Tensor | None:
            return None if x is None or not wanted else x.nan_to_num(0.0) if as_read else x

        levels = []
        for of in self.tree.levels:
            nodes = of.nodes._replace(
                k=field(of.nodes.k),
                v=field(of.nodes.v),
                spread=field(of.nodes.spread, how.score == "spread"),
            )
            of = of._replace(nodes=nodes, recent=field(of.recent, how.prior > 0))
            levels.append(self._with_records(of, as_read) if how.score == "lowrank" else of)
        return self.tree._replace(levels=tuple(levels))

    def _with_records(self, of: ops.summaries.Level, as_read: bool) -> ops.summaries.Level:
        """With low-rank summaries of keys about each node's; of nodes that are not there their scales are NaN."""
        record = ops.PageRecord(of.nodes.k.shape[3], min(of.size, ops.PageRecord.largest_page))
        counts = self.tree.rows.numbers[2 + len(self.tree.levels) + self.sizes.index(of.size)]
        keys = of.nodes.k.nan_to_num(0.0).float().repeat_interleave(record.page_size, 2)
        noise = torch.randn(keys.shape, generator=torch.Generator().manual_seed(1)).to(keys.device)
        records = ops.compress_pages(keys + noise, record)
        unused = torch.arange(records.shape[2], device=keys.device) >= counts[:, None, None]
        return of._replace(records=records.masked_fill(unused[..., None], 0 if as_read else 255), record=record)

    def overrate(self, nodes: list[int], logit: float, scaling: float, level: int = -1) -> None:
        """Lets some nodes, in the first row, seem far heavier than what is beneath them."""
        q = self.q[0, :, 0].float().unflatten(0, (self.kv_heads, -1)) * self.loudness
        toward = (q / q.square().sum(-1, keepdim=True)).sum(1)  # about 1 in a product with each of them
        self.tree.levels[level].nodes.k[0, :, nodes] = (toward * logit / scaling).to(self.dtype)[:, None]

    @property
    def arguments(self) -> tuple[Tensor, ops.KV]:
        """Queries, loud enough to make some nodes stand out, and keys and values."""
        return self.q * self.loudness, ops.KV(self.k, self.v)

    def finite(self, dtype: torch.dtype | None = None) -> ops.KV:
        """The same keys and values, 0 where no token is."""
        return ops.KV(*(x.nan_to_num(0.0).to(dtype or self.dtype) for x in (self.k, self.v)))


def recent_attention(tree):
    """What :attr:`Level.recent` says of the nodes that rows have, by level."""
    counts = tree.rows.numbers[2 + len(tree.levels) :]
    for level, count in zip(tree.levels, counts):
        there = torch.arange(level.recent.shape[2], device=count.device) < count[:, None, None]
        yield level.recent[there.expand_as(level.recent)]
