"""The reference of :func:`attend_summaries`, in PyTorch (LuKA, section 3.2); terms: :mod:`foveate.ops.summaries`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from foveate.ops._math import capped, fold_group, unfold_group
from foveate.ops.attend.gather import gather_fields, gather_pages, page_slots
from foveate.ops.compress.records import Records
from foveate.ops.kv import KV
from foveate.ops.logits import Logits
from foveate.ops.score import page_lse
from foveate.ops.score.nodes import free_energy, key_logits, logit_deviation
from foveate.ops.select.reference import topk, topk_rows
from foveate.ops.summaries.cover import Part, attend_cover, refine
from foveate.ops.summaries.masses import VisitedLevel, note_masses
from foveate.ops.summaries.tree import Tree
from foveate.ops.summaries.types import Covered, Refinement, Sums


def attend_summaries(
    q: Tensor,
    kv: KV,
    tree: Tree,
    how: Refinement,
    *,
    logits: Logits,
    need_lse: bool = False,
    sums: Sums | None = None,
) -> Covered:
    """Attention of one query per row over sinks, tail and summaries. The rule ``how`` refines some of the summaries.

    From the top level down (LuKA, section 3.2, Algorithm 1), a node's log-weight is the logit of its summary plus the
    bias. The nodes that the rule chooses are replaced by their children, and at the lowest level by the keys of their
    page. The children either share the parent's mass (equations 2 and 3) or enter with their own logits. The output is
    the softmax over the resulting cover (equation 4).

    Under a cap, a summary's logit is capped like a key's, before the bias is added. Estimates by ``spread`` then take
    as the deviation the distance between the capped logits at the mean and at one deviation above it.

    Args:
        q: ``[B, Hq, 1, D]``.
        kv: keys and values ``[B, Hkv, Lk, D(v)]`` in one piece. It has no lengths, because the tree has each row's.
        tree: summaries of these keys, with the number of nodes that each row has and may refine.
        how: the rule.
        logits: how logits are made. Sinks take their share of the output, but not of the masses of nodes and tokens.
        need_lse: whether to return ``lse``.
        sums: running sums to update in place; None: no sums.

    Raises:
        ValueError: for more than one query a row, queries that do not fit the keys, or keys in blocks or with lengths.
    """
    covered, masses, visited = with_masses(q, kv, tree, how, logits, need_lse or logits.sinks is not None)
    if sums is not None:
        note_masses(masses, visited, tree, q.shape[1] // kv.k.shape[1], sums)
    return covered.beside(logits.sinks, need_lse)


def check(q: Tensor, kv: KV, *_: Any, logits: Logits, **__: Any) -> None:
    """Raise ValueError for invalid arguments of :func:`attend_summaries`."""
    kv.check_unpaged()
    kv.check_queries(q, values=True)
    if q.shape[2] != 1:
        raise ValueError(f"attend_summaries takes one query a row, not {q.shape[2]}")
    logits.check_heads(q)


def with_masses(
    q: Tensor,
    kv: KV,
    tree: Tree,
    how: Refinement,
    logits: Logits,
    need_lse: bool = True,
) -> tuple[Covered, tuple[Tensor, ...], list[VisitedLevel]]:
    """:func:`attend_summaries` without sums and sinks: ``(covered, masses, visited)``, see :func:`note_masses`."""
    return read(Reader(tree, how, kv, fold_group(q, kv.k.shape[1]), logits), q.shape[1], need_lse)


def read(reader: Reader, heads: int, need_lse: bool) -> tuple[Covered, tuple[Tensor, ...], list[VisitedLevel]]:
    """:func:`with_masses` of the tree that ``reader`` reads, for ``heads`` query heads."""
    tree, how, parts = reader.tree, reader.how, [reader.raw()]
    others, read = parts[0].logits.logsumexp(-1, keepdim=True), tree.rows.raw
    nodes, visited = reader.top(), []
    while nodes.level >= 0:
        read = read + nodes.number * tree.levels[nodes.level].reads
        chosen = reader.choose(nodes, others)
        visited.append(VisitedLevel(nodes.level, nodes.index, nodes.complete, chosen))
        if not chosen.shape[-1]:
            parts.append(Part(nodes.logits, nodes.v))
            refined = 0.0
            break
        refined = reader.number(nodes, chosen)
        below = reader.below(nodes, chosen, refined)
        children = below.logits.unflatten(-1, (chosen.shape[-1], -1))
        left, children = refine(
            nodes.logits, chosen, children, preserve=how.mass == "preserve", complete=nodes.complete
        )
        parts.append(Part(left, nodes.v))
        nodes = below.weighted(children, how)
        if nodes.level >= 0:
            others = torch.logaddexp(others, left.logsumexp(-1, keepdim=True))
    else:
        read = read + nodes.number
        parts.append(Part(nodes.logits, nodes.v))
    out, masses = attend_cover(parts)
    lse = None
    if need_lse:
        lse = unfold_group(torch.cat([part.logits for part in parts], -1).logsumexp(-1), heads)
    masses = masses.sum(2).split([part.logits.shape[-1] for part in parts], -1)
    return Covered(out, lse, read, refined), masses, visited


@dataclasses.dataclass(frozen=True)
class _Candidates:
    """The visited nodes of one level, or (level -1) the tokens of refined pages, for the G query heads of each KV
    head."""

    level: int
    index: Tensor | None
    """int64 ``[B, Hkv, C]``: numbers of the nodes; -1 marks an unused place. None: numbers ``0 .. C - 1``, or
    tokens."""
    logits: Tensor
    """fp32 ``[B, Hkv, G, C]``: natural log-weights; -inf at unused places."""
    number: float | Tensor
    """Number of used places: the mean over rows and KV heads, or ``[B, Hkv]``."""
    complete: bool
    """Whether every place is used."""
    v: Tensor
    """``[B, Hkv, C, Dv]``, finite everywhere."""
    rank: Tensor | None = None
    """fp32 ``[B, Hkv, G, C]``: logarithm of the estimated mass by which nodes are chosen; None: ``logits`` choose."""

    @property
    def ranks(self) -> Tensor:
        """``rank``, or the log-weights if it is None."""
        return self.logits if self.rank is None else self.rank

    @property
    def exist(self) -> Tensor:
        """bool ``[B, Hkv, C]``: True at used places."""
        return self.logits[:, :, 0] > float("-inf")

    def weighted(self, log_weights: Tensor, how: Refinement) -> _Candidates:
        """The same nodes with other log-weights. Under ``preserve`` the ranks change by the same amount."""
        rank = self.rank
        if rank is not None and how.mass == "preserve":
            rank = (rank + (log_weights - self.logits)).masked_fill(log_weights.isneginf(), float("-inf"))
        return dataclasses.replace(self, logits=log_weights, rank=rank)


class Reader:
    """Reads a tree's levels for one query per row.

    Args:
        queries: ``[B, Hkv, G, D]``.
        tree, how, kv, logits: see :func:`attend_summaries`.
    """

    def __init__(
        self,
        tree: Tree,
        how: Refinement,
        kv: KV | None,
        queries: Tensor,
        logits: Logits,
    ):
        self.tree, self.how, self.kv = tree, how, kv
        self.queries, self.logits = queries, logits

    def raw(self) -> Part:
        """Sinks and tail as a part of the cover."""
        rows, sinks = self.tree.rows, self.tree.sinks
        if rows.raw_slots is not None:
            slots = rows.raw_slots.expand(-1, self.queries.shape[1], -1)
            keys, values = self._at(slots)
        else:
            keys, values = self._first_and_last(sinks, rows.start)
        logits = key_logits(self.queries, keys, self.logits)
        if rows.raw_slots is not None:
            logits.masked_fill_(rows.raw_hidden, float("-inf"))
        return Part(logits, values)

    # Raw keys and values

    def _first_and_last(self, sinks: int, start: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first ``sinks`` slots and of the slots from ``start`` on."""
        parts = [[x[:, :, :sinks]] * (sinks > 0) + [x[:, :, start:]] for x in (self.kv.k, self.kv.v)]
        return tuple(torch.cat(part, 2) if sinks else part[0] for part in parts)

    def _at(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at slots ``[B, Hkv, N]``."""
        return tuple(gather_fields([self.kv.k, self.kv.v], slots, complete=True))

    def _of_pages(self, pages: Tensor, complete: bool) -> tuple[Tensor, Tensor]:
        """Keys and values of pages ``[B, Hkv, K]``; finite for page -1. ``complete`` promises that no page is -1."""
        how = {"page_size": self.tree.width, "complete": complete}
        return tuple(gather_pages(x[:, :, self.tree.sinks :], pages, **how) for x in (self.kv.k, self.kv.v))

    # Nodes

    def top(self) -> _Candidates:
        """All nodes of the top level."""
        rows = self.tree.rows
        return self._scored(len(self.tree.levels) - 1, slice(rows.places), rows.hidden, rows.nodes)

    def number(self, nodes: _Candidates, chosen: Tensor) -> float | Tensor:
        """The number of chosen nodes: the mean over rows and KV heads, or ``[B, Hkv]``."""
        return float(chosen.shape[2]) if nodes.complete else (chosen >= 0).sum(-1, dtype=torch.float64)

    def below(self, nodes: _Candidates, chosen: Tensor, number: float | Tensor) -> _Candidates:
        """The children of chosen nodes. The children of a node are at consecutive places.

        Args:
            chosen: places in ``nodes``, int64 ``[B, Hkv, K]``; -1 marks an unused place.
            number: number of chosen nodes, see :meth:`number`.
        """
        complete = nodes.complete
        index = chosen if nodes.index is None else nodes.index.gather(-1, chosen if complete else chosen.clamp_min(0))
        if not complete and nodes.index is not None:
            index = index.masked_fill(chosen < 0, -1)
        if nodes.level == 0:
            return self._tokens(index, complete, number)
        branch = self.tree.branch(nodes.level)
        index = page_slots(index, branch, complete=complete).flatten(-2)
        return self._scored(nodes.level - 1, index, None if complete else (index < 0)[:, :, None], number * branch)

    def _tokens(self, pages: Tensor, complete: bool, number: float | Tensor) -> _Candidates:
        """The tokens of pages, int64 ``[B, Hkv, K]``; -1 marks an unused place. ``number`` is the number of pages."""
        width = self.tree.width
        keys, values = self._of_pages(pages, complete)
        logits = key_logits(self.queries, keys, self.logits)
        if not complete:
            hidden = (pages < 0).repeat_interleave(width, -1, output_size=keys.shape[2])
            logits.masked_fill_(hidden[:, :, None], float("-inf"))
            values = values.masked_fill_(hidden[..., None], 0)
        return _Candidates(-1, None, logits, number * width, complete, values)

    def _scored(self, level: int, index: Tensor | slice, hidden: Tensor | None, number: float | Tensor) -> _Candidates:
        """Nodes of a level with their log-weights and ranks.

        Args:
            index: numbers of the nodes, int64 ``[B, Hkv, C]``, -1 for unused places; or a slice.
            hidden: bool ``[B, Hkv or 1, 1, C]``: True at unused places; None: all places are used.
            number: number of used places.
        """
        how, of = self.how, self.tree.levels[level]
        fields = {name: field for name, field in of.nodes._asdict().items() if field is not None}
        if how.score == "lowrank":
            fields["records"] = of.records
        if isinstance(index, slice):
            fields = {name: field[:, :, index] for name, field in fields.items()}
        else:
            fields = dict(zip(fields, gather_fields(list(fields.values()), index, complete=hidden is None)))
        log_size = math.log(of.size)
        softcap = self.logits.softcap
        plain = key_logits(self.queries, fields["k"], dataclasses.replace(self.logits, softcap=None))
        dot = plain if softcap is None else capped(plain.clone(), softcap)
        bias = {
            "none": lambda: None,
            "log": lambda: log_size,
            "entropy": lambda: fields["entropy"][:, :, None],
        }[how.bias]()
        logits = dot if bias is None else dot + bias
        rank = {
            "summary": lambda: None,
            "spread": lambda: self._free_energy(fields["spread"], log_size, plain, dot).add_(
                logits if how.bias == "log" else dot + log_size
            ),
            "lowrank": lambda: page_lse(self.queries, Records(fields["records"], of.record), logits=self.logits),
        }[how.score]()
        if hidden is not None:
            for estimate in (logits, rank):
                if estimate is not None:
                    estimate.masked_fill_(hidden, float("-inf"))
        index = None if isinstance(index, slice) else index
        return _Candidates(level, index, logits, number, hidden is None, fields["v"], rank)

    def _free_energy(self, spread: Tensor, log_size: float, plain: Tensor, dot: Tensor) -> Tensor:
        """:func:`free_energy` of nodes with variance ``spread``. ``plain`` are their logits, ``dot`` the capped
        ones."""
        deviation = logit_deviation(self.queries, spread, self.logits.scaling)
        if self.logits.softcap is not None:
            deviation = capped(deviation.add_(plain), self.logits.softcap).sub_(dot)
        return free_energy(deviation, log_size)

    # Which nodes are refined

    def choose(self, nodes: _Candidates, others: Tensor) -> Tensor:
        """Places of the nodes to refine, int64 ``[B, Hkv, K]``, ascending and then -1.

        Args:
            others: fp32 ``[B, Hkv, G, 1]``: log-sum-exp of the cover without ``nodes``.
        """
        return self._by_mass(nodes, others).expand(-1, self.queries.shape[1], -1)

    def _by_mass(self, nodes: _Candidates, others: Tensor) -> Tensor:
        """:meth:`choose` as ``[B, Hkv or 1, K]``: by the estimated mass of this step, mixed with the recent
        attention."""
        how, level, rows = self.how, nodes.level, self.tree.rows
        recent = self._recent(nodes) if how.prior else None
        total = torch.logaddexp(nodes.ranks.logsumexp(-1, keepdim=True), others)
        mass = nodes.ranks.sub(total).exp_()
        if how.pool == "layer":  # all KV heads visit the same nodes
            mass = mass.flatten(1, 2).amax(1, keepdim=True)
            recent = None if recent is None else recent.amax(1, keepdim=True)
        else:
            mass = mass.mean(2)
        exist = None if nodes.complete else nodes.exist[:, : mass.shape[1]]
        if recent is not None:
            recent = recent.to(mass.dtype)
            mass = mass.lerp(recent if exist is None else recent.masked_fill(~exist, 0.0), how.prior)
        if exist is not None:
            mass = mass.masked_fill(~exist, float("-inf"))
        if not rows.most[level]:
            return mass.new_empty((*mass.shape[:-1], 0), dtype=torch.int64)
        if rows.alike:
            return topk(mass, rows.most[level])
        return topk_rows(mass, rows.numbers[2 + level], rows.most[level])

    def _recent(self, nodes: _Candidates) -> Tensor:
        """Recent attention to the nodes, fp32 ``[B, Hkv, C]``."""
        recent = self.tree.levels[nodes.level].recent
        if nodes.index is None:
            return recent[:, :, : nodes.logits.shape[-1]]
        return recent.gather(2, nodes.index if nodes.complete else nodes.index.clamp_min(0))
