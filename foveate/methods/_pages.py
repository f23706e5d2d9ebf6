"""Pages and the summaries above them: where pages end, what stands for them, level by level."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foveate import ops
from foveate.cache import Channel, Geometry, SlotCache
from foveate.ops.compress import segments

if TYPE_CHECKING:
    from foveate.methods.luka import LuKA

KL_LAG = 8
"""Tokens between the two queries whose attention the KL segmenter compares."""


class Pages:
    """The hierarchy of one LuKA method: it keeps no state of its own, all of it lies in the cache.

    Slots ``0 .. sinks - 1`` stay raw. Pages of tokens follow without gaps; node n of level l stands for the nodes
    ``n * branch .. (n + 1) * branch - 1`` of the level below. Pages are made together with all that stands above them:
    what does not fill a node of the top level stays raw. ``rows["pages"]`` counts a row's pages, ``rows["paged"]`` the
    slots before its tail (0 as long as it has no page).
    """

    def __init__(self, method: LuKA):
        self.method = method
        self.sizes = method.sizes
        self.fixed = method.segmenter == "fixed"
        self.width = self.sizes[0] if self.fixed else segments.longest(self.sizes[0])
        """Most tokens of a page."""
        self.group = self.sizes[-1] // self.sizes[0]
        """Pages under a node of the top level, which are made at once."""

    def branch(self, level: int) -> int:
        """Children of a node above the pages, which stand on tokens."""
        return self.sizes[level] // self.sizes[level - 1]

    def count(self, level: int, pages: int) -> int:
        """Nodes of a level over so many pages."""
        return pages // (self.sizes[level] // self.sizes[0])

    def most(self, length: int) -> int:
        """No row of so many tokens has more pages."""
        least = self.sizes[0] if self.method.segmenter != "gaussian" else segments.shortest(self.sizes[0])
        return max(0, length - self.method.tail - self.method.sinks) // least

    @property
    def most_raw(self) -> int:
        """No row has more sinks and tail when the next pages are due."""
        return self.method.sinks + self.method.tail + self.group * self.width + self.method.compress_every

    def even(self, cache: SlotCache) -> bool:
        """Whether all rows have the same length and the same pages."""
        return cache.uniform and all(len(set(cache.rows[name])) == 1 for name in ("pages", "paged"))

    def channels(self, geometry: Geometry) -> dict[str, Channel]:
        """What to keep beside the keys."""
        method, channels = self.method, {}
        if method.compressor == "trained" and method.trained.func.direction.shape[1:] != (
            geometry.num_kv_heads,
            geometry.head_dim,
        ):
            raise ValueError(f"{method.name}: summariser {method.summariser!r} was trained for another model")
        least = self.sizes[0] if method.segmenter != "gaussian" else segments.shortest(self.sizes[0])
        for level in range(len(self.sizes)):
            per = least * (self.sizes[level] // self.sizes[0])
            vector = Channel((geometry.head_dim,), per=per, dtype=None, recomputed=True)
            number = Channel(per=per, recomputed=True)
            fields = {"k": vector, "v": Channel((geometry.value_dim,), per=per, dtype=None, recomputed=True)}
            if method.uses_spread:
                fields["spread"] = vector
            if method.uses_bounds:
                fields |= {"low": vector, "high": vector}
            if method.bias == "entropy":
                fields["entropy"] = number
            channels |= {self.channel(field, level): channel for field, channel in fields.items()}
            if not self.fixed:
                channels[self.channel("tokens", level)] = number
            if method.weighs_mass and level < len(self.sizes) - 1:
                channels[self.channel("mass", level)] = number
            if method.looks_back:
                channels[self.channel("recent", level)] = Channel(per=per)
        if not self.fixed:
            channels["page_end"] = Channel(per=least, recomputed=True)
        if method.weighs_mass:
            channels["mass"] = Channel()
        if method.looks_back:
            channels["recent"] = Channel()
            channels["queries"] = Channel((geometry.num_heads, method.window, geometry.head_dim), per=0, dtype=None)
        if method.segmenter == "kl":
            channels["divergence"] = Channel()
            channels["recent_q"] = Channel((KL_LAG, geometry.num_heads, geometry.head_dim), per=0, dtype=None)
        return channels

    @staticmethod
    def channel(field: str, level: int) -> str:
        """Name of a field of the nodes of a level."""
        return f"summary_{field}" + (f"_{level}" if level else "")

    def log_size(self, cache: SlotCache, level: int) -> Tensor | float:
        """Logarithm of the tokens beneath each node: a number, or fp32 ``[B, Hkv, N]``."""
        if self.fixed:
            return math.log(self.sizes[level])
        return cache.channel(self.channel("tokens", level)).clamp_min(1.0).log()

    # Making pages

    def extend(self, cache: SlotCache) -> None:
        """Make every node of the top level that ends before the tail, oldest first, and the pages beneath it."""
        if self.fixed and self.even(cache):
            self._extend(cache)
            return
        for b in range(cache.batch_size):
            row = cache.row(b)
            self._extend(row)
            cache.put_back(b, row)

    def _extend(self, cache: SlotCache) -> None:
        first, start = cache.rows["pages"][0], cache.rows["paged"][0] or self.method.sinks
        ends = self._ends(cache, first, start, cache.lengths[0] - self.method.tail)
        ends = ends[: len(ends) // self.group * self.group]
        if not ends:
            return
        last = first + len(ends)
        self._make(cache, 0, first, last, *self._tokens(cache, start, ends))
        if not self.fixed:
            cache.channel("page_end")[:, :, first:last] = cache.on_device(ends)
        for level in range(1, len(self.sizes)):
            begin, end = self.count(level, first), self.count(level, last)
            self._make(cache, level, begin, end, self._below(cache, level, begin, end), None)
        cache.rows["pages"] = [last] * cache.batch_size
        cache.rows["paged"] = [ends[-1]] * cache.batch_size

    def _ends(self, cache: SlotCache, first: int, start: int, stop: int) -> list[int]:
        method, size = self.method, self.sizes[0]
        if method.segmenter == "fixed":
            return list(range(start + size, stop + 1, size))
        if method.segmenter == "gaussian":
            return ops.gaussian_ends(first, start, stop, size, method.page_deviation, method.seed)
        divergence = cache.channel("divergence")[0, 0, start : max(start, stop)].tolist()
        return ops.divergence_ends(divergence, start, method.kl_threshold, size, self.width)

    def _tokens(self, cache: SlotCache, start: int, ends: list[int]) -> tuple[ops.Nodes, Tensor | None]:
        """The raw tokens of new pages, fields ``[B, Hkv, n, S, ...]``, and which of the places are used."""
        if self.fixed:
            used = None
            keys, values = (x[:, :, start : ends[-1]].unflatten(2, (len(ends), -1)) for x in (cache.keys, cache.values))
        else:
            begins = cache.on_device([start, *ends[:-1]])[:, None]
            slots = begins + torch.arange(self.width, device=cache.device)
            used = slots < cache.on_device(ends)[:, None]
            slots = slots.where(used, 0)
            keys, values = (x[:, :, slots] for x in (cache.keys, cache.values))
            used = used[None, None]
        bounds = (keys, keys) if self.method.uses_bounds else (None, None)
        entropy = keys.new_zeros(keys.shape[:4], dtype=torch.float32) if self.method.bias == "entropy" else None
        return ops.Nodes(keys, values, None, *bounds, entropy), used

    def _below(self, cache: SlotCache, level: int, begin: int, end: int) -> ops.Nodes:
        """The children of nodes above the pages, fields ``[B, Hkv, n, S, ...]``."""
        branch = self.branch(level)

        def field(name: str) -> Tensor | None:
            name = self.channel(name, level - 1)
            if name not in cache.specs:
                return None
            return cache.channel(name)[:, :, begin * branch : end * branch].unflatten(2, (-1, branch))

        return ops.Nodes(*(field(name) for name in ops.Nodes._fields))

    def _make(
        self, cache: SlotCache, level: int, begin: int, end: int, children: ops.Nodes, used: Tensor | None
    ) -> None:
        """Write the nodes ``begin .. end - 1`` of a level, made of their children."""
        method = self.method
        mass = self._got("mass", cache, level, begin, end, used) if method.weighs_mass else None
        recent = self._got("recent", cache, level, begin, end, used) if method.looks_back else None
        weights = self._weights(begin, end, children, recent if method.compressor == "recent" else mass, used)
        nodes = ops.summarise(children, weights, used, spread=self.method.uses_spread)
        if self.method.zero_values:
            nodes = nodes._replace(v=torch.zeros_like(nodes.v))
        for name, value in zip(ops.Nodes._fields, nodes):
            if value is not None:
                cache.channel(self.channel(name, level))[:, :, begin:end] = value
        if not self.fixed:
            below = used if level == 0 else cache.channel(self.channel("tokens", level - 1))
            if level:
                branch = self.branch(level)
                below = below[:, :, begin * branch : end * branch].unflatten(2, (-1, branch))
            cache.channel(self.channel("tokens", level))[:, :, begin:end] = below.sum(-1)
        for name, got in (("mass", mass), ("recent", recent)):
            if got is not None and self.channel(name, level) in cache.specs:
                cache.channel(self.channel(name, level))[:, :, begin:end] = got.sum(-1)

    def _weights(
        self, begin: int, end: int, children: ops.Nodes, got: Tensor | None, used: Tensor | None
    ) -> Tensor | None:
        method = self.method
        if method.compressor == "mean":
            return None
        if method.compressor == "recent":
            return ops.root_weights(got, used)
        if method.compressor == "attention":
            return ops.importance_weights(got, method.temperature, used)
        if method.compressor == "trained":
            return method.trained(children.k, used=used)
        heads, width, device = children.k.shape[1], children.k.shape[3], children.k.device
        number = torch.arange(begin, end, device=device)
        sizes = torch.full_like(number, width) if used is None else used.sum(-1)[0, 0]
        return ops.random_weights(number, sizes, width, heads, method.seed)

    def _got(self, name: str, cache: SlotCache, level: int, begin: int, end: int, used: Tensor | None) -> Tensor:
        """Attention that each child got, all of it (``mass``) or lately, mean over the group: ``[B, Hkv, n, S]``."""
        if level:
            branch = self.branch(level)
            got = cache.channel(self.channel(name, level - 1))
            return got[:, :, begin * branch : end * branch].unflatten(2, (-1, branch))
        got, start = cache.channel(name), cache.rows["paged"][0] or self.method.sinks
        if used is None:
            width = self.sizes[0]
            got = got[:, :, start : start + (end - begin) * width].unflatten(2, (-1, width))
        else:
            lengths, width = used.sum(-1)[0, 0], used.shape[-1]
            begins = start + lengths.cumsum(0) - lengths
            slots = (begins[:, None] + torch.arange(width, device=used.device)).where(used[0, 0], 0)
            got = got[:, :, slots] * used
        return got / cache.geometry.group if name == "mass" else got

    def look_back(self, cache: SlotCache, recent: Tensor, share: float) -> None:
        """Tokens, and the nodes that there are, take in what the last queries of a prompt attend to.

        Args:
            recent: fp32 ``[B, Hkv, used]``: attention that each token got from them, the mean over queries and group.
            share: of these queries in all that recent attention averages over.
        """
        cache.channel("recent").lerp_(recent, share)
        if not self.even(cache):
            for b in range(cache.batch_size):
                row = cache.row(b)
                self._look_back(row, recent[b : b + 1], share)
                cache.put_back(b, row)
        else:
            self._look_back(cache, recent, share)

    def _look_back(self, cache: SlotCache, recent: Tensor, share: float) -> None:
        """Of rows with the same pages."""
        pages = cache.rows["pages"][0]
        if not pages:
            return
        start, size = self.method.sinks, self.sizes[0]
        if self.fixed:
            beneath = recent[:, :, start : start + pages * size].unflatten(2, (pages, size)).sum(-1)
        else:
            ends = cache.channel("page_end")[:, :, :pages].long()
            total = torch.nn.functional.pad(recent.cumsum(-1), (1, 0))
            beneath = total.gather(2, ends).diff(dim=-1, prepend=total[:, :, start : start + 1])
        for level in range(len(self.sizes)):
            nodes = self.count(level, pages)
            if level:
                branch = self.branch(level)
                beneath = beneath[:, :, : nodes * branch].unflatten(2, (nodes, branch)).sum(-1)
            if nodes:
                cache.channel(self.channel("recent", level))[:, :, :nodes].lerp_(beneath, share)
