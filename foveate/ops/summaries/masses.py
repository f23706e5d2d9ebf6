"""Updates of the running sums of attention (:class:`Sums`), in PyTorch: a part of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from foveate.ops.summaries.tree import Tree
from foveate.ops.summaries.types import Sums


class VisitedLevel(NamedTuple):
    """The visited nodes of one level, and the nodes among them that were refined."""

    level: int
    index: Tensor | None
    """int64 ``[B, Hkv, C]``: the number in its level of the node at each place; -1 for unused places. None: the number
    of a node is its place."""
    complete: bool
    """Whether neither ``index`` nor ``chosen`` has a -1."""
    chosen: Tensor
    """int ``[B, Hkv, K]``: places of the refined nodes, ascending, then -1."""


def note_masses(masses: Sequence[Tensor], visited: Sequence[VisitedLevel], tree: Tree, group: int, sums: Sums) -> None:
    """Update running sums by the attention of one query per row, see :class:`Sums`.

    Args:
        masses: softmax over the cover, summed over the group, as tensors fp32 ``[B, Hkv, places]``: for sinks and tail;
            for the visited nodes of each level from the top down (0 for refined nodes); and, if any page may be
            refined, for the tokens of refined pages, page after page.
        visited: the levels, from the top down.
        tree: the tree that was visited.
        group: query heads of a KV head.
    """
    if sums.total is not None:
        _add(sums.total, tree, masses[0])
    if sums.recent is not None:
        _average(masses, visited, tree, group, sums.recent, sums.share)


def _add(total: Tensor, tree: Tree, mass: Tensor) -> None:
    """Add the mass of sinks and tail to ``total``."""
    rows, sinks = tree.rows, tree.sinks
    if rows.raw_slots is not None:
        total.scatter_add_(2, rows.raw_slots.expand(mass.shape), mass.to(total.dtype))
        return
    total[:, :, :sinks] += mass[..., :sinks]
    total[:, :, rows.start :] += mass[..., sinks:]


def _average(
    masses: Sequence[Tensor], visited: Sequence[VisitedLevel], tree: Tree, group: int, tokens: Tensor, share: float
) -> None:
    """Update the moving averages of sinks and tail (``tokens``) and of visited nodes, from the lowest level up."""
    sinks, rows = tree.sinks, tree.rows
    masses = [(mass / group).to(tokens.dtype) for mass in masses]
    if rows.raw_slots is not None:
        slots = rows.raw_slots.expand(masses[0].shape)
        change = (masses[0] - tokens.gather(2, slots)).masked_fill_(rows.raw_hidden[:, :, 0], 0.0)
        tokens.scatter_add_(2, slots, change * share)
    else:
        tokens[:, :, rows.start :].lerp_(masses[0][..., sinks:], share)
        if sinks:
            tokens[:, :, :sinks].lerp_(masses[0][..., :sinks], share)
    below = masses[-1]
    for nodes, mass in zip(reversed(visited), reversed(masses[1 : 1 + len(visited)])):
        places = nodes.chosen.shape[-1]
        if places:
            width = tree.branch(nodes.level) if nodes.level else below.shape[-1] // places
            children = below[..., : places * width].unflatten(-1, (places, width)).sum(-1)
            chosen = nodes.chosen if nodes.complete else nodes.chosen.clamp_min(0)
            mass = mass.scatter_add(-1, chosen.long(), children)
        recent = tree.levels[nodes.level].recent
        if nodes.index is None:
            recent[:, :, : mass.shape[-1]].lerp_(mass, share)
        else:
            index = nodes.index if nodes.complete else nodes.index.clamp_min(0)
            change = (mass - recent.gather(2, index)) * share
            if not nodes.complete:
                change = change.masked_fill_(nodes.index < 0, 0.0)
            recent.scatter_add_(2, index, change)
        below = mass
