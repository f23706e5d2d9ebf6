"""The arguments of :func:`foveate.ops.summaries.attend_summaries`: a cache's tree of summaries and each row's
budgets."""

from __future__ import annotations

import torch
from torch import Tensor

from foveate import ops
from foveate.methods.budgets import budget
from foveate.methods.luka.pages import PageLevels
from foveate.state import SlotCache
from foveate.state.step_plan import StepPlan


def tree_of(pages: PageLevels, top_k: int | float, expand: int | float, cache: SlotCache) -> ops.summaries.Tree:
    """The tree of summaries that a cache holds: views of its channels, and the numbers of each row.

    Args:
        top_k: the method's budget of pages.
        expand: the method's budget of nodes on the levels above the pages.
    """
    get, levels = cache.tensors.get, []
    for level, (size, names) in enumerate(zip(pages.sizes, pages.fields)):
        nodes = ops.Nodes(*map(get, names[: len(ops.Nodes._fields)]))
        recent, records = map(get, names[len(ops.Nodes._fields) :])
        record = pages.record(level, cache.geometry) if pages.records else None
        levels.append(ops.summaries.Level(nodes, size, recent, records, record))
    plan, budgets = cache.plan, (top_k, *[expand] * (len(levels) - 1))
    rows = plan.cached(
        ("tree", pages.spec),
        lambda: _rows(pages, budgets, cache),
        if_captured=lambda: _device_rows(pages, budgets, plan, cache.capacity),
    )
    return ops.summaries.Tree(tuple(levels), rows)


def _rows(pages: PageLevels, budgets: tuple[int | float, ...], cache: SlotCache) -> ops.summaries.Rows:
    """The numbers of each row, computed from row numbers on the host."""
    (lengths, number, paged), device = (cache.rows[name] for name in ("lengths", "pages", "paged")), cache.device
    nodes = [[pages.count(level, n) for n in number] for level in range(len(budgets))]
    allowed = [[budget(share, n, 1) for n in of_level] for share, of_level in zip(budgets, nodes)]
    raw = [length - start + (pages.sinks if start else 0) for length, start in zip(lengths, paged)]
    with torch.inference_mode(False):
        numbers = torch.tensor([lengths, paged, *allowed, *nodes], pin_memory=device.type == "cuda")
        numbers = numbers.to(device, non_blocking=True)
    return ops.summaries.Rows(
        numbers,
        most=tuple(max(counts) for counts in allowed),
        places=max(nodes[-1]),
        width=max(raw),
        sinks=pages.sinks,
        start=paged[0] if len(set(zip(lengths, number, paged))) == 1 else None,
        alike=all(len(set(counts)) == 1 for counts in allowed),
        means=(sum(nodes[-1]) / len(raw), sum(raw) / len(raw)),
    )


def _device_rows(pages: PageLevels, budgets: tuple[float, ...], plan: StepPlan, longest: int) -> ops.summaries.Rows:
    """:func:`_rows` for a captured step, computed on the device. Its widths are large enough for all later replays."""
    lengths, paged, number = (plan[name] for name in ("lengths", "paged", "pages"))
    nodes = [pages.count(level, number) for level in range(len(budgets))]
    allowed = [budget(share, n, 1) for share, n in zip(budgets, nodes)]
    allowed = [n if isinstance(n, Tensor) else torch.full_like(number, n) for n in allowed]
    most = [pages.count(level, pages.most(longest)) for level in range(len(budgets))]
    return ops.summaries.Rows(
        torch.stack([lengths, paged, *allowed, *nodes]),
        most=tuple(int(budget(share, n, 1)) for share, n in zip(budgets, most)),
        places=max(1, most[-1]),
        width=pages.most_raw,
        sinks=pages.sinks,
        start=None,
        alike=False,
        means=None,
    )
