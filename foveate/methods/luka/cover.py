"""The tree of summaries that a decode step reads: nodes from the cache, and how many of them each row may refine."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from foveate import ops
from foveate.methods.budgets import Number, budget
from foveate.methods.luka.pages import Pages
from foveate.methods.luka.paging import Budgets, Paging, nodes_over
from foveate.state import Geometry, SlotCache
from foveate.state.device_rows import DeviceRows


def tree_of(pages: Pages, budgets: Budgets, cache: SlotCache) -> ops.Tree:
    """The summaries that a cache holds, with the fields that the method keeps."""
    paging = pages.paging
    names = ["k", "v", *["spread"] * paging.spread, *["low", "high"] * paging.bounds, *["entropy"] * paging.entropy]

    def field(name: str, level: int) -> Tensor:
        return cache.channel(pages.channel(name, level))

    levels = tuple(
        ops.Level(
            ops.Nodes(**{name: field(name, level) for name in names}),
            size,
            None if paging.fixed else field("tokens", level),
            field("recent", level) if paging.recent else None,
            field("records", level) if paging.records else None,
            pages.record(level, cache.geometry) if paging.records else None,
        )
        for level, size in enumerate(paging.sizes)
    )
    step = cache.step
    if step is None:
        numbers = (tuple(cache.rows[name]) for name in ("lengths", "pages", "paged"))
        rows = _rows(paging, budgets, paging.spec, *numbers, cache.geometry.num_heads, cache.device)
    else:
        rows = step.once(("tree", paging.spec), lambda: _device_rows(pages, budgets, step, cache.geometry))
    return ops.Tree(levels, rows, pages.width, None if paging.fixed else cache.channel("page_end"))


@functools.lru_cache(maxsize=64)
def _rows(
    paging: Paging,
    budgets: Budgets,
    spec: str,
    lengths: tuple[int, ...],
    pages: tuple[int, ...],
    paged: tuple[int, ...],
    num_heads: int,
    device: torch.device,
) -> ops.Rows:
    """Which slots and nodes each row has, for all layers of a step; ``spec`` distinguishes 1 from a share of 1.0."""
    even, levels, sinks = len(set(zip(lengths, pages, paged))) == 1, range(len(paging.sizes)), paging.sinks
    nodes = [[nodes_over(paging.sizes, level, n) for n in pages] for level in levels]
    allowed = [[_allowed(paging.sizes, budgets, level, n, num_heads) for n in nodes[level]] for level in levels]
    raw = [length - start + (sinks if start else 0) for length, start in zip(lengths, paged)]
    with torch.inference_mode(False):
        numbers = _sent(torch.tensor([lengths, paged, *allowed, *nodes]), device)
    return ops.Rows(
        numbers,
        most=tuple(max(counts) for counts in allowed),
        places=max(nodes[-1]),
        width=max(raw),
        sinks=sinks,
        start=paged[0] if even else None,
        alike=all(len(set(counts)) == 1 for counts in allowed),
        means=(sum(nodes[-1]) / len(pages), sum(raw) / len(pages)),
    )


def _device_rows(pages: Pages, budgets: Budgets, rows: DeviceRows, geometry: Geometry) -> ops.Rows:
    """The same for a step that is replayed: in as many places as the rows ever need."""
    sizes, levels = pages.sizes, range(len(pages.sizes))
    lengths, paged, number = (rows[name] for name in ("lengths", "paged", "pages"))
    nodes = [pages.count(level, number) for level in levels]
    allowed = [_allowed(sizes, budgets, level, n, geometry.num_heads) for level, n in zip(levels, nodes)]
    allowed = [n if isinstance(n, Tensor) else torch.full_like(number, n) for n in allowed]
    most = [pages.count(level, pages.most(rows.bound)) for level in levels]
    return ops.Rows(
        torch.stack([lengths, paged, *allowed, *nodes]),
        most=tuple(int(_allowed(sizes, budgets, level, n, geometry.num_heads)) for level, n in zip(levels, most)),
        places=max(1, most[-1]),
        width=pages.most_raw,
        sinks=pages.paging.sinks,
        start=None,
        alike=False,
        means=None,
        captured=True,
    )


def _allowed(sizes: tuple[int, ...], budgets: Budgets, level: int, nodes: Number, num_heads: int) -> Number:
    """How many of ``nodes`` nodes of a level a row refines under top_k, and how many it may refine under other rules.

    Args:
        num_heads: query heads of the layer.
    """
    if budgets.refine == "threshold":
        # the masses of the heads of a group sum to at most 1, so no more than this many can be above epsilon
        return math.ceil((1 if budgets.pool == "kv_head" else num_heads) / budgets.epsilon)
    share = budgets.max_refined if budgets.refine != "top_k" else budgets.expand if level else budgets.top_k
    return budget(share, nodes, 1)


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x
