"""Reading a LuKA cover: the nodes of each level as one query a row sees them, and the raw tokens beneath."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from foveate import ops
from foveate.cache import SlotCache
from foveate.moving_rows import MovingRows

if TYPE_CHECKING:
    from foveate.methods.luka import LuKA

WEIGHT_SPREAD = 0.6
"""Share of the deviation that enters a summary's own weight under bias=spread. Its value is the mean of the page's,
which is wrong for the keys that make the page heavy, so all of the estimated mass would do harm (docs/luka.md)."""


class Layout(NamedTuple):
    """Which slots and nodes each row has, for all layers of a step. Masks are None where all rows are alike."""

    raw_slots: Tensor | None
    """int64 ``[B, Hkv, R]``: sinks and tail; a row's last slot where it has fewer."""
    raw_hidden: Tensor | None
    """bool ``[B, 1, 1, R]``: places of ``raw_slots`` that are not used."""
    raw: int | Tensor
    """Raw tokens that are read, the sum over the rows."""
    most: int
    """Places for nodes of the top level."""
    nodes: int | Tensor
    """How many nodes of the top level there are, the sum over the rows."""
    hidden: Tensor | None
    """bool ``[B, 1, 1, N]``: nodes of the top level that a row does not have."""


@functools.lru_cache(maxsize=64)
def _layout(
    method: LuKA,
    lengths: tuple[int, ...],
    pages: tuple[int, ...],
    paged: tuple[int, ...],
    heads: int,
    device: torch.device,
) -> Layout:
    even = len(set(zip(lengths, pages, paged))) == 1
    counts = [n // method.pages.group for n in pages]
    raw = [length - start + (method.sinks if start else 0) for length, start in zip(lengths, paged)]
    slots = hidden = nodes = None
    with torch.inference_mode(False):
        if not even:
            width = max(raw)
            rows = [
                [*range(method.sinks if start else 0), *range(start, length)] + [length - 1] * (width - used)
                for length, start, used in zip(lengths, paged, raw)
            ]
            slots = _sent(torch.tensor(rows), device)[:, None].expand(-1, heads, -1)
            hidden = _sent((torch.arange(width) >= torch.tensor(raw)[:, None])[:, None, None], device)
            nodes = _sent((torch.arange(max(counts)) >= torch.tensor(counts)[:, None])[:, None, None], device)
    return Layout(slots, hidden, sum(raw), max(counts), sum(counts), nodes)


def _moving_layout(method: LuKA, rows: MovingRows, heads: int) -> Layout:
    """The same for a step that is replayed: in as many places as the rows ever need."""
    hierarchy, sinks = method.pages, method.sinks
    length, paged, pages = (rows[name][:, None] for name in ("lengths", "paged", "pages"))
    places = torch.arange(hierarchy.most_raw, device=rows.device)
    slots = torch.where((paged > 0) & (places >= sinks), paged + places - sinks, places)
    counts, most = pages // hierarchy.group, max(1, hierarchy.most(rows.bound) // hierarchy.group)
    return Layout(
        slots.minimum(length - 1)[:, None].expand(-1, heads, -1),
        (slots >= length)[:, None, None],
        (length - paged + sinks * (paged > 0)).double().sum(),
        most,
        counts.double().sum(),
        (torch.arange(most, device=rows.device) >= counts)[:, None, None],
    )


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting for it."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Nodes of one level, or raw tokens (level -1), that a query may look at; the heads of a group side by side."""

    reader: Reader
    level: int
    index: Tensor | None
    """int64 ``[B, Hkv, C]``: numbers of the nodes, -1 for none; None: ``0 .. C - 1``, or raw tokens."""
    logits: Tensor
    """fp32 ``[B, Hkv, G, C]``: log-weights; -inf where there is none. The fields below alike, where they are needed."""
    number: float | Tensor
    """How many there are: the sum over the rows of the mean over the KV heads."""
    complete: bool
    """Whether every place is used."""
    rank: Tensor | None = None
    """Logarithm of the mass by which nodes are chosen; None where it is the log-weight."""
    upper: Tensor | None = None
    lower: Tensor | None = None
    """Bounds of the log partition sum of the tokens beneath."""
    v: Tensor | None = None
    """``[B, Hkv, C, Dv]``; None: those of the first nodes of the level, in the cache."""

    @property
    def ranks(self) -> Tensor:
        return self.logits if self.rank is None else self.rank

    @property
    def exist(self) -> Tensor:
        """bool ``[B, Hkv, C]``: the places that are used."""
        return self.logits[:, :, 0] > float("-inf")

    @property
    def places(self) -> Tensor:
        """``index`` with node 0 in the places that are not used."""
        return self.index if self.complete else self.index.clamp_min(0)

    @property
    def first_page(self) -> Tensor:
        """Number of the first page beneath each node."""
        sizes = self.reader.method.sizes
        if self.index is None:
            return torch.arange(self.logits.shape[-1], device=self.logits.device) * (sizes[self.level] // sizes[0])
        return self.index * (sizes[self.level] // sizes[0])

    def values(self) -> Tensor:
        """``[B, Hkv, C, Dv]``, finite everywhere."""
        return self.reader.values(self)

    def weighted(self, log_weights: Tensor) -> Candidates:
        """The same with other log-weights; ranks follow."""
        rank = self.rank
        if rank is not None and self.reader.method.mass == "preserve":
            rank = (rank + (log_weights - self.logits)).masked_fill(log_weights.isneginf(), float("-inf"))
        return dataclasses.replace(self, logits=log_weights, rank=rank)


class Reader:
    """One decode step's view of a cache that has pages.

    Args:
        rows: the queries, ``[B, Hkv, G, D]``.
    """

    def __init__(self, method: LuKA, cache: SlotCache, rows: Tensor, scaling: float):
        self.method, self.cache, self.rows, self.scaling = method, cache, rows, scaling
        step = cache.step
        if step is None:
            numbers = (tuple(cache.rows[name]) for name in ("lengths", "pages", "paged"))
            self.layout = _layout(method, *numbers, rows.shape[1], rows.device)
        else:
            self.layout = step.once(("layout", method), lambda: _moving_layout(method, step, rows.shape[1]))
        self._recent: dict[int, Tensor] = {}

    @functools.cached_property
    def _names(self) -> list[str]:
        """The fields of nodes that the method looks at."""
        method, names = self.method, ["k", "v"]
        names += ["spread"] * method.uses_spread + ["low", "high"] * method.uses_bounds
        return names + ["entropy"] * (method.bias == "entropy")

    def raw(self) -> ops.Part:
        """Sinks and tail."""
        cache, slots, sinks = self.cache, self.layout.raw_slots, self.method.sinks
        if slots is not None:
            keys, values = ops.gather_fields([cache.keys, cache.values], slots, complete=True)
        else:
            keys, values = (x[:, :, cache.rows["paged"][0] :] for x in (cache.keys, cache.values))
            if sinks:
                keys = torch.cat([cache.keys[:, :, :sinks], keys], 2)
                values = torch.cat([cache.values[:, :, :sinks], values], 2)
        logits = ops.key_logits(self.rows, keys, self.scaling)
        if slots is not None:
            logits.masked_fill_(self.layout.raw_hidden, float("-inf"))
        return ops.Part(logits, values)

    def add_mass(self, mass: Tensor) -> None:
        """Accumulate the mass of sinks and tail, ``[B, Hkv, R]``: only raw tokens can still be given a summary."""
        total, slots, sinks = self.cache.channel("mass"), self.layout.raw_slots, self.method.sinks
        if slots is not None:
            total.scatter_add_(2, slots, mass)
            return
        total[:, :, :sinks] += mass[..., :sinks]
        total[:, :, self.cache.rows["paged"][0] :] += mass[..., sinks:]

    def look_back(self, masses: Sequence[Tensor], looked: list[tuple[Candidates, Tensor]]) -> None:
        """Sinks, tail and all nodes that the query looked at take in what attention they got.

        Args:
            masses: ``[B, Hkv, N]`` of each part of the cover, the mean over the group: sinks and tail, the nodes of
                each level, and the raw tokens of refined pages, if there are any.
            looked: the nodes of each level from the top down, and which of them were refined.
        """
        share, sinks = 1 / self.method.window, self.method.sinks
        tokens, slots = self.cache.channel("recent"), self.layout.raw_slots
        if slots is not None:
            change = (masses[0] - tokens.gather(2, slots)).masked_fill_(self.layout.raw_hidden[:, :, 0], 0.0)
            tokens.scatter_add_(2, slots, change * share)
        else:
            tokens[:, :, self.cache.rows["paged"][0] :].lerp_(masses[0][..., sinks:], share)
            if sinks:
                tokens[:, :, :sinks].lerp_(masses[0][..., :sinks], share)
        beneath = masses[-1]
        for (nodes, chosen), got in zip(reversed(looked), reversed(masses[1 : 1 + len(looked)])):
            places = chosen.shape[-1]
            if places:
                width = self.method.pages.branch(nodes.level) if nodes.level else beneath.shape[-1] // places
                children = beneath[..., : places * width].unflatten(-1, (places, width)).sum(-1)
                got = got.scatter_add(-1, chosen if self.complete(nodes) else chosen.clamp_min(0), children)
            recent = self.cache.channel(self.method.pages.channel("recent", nodes.level))
            if nodes.index is None:
                recent[:, :, : got.shape[-1]].lerp_(got, share)
            else:
                change = (got - self.recent(nodes)) * share
                if not nodes.complete:
                    change = change.masked_fill_(nodes.index < 0, 0.0)
                recent.scatter_add_(2, nodes.places, change)
            beneath = got

    def recent(self, nodes: Candidates) -> Tensor:
        """Attention that nodes got lately, the mean over queries and group: fp32 ``[B, Hkv, C]``."""
        if nodes.level not in self._recent:
            recent = self.cache.channel(self.method.pages.channel("recent", nodes.level))
            count = nodes.logits.shape[-1]
            self._recent[nodes.level] = recent[:, :, :count] if nodes.index is None else recent.gather(2, nodes.places)
        return self._recent[nodes.level]

    def top(self) -> Candidates:
        """Every node of the top level."""
        layout = self.layout
        return self._scored(len(self.method.sizes) - 1, slice(layout.most), layout.hidden, layout.nodes)

    def number(self, nodes: Candidates, chosen: Tensor) -> float | Tensor:
        """How many candidates are chosen: the sum over the rows of the mean over the KV heads."""
        if self.complete(nodes):
            return chosen.shape[0] * chosen.shape[2]
        return (chosen >= 0).sum() / chosen.shape[1]

    def below(self, nodes: Candidates, chosen: Tensor, number: float | Tensor) -> Candidates:
        """The children of chosen candidates, ``[B, Hkv, K]`` places in them, -1 for none; K groups of equal width."""
        complete = self.complete(nodes)
        index = chosen if nodes.index is None else nodes.index.gather(-1, chosen if complete else chosen.clamp_min(0))
        if not complete and nodes.index is not None:
            index = index.masked_fill(chosen < 0, -1)
        if nodes.level == 0:
            return self._tokens(index, complete, number)
        branch = self.method.pages.branch(nodes.level)
        index = ops.page_slots(index, branch, complete=complete).flatten(-2)
        return self._scored(nodes.level - 1, index, None if complete else (index < 0)[:, :, None], number * branch)

    def values(self, nodes: Candidates) -> Tensor:
        """Values of nodes, or of raw tokens."""
        if nodes.v is not None:
            return nodes.v
        return self.cache.channel(self.method.pages.channel("v", nodes.level))[:, :, : nodes.logits.shape[-1]]

    def complete(self, nodes: Candidates) -> bool:
        """Whether every place of a selection among these is used."""
        return nodes.complete and self.method.refine == "top_k"

    def _tokens(self, pages: Tensor, complete: bool, number: float | Tensor) -> Candidates:
        """The raw tokens of pages, ``[B, Hkv, K]``, -1 for none."""
        cache, hierarchy, sinks = self.cache, self.method.pages, self.method.sinks
        hidden = None
        if hierarchy.fixed:
            number = number * hierarchy.width
            keys, values = (
                ops.gather_pages(x[:, :, sinks:], pages, hierarchy.width, complete=complete)
                for x in (cache.keys, cache.values)
            )
            if not complete:
                hidden = (pages < 0).repeat_interleave(hierarchy.width, -1, output_size=keys.shape[2])
        else:
            ends = cache.channel("page_end")
            end = ends.gather(-1, pages.clamp_min(0)).long()
            start = ends.gather(-1, (pages - 1).clamp_min(0)).long().where(pages > 0, sinks)
            slots = start[..., None] + torch.arange(hierarchy.width, device=cache.device)
            hidden = ((slots >= end[..., None]) | (pages < 0)[..., None]).flatten(-2)
            slots = slots.flatten(-2).masked_fill(hidden, 0)
            keys, values = ops.gather_fields([cache.keys, cache.values], slots, complete=True)
            number = (~hidden).sum() / hidden.shape[1]
        logits = ops.key_logits(self.rows, keys, self.scaling)
        if hidden is not None:
            logits.masked_fill_(hidden[:, :, None], float("-inf"))
            values = values.masked_fill_(hidden[..., None], 0)
        return Candidates(self, -1, None, logits, number, hidden is None, v=values)

    def _scored(self, level: int, index: Tensor | slice, hidden: Tensor | None, number: float | Tensor) -> Candidates:
        """Nodes of a level with what the method wants to know of them.

        Args:
            index: int64 ``[B, Hkv, C]``, -1 for none, or a slice.
            hidden: bool ``[B, Hkv or 1, 1, C]``: places that are not used; None when all are.
            number: how many are.
        """
        method, hierarchy = self.method, self.method.pages
        fields = {name: self.cache.channel(hierarchy.channel(name, level)) for name in self._names}
        log_size = hierarchy.log_size(self.cache, level)
        if isinstance(log_size, Tensor):
            fields["log_size"] = log_size
        if isinstance(index, slice):
            fields = {name: field[:, :, index] for name, field in fields.items()}
        else:
            fields = dict(zip(fields, ops.gather_fields(list(fields.values()), index, complete=hidden is None)))
        if isinstance(log_size, Tensor):
            log_size = fields["log_size"][:, :, None]
        dot = ops.key_logits(self.rows, fields["k"], self.scaling)
        spread = None
        if method.bias == "spread" or (method.score == "spread" and method.estimates):
            spread = ops.logit_deviation(self.rows, fields["spread"], self.scaling)
        bias = {
            "none": lambda: None,
            "log": lambda: log_size,
            "entropy": lambda: fields["entropy"][:, :, None],
            "spread": lambda: ops.free_energy(spread * WEIGHT_SPREAD, log_size).add_(log_size),
        }[method.bias]()
        logits, rank, upper, lower = dot if bias is None else dot + bias, None, None, None
        if method.uses_bounds:
            upper = ops.largest_logit(self.rows, fields["low"], fields["high"], self.scaling) + log_size
        if method.refine == "missed_mass":
            # Jensen's inequality for the mean; any other average of keys has a logit below their largest
            lower = dot + log_size if method.compressor == "mean" and hierarchy.fixed else dot.clone()
        elif method.score == "spread":
            rank = ops.free_energy(spread, log_size).add_(logits if method.bias == "log" else dot + log_size)
        elif method.score == "box":
            rank = ops.logit_reach(self.rows, fields["spread"], self.scaling).add_(log_size).add_(dot)
        elif method.score == "bound":
            rank = upper
        if hidden is not None:
            for estimate in (logits, rank, upper, lower):
                if estimate is not None:
                    estimate.masked_fill_(hidden, float("-inf"))
        index = None if isinstance(index, slice) else index
        return Candidates(self, level, index, logits, number, hidden is None, rank, upper, lower, fields["v"])
