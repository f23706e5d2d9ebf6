"""What a LuKA cover is made of, and what a decode step leaves behind in it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foveate import ops
from foveate.cache import Geometry, SlotCache
from foveate.methods.base import Number, budget, clamp
from foveate.moving_rows import MovingRows

if TYPE_CHECKING:
    from foveate.methods.luka import LuKA


def tree_of(method: LuKA, cache: SlotCache) -> ops.Tree:
    """The summaries that a cache holds, and those fields of them that the method looks at."""
    pages = method.pages
    names = ["k", "v", *["spread"] * method.uses_spread, *["low", "high"] * method.uses_bounds]
    names += ["entropy"] * (method.bias == "entropy")

    def field(name: str, level: int) -> Tensor:
        return cache.channel(pages.channel(name, level))

    levels = tuple(
        ops.Level(
            ops.Nodes(**{name: field(name, level) for name in names}),
            size,
            None if pages.fixed else field("tokens", level),
            field("recent", level) if method.looks_back else None,
        )
        for level, size in enumerate(method.sizes)
    )
    step = cache.step
    if step is None:
        numbers = (tuple(cache.rows[name]) for name in ("lengths", "pages", "paged"))
        rows = _rows(method, method.spec, *numbers, cache.geometry, cache.device)
    else:
        rows = step.once(("tree", method.spec), lambda: _moving_rows(method, step, cache.geometry))
    return ops.Tree(levels, rows, pages.width, None if pages.fixed else cache.channel("page_end"))


@functools.lru_cache(maxsize=64)
def _rows(
    method: LuKA,
    spec: str,
    lengths: tuple[int, ...],
    pages: tuple[int, ...],
    paged: tuple[int, ...],
    geometry: Geometry,
    device: torch.device,
) -> ops.Rows:
    """Which slots and nodes each row has, for all layers of a step; ``spec`` tells 1 from a share of 1.0."""
    even, levels = len(set(zip(lengths, pages, paged))) == 1, range(len(method.sizes))
    nodes = [[method.pages.count(level, n) for n in pages] for level in levels]
    allowed = [[_allowed(method, level, n, geometry.num_heads) for n in nodes[level]] for level in levels]
    raw = [length - start + (method.sinks if start else 0) for length, start in zip(lengths, paged)]
    with torch.inference_mode(False):
        numbers = _sent(torch.tensor([lengths, paged, *allowed, *nodes]), device)
    return ops.Rows(
        numbers,
        most=tuple(max(counts) for counts in allowed),
        places=max(nodes[-1]),
        width=max(raw),
        sinks=method.sinks,
        start=paged[0] if even else None,
        alike=all(len(set(counts)) == 1 for counts in allowed),
        means=(sum(nodes[-1]) / len(pages), sum(raw) / len(pages)),
    )


def _moving_rows(method: LuKA, rows: MovingRows, geometry: Geometry) -> ops.Rows:
    """The same for a step that is replayed: in as many places as the rows ever need."""
    hierarchy, sinks, levels = method.pages, method.sinks, range(len(method.sizes))
    lengths, paged, pages = (rows[name] for name in ("lengths", "paged", "pages"))
    nodes = [hierarchy.count(level, pages) for level in levels]
    allowed = [_allowed(method, level, n, geometry.num_heads) for level, n in zip(levels, nodes)]
    allowed = [n if isinstance(n, Tensor) else torch.full_like(pages, n) for n in allowed]
    most = [hierarchy.count(level, hierarchy.most(rows.bound)) for level in levels]
    return ops.Rows(
        torch.stack([lengths, paged, *allowed, *nodes]),
        most=tuple(int(_allowed(method, level, n, geometry.num_heads)) for level, n in zip(levels, most)),
        places=max(1, most[-1]),
        width=hierarchy.most_raw,
        sinks=sinks,
        start=None,
        alike=False,
        means=None,
        moving=True,
    )


def _allowed(method: LuKA, level: int, nodes: Number, num_heads: int) -> Number:
    """How many of so many nodes of a level a row refines, or under rules other than top_k may refine."""
    first = -(-method.first * method.sizes[0] // method.sizes[level])  # nodes over the first pages
    if method.refine == "threshold":
        # the masses of the heads of a group sum to at most 1, so no more than this many can be above epsilon
        return method.most_above_epsilon(num_heads) + method.first
    share = method.max_refined if method.refine != "top_k" else method.expand if level else method.top_k
    return clamp(budget(share, nodes, 1), first, 1 << 62)


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting for it."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x
