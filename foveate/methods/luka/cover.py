"""The arguments of :func:`foveate.ops.attend_summaries`: a cache's tree of summaries, and each row's budgets."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from foveate import ops
from foveate.methods.budgets import Number, budget
from foveate.methods.luka.pages import Pages
from foveate.methods.luka.paging import Budgets, Paging, nodes_over
from foveate.state import SlotCache
from foveate.state.device_rows import DeviceRows


def tree_of(pages: Pages, budgets: Budgets, cache: SlotCache) -> ops.Tree:
    """The tree of summaries that a cache holds: views of its channels, and the numbers of each row."""
    paging = pages.paging
    names = ["k", "v", *["spread"] * paging.spread, *["entropy"] * paging.entropy]

    def field(name: str, level: int) -> Tensor:
        return cache.channel(pages.channel(name, level))

    levels = tuple(
        ops.Level(
            ops.Nodes(**{name: field(name, level) for name in names}),
            size,
            field("recent", level) if paging.recent else None,
            field("records", level) if paging.records else None,
            pages.record(level, cache.geometry) if paging.records else None,
        )
        for level, size in enumerate(paging.sizes)
    )
    step = cache.step
    if step is None:
        numbers = (tuple(cache.rows[name]) for name in ("lengths", "pages", "paged"))
        rows = _rows(paging, budgets, paging.spec, *numbers, cache.device)
    else:
        rows = step.once(("tree", paging.spec), lambda: _device_rows(pages, budgets, step))
    return ops.Tree(levels, rows)


@functools.lru_cache(maxsize=64)
def _rows(
    paging: Paging,
    budgets: Budgets,
    spec: str,
    lengths: tuple[int, ...],
    pages: tuple[int, ...],
    paged: tuple[int, ...],
    device: torch.device,
) -> ops.Rows:
    """The numbers of each row, from row numbers on the host. Cached, so that all layers of a step share the tensors.

    ``spec`` is part of the cache's key, since settings with top_k=1 (a page) and 1.0 (all pages) compare equal.
    """
    even, levels, sinks = len(set(zip(lengths, pages, paged))) == 1, range(len(paging.sizes)), paging.sinks
    nodes = [[nodes_over(paging.sizes, level, n) for n in pages] for level in levels]
    allowed = [[_allowed(budgets, level, n) for n in nodes[level]] for level in levels]
    raw = [length - start + (sinks if start else 0) for length, start in zip(lengths, paged)]
    with torch.inference_mode(False):
        numbers = _to_device(torch.tensor([lengths, paged, *allowed, *nodes]), device)
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


def _device_rows(pages: Pages, budgets: Budgets, rows: DeviceRows) -> ops.Rows:
    """The same for a captured step, from row numbers on the device; widths suffice for all later replays."""
    levels = range(len(pages.sizes))
    lengths, paged, number = (rows[name] for name in ("lengths", "paged", "pages"))
    nodes = [pages.count(level, number) for level in levels]
    allowed = [_allowed(budgets, level, n) for level, n in zip(levels, nodes)]
    allowed = [n if isinstance(n, Tensor) else torch.full_like(number, n) for n in allowed]
    most = [pages.count(level, pages.most(rows.bound)) for level in levels]
    return ops.Rows(
        torch.stack([lengths, paged, *allowed, *nodes]),
        most=tuple(int(_allowed(budgets, level, n)) for level, n in zip(levels, most)),
        places=max(1, most[-1]),
        width=pages.most_raw,
        sinks=pages.paging.sinks,
        start=None,
        alike=False,
        means=None,
    )


def _allowed(budgets: Budgets, level: int, nodes: Number) -> Number:
    """How many of a level's ``nodes``, an int or int64 ``[B]``, a row refines."""
    return budget(budgets.expand if level else budgets.top_k, nodes, 1)


def _to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy to the device from pinned memory, without a host sync."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x
