"""Reading a LuKA cover: the nodes of each level as one query a row sees them, and the raw tokens beneath."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foveate import ops
from foveate.cache import SlotCache

if TYPE_CHECKING:
    from foveate.methods.luka import LuKA

WEIGHT_SPREAD = 0.6
"""Share of the deviation that enters a summary's own weight under bias=spread. Its value is the mean of the page's,
which is wrong for the keys that make the page heavy, so all of the estimated mass would do harm (docs/luka.md)."""


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Nodes of one level, or raw tokens (level -1), that a query may look at; the heads of a group side by side."""

    reader: Reader
    level: int
    index: Tensor | None
    """int64 ``[B, Hkv, C]``: numbers of the nodes, slots of the tokens, -1 for none; None: ``0 .. C - 1``."""
    logits: Tensor
    """fp32 ``[B, Hkv, G, C]``: log-weights; -inf where there is none. The fields below alike, where they are needed."""
    complete: bool
    """Whether every place is used."""
    rank: Tensor | None = None
    """Logarithm of the mass by which nodes are chosen; None where it is the log-weight."""
    upper: Tensor | None = None
    lower: Tensor | None = None
    """Bounds of the log partition sum of the tokens beneath."""

    @property
    def ranks(self) -> Tensor:
        return self.logits if self.rank is None else self.rank

    @property
    def exist(self) -> Tensor:
        """bool ``[B, Hkv, C]``: the places that are used."""
        return self.logits[:, :, 0] > float("-inf")

    @property
    def number(self) -> int | Tensor:
        """How many there are: a number, or ``[B, Hkv]``."""
        return self.logits.shape[-1] if self.complete else self.exist.sum(-1)

    @property
    def first_page(self) -> Tensor:
        """Number of the first page beneath each node."""
        pages = self.reader.method.pages
        size = pages.sizes[self.level] // pages.sizes[0]
        if self.index is None:
            return torch.arange(self.logits.shape[-1], device=self.logits.device) * size
        return self.index * size

    def values(self) -> Tensor:
        """``[B, Hkv, C, Dv]``, finite everywhere."""
        return self.reader.values(self)

    def weighted(self, log_weights: Tensor) -> Candidates:
        """The same with other log-weights; ranks follow."""
        rank = self.rank
        if rank is not None and self.reader.method.mass == "preserve":
            rank = (rank + (log_weights - self.logits)).masked_fill(log_weights.isneginf(), float("-inf"))
        return dataclasses.replace(self, logits=log_weights, rank=rank)


def joined(a: Candidates | None, b: Candidates | None) -> Candidates | None:
    """Candidates of one level side by side."""
    if a is None or b is None:
        return b if a is None else a

    def cat(name: str) -> Tensor | None:
        tensors = [getattr(one, name) for one in (a, b)]
        return None if tensors[0] is None else torch.cat(tensors, -1)

    fields = {name: cat(name) for name in ("index", "logits", "rank", "upper", "lower")}
    return Candidates(a.reader, a.level, complete=a.complete and b.complete, **fields)


class Reader:
    """One decode step's view of a cache that has pages.

    Args:
        rows: the queries, ``[B, Hkv, G, D]``.
    """

    def __init__(self, method: LuKA, cache: SlotCache, rows: Tensor, scaling: float):
        self.method, self.cache, self.rows, self.scaling = method, cache, rows, scaling
        self.even = method.pages.even(cache)

    def all(self, level: int) -> Candidates:
        """Every node of a level."""
        pages = self.method.pages
        nodes = pages.count(level, max(self.cache.rows["pages"]))
        if self.even:
            return self._scored(level, slice(nodes), None)
        counts = self.cache.on_device([pages.count(level, n) for n in self.cache.rows["pages"]])
        used = torch.arange(nodes, device=counts.device) < counts[:, None]
        return self._scored(level, slice(nodes), used[:, None])

    def open_end(self, level: int) -> Candidates | None:
        """The last nodes of a level, over which none of the next level stands yet; None where no row has any."""
        pages = self.method.pages
        lasts = [pages.count(level, n) for n in self.cache.rows["pages"]]
        firsts = [pages.count(level + 1, n) * pages.branch(level + 1) for n in self.cache.rows["pages"]]
        width = max(last - first for first, last in zip(firsts, lasts))
        if width == 0:
            return None
        first, last = (self.cache.on_device(numbers)[:, None] for numbers in (firsts, lasts))
        index = first + torch.arange(width, device=first.device)
        index = index.masked_fill(index >= last, -1)[:, None].expand(-1, self.rows.shape[1], -1)
        return self._scored(level, index, None if self.even else index >= 0)

    def below(self, nodes: Candidates, chosen: Tensor) -> Candidates:
        """The children of chosen candidates, ``[B, Hkv, K]`` places in them, -1 for none; K groups of equal width."""
        used = chosen >= 0
        complete = nodes.complete and self.method.refine == "top_k"
        number = chosen if nodes.index is None else nodes.index.gather(-1, chosen.clamp_min(0))
        if not complete:
            number = number.masked_fill(~used, -1)
        if nodes.level == 0:
            return self._tokens(number, complete)
        branch = self.method.pages.branch(nodes.level)
        index = ops.page_slots(number, branch).flatten(-2)
        return self._scored(nodes.level - 1, index, None if complete else index >= 0)

    def sinks(self) -> ops.Part:
        """The raw first tokens of the rows that have pages; those of the others lie in their tail."""
        sinks = self.method.sinks
        keys, values = self.cache.keys[:, :, :sinks], self.cache.values[:, :, :sinks]
        logits = ops.key_logits(self.rows, keys, self.scaling)
        if not self.even:
            paged = self.cache.row_tensor("pages")[:, None, None] > 0
            logits = logits.masked_fill(~paged[..., None], float("-inf"))
            values = values.masked_fill(~paged[..., None], 0)
        return ops.Part(logits, values)

    def tail(self) -> tuple[ops.Part, Tensor | slice, int | Tensor]:
        """The raw tokens behind the pages, their slots, and how many raw tokens, sinks included, each row reads."""
        cache, sinks = self.cache, self.method.sinks
        if self.even:
            slots = slice(cache.rows["paged"][0], cache.used)
            keys, values = cache.keys[:, :, slots], cache.values[:, :, slots]
            part = ops.Part(ops.key_logits(self.rows, keys, self.scaling), values)
            return part, slots, sinks + keys.shape[2]
        first = cache.rows["paged"]
        numbers = [length - start for length, start in zip(cache.lengths, first)]
        slots = cache.on_device(first)[:, None] + torch.arange(max(numbers), device=cache.device)
        used = slots < cache.row_tensor("lengths")[:, None]
        slots = slots.where(used, 0)[:, None].expand(-1, cache.geometry.num_kv_heads, -1)
        keys, values = ops.gather_slots(cache.keys, slots), ops.gather_slots(cache.values, slots)
        logits = ops.key_logits(self.rows, keys, self.scaling).masked_fill(~used[:, None, None], float("-inf"))
        read = [number + (sinks if start else 0) for number, start in zip(numbers, first)]
        values = values.masked_fill(~used[:, None, :, None], 0)
        return ops.Part(logits, values), slots, cache.on_device(read)[:, None]

    def values(self, nodes: Candidates) -> Tensor:
        """Values of nodes, or of raw tokens."""
        if nodes.level < 0:
            return self._token_values
        summaries = self.cache.channel(self.method.pages.channel("v", nodes.level))
        if nodes.index is None:
            return summaries[:, :, : nodes.logits.shape[-1]]
        return ops.gather_slots(summaries, nodes.index)

    def _tokens(self, pages: Tensor, complete: bool) -> Candidates:
        """The raw tokens of pages, ``[B, Hkv, K]``, -1 for none."""
        cache, hierarchy, sinks = self.cache, self.method.pages, self.method.sinks
        if hierarchy.fixed:
            keys, values = (
                ops.gather_pages(x[:, :, sinks:], pages, hierarchy.width) for x in (cache.keys, cache.values)
            )
            used = None if complete else (pages >= 0).repeat_interleave(hierarchy.width, -1)
        else:
            ends = cache.channel("page_end")
            end = ends.gather(-1, pages.clamp_min(0)).long()
            start = ends.gather(-1, (pages - 1).clamp_min(0)).long().where(pages > 0, sinks)
            slots = start[..., None] + torch.arange(hierarchy.width, device=cache.device)
            used = ((slots < end[..., None]) & (pages >= 0)[..., None]).flatten(-2)
            slots = slots.flatten(-2).where(used, 0)
            keys, values = ops.gather_slots(cache.keys, slots), ops.gather_slots(cache.values, slots)
        logits = ops.key_logits(self.rows, keys, self.scaling)
        if used is not None:
            logits = logits.masked_fill(~used[:, :, None], float("-inf"))
            values = values.masked_fill(~used[..., None], 0)
        self._token_values = values
        return Candidates(self, -1, None, logits, used is None)

    def _scored(self, level: int, index: Tensor | slice, used: Tensor | None) -> Candidates:
        """Nodes of a level with what the method wants to know of them.

        Args:
            index: int64 ``[B, Hkv, C]``, -1 for none, or a slice.
            used: bool ``[B, Hkv or 1, C]``, or None when all places are.
        """
        method, hierarchy = self.method, self.method.pages

        def field(name: str) -> Tensor:
            return pick(self.cache.channel(hierarchy.channel(name, level)))

        def pick(x: Tensor) -> Tensor:
            return x[:, :, index] if isinstance(index, slice) else ops.gather_slots(x, index)

        log_size = hierarchy.log_size(self.cache, level)
        if isinstance(log_size, Tensor):
            log_size = pick(log_size)[:, :, None]
        dot = ops.key_logits(self.rows, field("k"), self.scaling)
        spread = ops.logit_deviation(self.rows, field("spread"), self.scaling) if method.uses_spread else None
        bias = {
            "none": lambda: 0.0,
            "log": lambda: log_size,
            "entropy": lambda: field("entropy")[:, :, None],
            "spread": lambda: log_size + ops.free_energy(spread * WEIGHT_SPREAD, log_size),
        }[method.bias]()
        logits, rank, upper, lower = dot + bias, None, None, None
        if method.uses_bounds:
            upper = ops.largest_logit(self.rows, field("low"), field("high"), self.scaling) + log_size
            # Jensen's inequality for the mean; any other average of keys has a logit below their largest
            lower = dot + log_size if method.compressor == "mean" and hierarchy.fixed else dot
        if method.score == "spread":
            rank = dot + log_size + ops.free_energy(spread, log_size)
        elif method.score == "bound":
            rank = upper
        if used is not None:
            fields = [logits, rank, upper, lower]
            logits, rank, upper, lower = (
                None if x is None else x.masked_fill(~used[:, :, None], float("-inf")) for x in fields
            )
        index = None if isinstance(index, slice) else index
        return Candidates(self, level, index, logits, used is None, rank, upper, lower)
