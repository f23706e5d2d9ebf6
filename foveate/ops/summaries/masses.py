"""Running sums of attention, by which pages are made and chosen: the reference (LuKA)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foveate.ops.summaries.tree import Tree
from foveate.ops.summaries.types import Sums, VisitedLevel


def note_masses(masses: Sequence[Tensor], visited: Sequence[VisitedLevel], tree: Tree, group: int, sums: Sums) -> None:
    """Add the masses of a query to running sums.

    Args:
        masses, visited: see :class:`Covered`.
        tree: the tree that was visited.
        group: query heads of a KV head.
    """
    if sums.total is not None:
        _add(sums.total, tree, masses[0])
    if sums.recent is not None:
        _look_back(masses, visited, tree, group, sums.recent, sums.share)


def _add(total: Tensor, tree: Tree, mass: Tensor) -> None:
    rows, sinks = tree.rows, tree.sinks
    if rows.raw_slots is not None:
        total.scatter_add_(2, rows.raw_slots.expand(mass.shape), mass)
        return
    total[:, :, :sinks] += mass[..., :sinks]
    total[:, :, rows.start :] += mass[..., sinks:]


def _look_back(
    masses: Sequence[Tensor], visited: Sequence[VisitedLevel], tree: Tree, group: int, tokens: Tensor, share: float
) -> None:
    sinks, rows = tree.sinks, tree.rows
    masses = [mass / group for mass in masses]
    if rows.raw_slots is not None:
        slots = rows.raw_slots.expand(masses[0].shape)
        change = (masses[0] - tokens.gather(2, slots)).masked_fill_(rows.raw_hidden[:, :, 0], 0.0)
        tokens.scatter_add_(2, slots, change * share)
    else:
        tokens[:, :, rows.start :].lerp_(masses[0][..., sinks:], share)
        if sinks:
            tokens[:, :, :sinks].lerp_(masses[0][..., :sinks], share)
    beneath = masses[-1]
    for nodes, got in zip(reversed(visited), reversed(masses[1 : 1 + len(visited)])):
        places = nodes.chosen.shape[-1]
        if places:
            width = tree.branch(nodes.level) if nodes.level else beneath.shape[-1] // places
            children = beneath[..., : places * width].unflatten(-1, (places, width)).sum(-1)
            chosen = nodes.chosen if nodes.all_chosen else nodes.chosen.clamp_min(0)
            got = got.scatter_add(-1, chosen.long(), children)
        recent = tree.levels[nodes.level].recent
        if nodes.index is None:
            recent[:, :, : got.shape[-1]].lerp_(got, share)
        else:
            index = nodes.index if nodes.complete else nodes.index.clamp_min(0)
            change = (got - recent.gather(2, index)) * share
            if not nodes.complete:
                change = change.masked_fill_(nodes.index < 0, 0.0)
            recent.scatter_add_(2, index, change)
        beneath = got
