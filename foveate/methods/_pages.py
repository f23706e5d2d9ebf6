"""Pages and the summaries above them: where pages end, what stands for them, level by level."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from foveate import ops
from foveate.cache import Channel, Geometry, SlotCache
from foveate.ops.compress import segments

if TYPE_CHECKING:
    from foveate.methods.luka import LuKA
    from foveate.moving_rows import MovingRows

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

    def extend_in_step(self, cache: SlotCache) -> None:
        """The same of every row at once, by the numbers on the device, in something that is recorded and replayed.

        As many pages are made of each row as any may need; those behind the ones that are due are not read, and are
        made again when they are.
        """
        step = cache.step
        pages, start, after = step.once(("new pages", self.method.spec), lambda: self._due(step))
        new = _OfEach(pages, start, self.most_new * self.group, self.sizes[0], step, self.method.spec)
        self._make(cache, 0, new, *self._tokens(cache, new))
        for level in range(1, len(self.sizes)):
            self._make(cache, level, new, self._below(cache, level, new), None)
        step.after(("new pages", self.method.spec), lambda: [step[name].copy_(after[name]) for name in after])

    @property
    def most_new(self) -> int:
        """Nodes of the top level that a row gets at most when pages are made after ``compress_every`` more tokens."""
        under = self.group * self.sizes[0]
        return (under - 1 + self.method.compress_every) // under

    def _due(self, rows: Mapping[str, Tensor] | MovingRows) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Each row's pages, where its next one begins, and its numbers when what is due has been made."""
        pages, paged = rows["pages"].clone(), rows["paged"]
        start = torch.where(paged > 0, paged, self.method.sinks)
        under = self.group * self.sizes[0]
        due = ((rows["lengths"] - self.method.tail - start) // under).clamp(0, self.most_new)
        after = {"pages": pages + due * self.group, "paged": torch.where(due > 0, start + due * under, paged)}
        return pages, start, after

    def numbers_after(self, rows: Mapping[str, list[int]]) -> dict[str, list[int]]:
        """Numbers of the host as :meth:`extend_in_step` leaves those of the device."""
        numbers = {name: torch.tensor(rows[name]) for name in ("lengths", "pages", "paged")}
        return {name: after.tolist() for name, after in self._due(numbers)[2].items()}

    def _extend(self, cache: SlotCache) -> None:
        first, start = cache.rows["pages"][0], cache.rows["paged"][0] or self.method.sinks
        ends = self._ends(cache, first, start, cache.lengths[0] - self.method.tail)
        ends = ends[: len(ends) // self.group * self.group]
        if not ends:
            return
        new = _Alike(first, first + len(ends), start, self.sizes[0])
        self._make(cache, 0, new, *(self._tokens(cache, new) if self.fixed else self._varied(cache, start, ends)))
        if not self.fixed:
            cache.channel("page_end")[:, :, first : new.last] = cache.on_device(ends)
        for level in range(1, len(self.sizes)):
            self._make(cache, level, new, self._below(cache, level, new), None)
        cache.rows["pages"] = [new.last] * cache.batch_size
        cache.rows["paged"] = [ends[-1]] * cache.batch_size

    def _ends(self, cache: SlotCache, first: int, start: int, stop: int) -> list[int]:
        method, size = self.method, self.sizes[0]
        if method.segmenter == "fixed":
            return list(range(start + size, stop + 1, size))
        if method.segmenter == "gaussian":
            return ops.gaussian_ends(first, start, stop, size, method.page_deviation, method.seed)
        divergence = cache.channel("divergence")[0, 0, start : max(start, stop)].tolist()
        return ops.divergence_ends(divergence, start, method.kl_threshold, size, self.width)

    def _tokens(self, cache: SlotCache, new: _Alike | _OfEach) -> tuple[ops.Nodes, None]:
        """The raw tokens of new pages, fields ``[B, Hkv, n, S, ...]``; every place is used."""
        return self._raw(*(new.tokens(x) for x in (cache.keys, cache.values))), None

    def _varied(self, cache: SlotCache, start: int, ends: list[int]) -> tuple[ops.Nodes, Tensor]:
        """The same of pages of different sizes, and which of the places are used."""
        begins = cache.on_device([start, *ends[:-1]])[:, None]
        slots = begins + torch.arange(self.width, device=cache.device)
        used = slots < cache.on_device(ends)[:, None]
        slots = slots.where(used, 0)
        return self._raw(*(x[:, :, slots] for x in (cache.keys, cache.values))), used[None, None]

    def _raw(self, keys: Tensor, values: Tensor) -> ops.Nodes:
        bounds = (keys, keys) if self.method.uses_bounds else (None, None)
        entropy = keys.new_zeros(keys.shape[:4], dtype=torch.float32) if self.method.bias == "entropy" else None
        return ops.Nodes(keys, values, None, *bounds, entropy)

    def _over(self, level: int) -> int:
        """Pages under a node of a level."""
        return self.sizes[level] // self.sizes[0]

    def _children(self, cache: SlotCache, name: str, level: int, new: _Alike | _OfEach) -> Tensor:
        """A field of the children of new nodes above the pages, ``[B, Hkv, n, S, ...]``."""
        return new.nodes(cache.channel(self.channel(name, level - 1)), self._over(level), self.branch(level))

    def _below(self, cache: SlotCache, level: int, new: _Alike | _OfEach) -> ops.Nodes:
        """The children of new nodes above the pages."""
        return ops.Nodes(
            *(
                self._children(cache, name, level, new) if self.channel(name, level - 1) in cache.specs else None
                for name in ops.Nodes._fields
            )
        )

    def _make(
        self, cache: SlotCache, level: int, new: _Alike | _OfEach, children: ops.Nodes, used: Tensor | None
    ) -> None:
        """Write the new nodes of a level, made of their children."""
        method, over = self.method, self._over(level)
        mass = self._got("mass", cache, level, new, used) if method.weighs_mass else None
        recent = self._got("recent", cache, level, new, used) if method.looks_back else None
        weights = self._weights(over, new, children, recent if method.compressor == "recent" else mass, used)
        nodes = ops.summarise(children, weights, used, spread=self.method.uses_spread)
        if self.method.zero_values:
            nodes = nodes._replace(v=torch.zeros_like(nodes.v))
        fields = dict(zip(ops.Nodes._fields, nodes))
        if not self.fixed:
            fields["tokens"] = (used if level == 0 else self._children(cache, "tokens", level, new)).sum(-1)
        for name, got in (("mass", mass), ("recent", recent)):
            if got is not None and self.channel(name, level) in cache.specs:
                fields[name] = got.sum(-1)
        for name, value in fields.items():
            if value is not None:
                new.write(cache.channel(self.channel(name, level)), over, value)

    def _weights(
        self, over: int, new: _Alike | _OfEach, children: ops.Nodes, got: Tensor | None, used: Tensor | None
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
        number = torch.arange(new.first // over, new.last // over, device=device)
        sizes = torch.full_like(number, width) if used is None else used.sum(-1)[0, 0]
        return ops.random_weights(number, sizes, width, heads, method.seed)

    def _got(self, name: str, cache: SlotCache, level: int, new: _Alike | _OfEach, used: Tensor | None) -> Tensor:
        """Attention that each child got, all of it (``mass``) or lately, mean over the group: ``[B, Hkv, n, S]``."""
        if level:
            return self._children(cache, name, level, new)
        got = cache.channel(name)
        if used is None:
            got = new.tokens(got)
        else:
            lengths, width = used.sum(-1)[0, 0], used.shape[-1]
            begins = new.start + lengths.cumsum(0) - lengths
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


class _Alike(NamedTuple):
    """New pages of rows that all have the same ones: ``first .. last - 1``, of the tokens from ``start`` on."""

    first: int
    last: int
    start: int
    size: int
    """Tokens of a page, where all have as many."""

    def tokens(self, x: Tensor) -> Tensor:
        """What the slots ``[B, Hkv, L, ...]`` of their tokens hold, ``[B, Hkv, n, S, ...]``."""
        number = self.last - self.first
        return x[:, :, self.start : self.start + number * self.size].unflatten(2, (number, self.size))

    def nodes(self, x: Tensor, over: int, branch: int) -> Tensor:
        """What the ``branch`` children of each new node over so many pages hold, likewise."""
        return x[:, :, self.first // over * branch : self.last // over * branch].unflatten(2, (-1, branch))

    def write(self, x: Tensor, over: int, value: Tensor) -> None:
        """Store what the new nodes over so many pages hold, ``[B, Hkv, n, ...]``."""
        x[:, :, self.first // over : self.last // over] = value


class _OfEach(NamedTuple):
    """The same, but of each row its own, as many: behind its ``pages [B]``, of the tokens from its ``start [B]`` on.

    What lies behind the room that there is goes to the last place, which no row uses: a tail is left.
    """

    pages: Tensor
    start: Tensor
    number: int
    size: int
    step: MovingRows
    spec: str
    """Of the method: where its new pages are is computed once for all layers."""

    def tokens(self, x: Tensor) -> Tensor:
        return self._taken(x, 0, self.number * self.size, self.size)

    def nodes(self, x: Tensor, over: int, branch: int) -> Tensor:
        return self._taken(x, over, self.number // over * branch, branch)

    def write(self, x: Tensor, over: int, value: Tensor) -> None:
        index = self._index(x, over, self.number // over, 1)
        x.scatter_(2, index.expand(value.shape), value.to(x.dtype))

    def _taken(self, x: Tensor, over: int, number: int, each: int) -> Tensor:
        index = self._index(x, over, number, each)
        return x.gather(2, index.expand(*x.shape[:2], number, *x.shape[3:])).unflatten(2, (number // each, each))

    def _index(self, x: Tensor, over: int, number: int, each: int) -> Tensor:
        """Where ``number`` tokens of pages begin (``over`` 0), or nodes of which ``each`` are under one over so many
        pages, to be broadcast along ``x``."""

        def places() -> Tensor:
            first = self.pages // over * each if over else self.start
            return (first[:, None] + torch.arange(number, device=x.device)).clamp_max(x.shape[2] - 1)

        index = self.step.once(("new places", self.spec, over, number, each, x.shape[2]), places)
        return index.view(len(index), 1, number, *[1] * (x.dim() - 3))
