"""Removing tokens from a cache: one slot per decode step, or all but a chosen set after the prompt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from foveate.ops import first_keys, gather_slots, give_up, weakest


class Freed(NamedTuple):
    slots: Tensor
    """int64 ``[B, Hkv]``: where the next token goes; -1: after the last slot in use."""
    rows: list[bool]
    """Which rows freed a slot."""


class Eviction:
    """What a :class:`~foveate.state.SlotCache` can remove."""

    def evict(
        self,
        rows: Iterable[bool] | Tensor,
        *,
        scores: Tensor | None = None,
        before: Tensor | None = None,
        at: Tensor | None = None,
    ) -> None:
        """Give up one slot of every KV head of some rows; the next token of the row takes its place.

        Args:
            rows: which rows evict; in a step that is replayed bool ``[B]``.
            scores, before, at: which slot, see :func:`foveate.ops.give_up`.
        """
        step, by = self.step, {"scores": scores, "before": before, "at": at}
        if step is not None:
            give_up(self.positions, rows=rows, out=self.device_state.places, **by)
            step.evict(rows)
            self.count("tokens_evicted", step.once("evicted", rows.sum))
            return
        rows = list(rows)
        if not any(rows):
            return
        self.own_memory()
        some = None if all(rows) else self.on_device([int(evicted) for evicted in rows]) != 0
        slots = give_up(self.positions, rows=some, **by)
        self.rows["live"] = [live - evicted for live, evicted in zip(self.rows["live"], rows)]
        self.counters.add("tokens_evicted", sum(rows))
        if not self.staged:
            self.freed = Freed(slots, rows)

    def evict_by_head(self, heads: list[list[bool]], held: list[list[int]], scores: Tensor, before: Tensor) -> None:
        """Give up the weakest slot of some KV heads; the next token takes its place, or that of an earlier hole.

        The tokens of a row then differ in number from head to head: ``live`` is that of the head with the most.

        Args:
            heads: which KV heads of each row evict.
            held: tokens that each KV head of a row holds, before.
            scores, before: see :func:`foveate.ops.weakest`; only tokens before a row's position can leave.
        """
        slotted = [  # heads whose next token takes the place of another, or fills a hole
            [evicts or own < count for evicts, own in zip(*row)]
            for *row, count in zip(heads, held, self.rows["counts"])
        ]
        if not any(map(any, heads if self.staged else slotted)):
            return
        self.own_memory()
        some = self.on_device([int(evicts) for row in heads for evicts in row]).view(len(heads), -1) != 0
        positions = self.positions
        holes = (positions < 0) & first_keys(self.row_tensor("counts")[:, None], self.used)
        slots = weakest(scores, (positions >= 0) & (positions < before[:, None, None]), positions)[..., None]
        kept = positions.gather(2, slots)
        positions.scatter_(2, slots, kept.masked_fill(some[..., None], -1))
        self.uneven = self.uneven or not all(len(set(row)) == 1 for row in heads)
        self.rows["live"] = [max(own - evicts for evicts, own in zip(*row)) for row in zip(heads, held)]
        self.counters.add("tokens_evicted", sum(map(sum, heads)) / len(heads[0]))
        if not self.staged:
            first = torch.where(holes.any(-1), holes.to(torch.uint8).argmax(-1), -1)
            self.freed = Freed(torch.where(some, slots[..., 0], first), [all(row) for row in slotted])

    def retain(self, keep: Tensor | list[Tensor], uneven: bool = False) -> None:
        """Keep only the given slots, in the order of their positions, and free the memory of the others.

        Args:
            keep: int64 ``[B, Hkv, K]``, or one ``[1, Hkv, K_b]`` for each row; -1 marks none.
            uneven: whether KV heads may keep different numbers of slots, K of them the head that keeps the most.
        """
        kept = [keep.shape[2]] * self.batch_size if isinstance(keep, Tensor) else [one.shape[2] for one in keep]
        if isinstance(keep, list):
            width = max(kept)
            keep = torch.cat([torch.nn.functional.pad(one, (0, width - one.shape[2]), value=-1) for one in keep])
        positions = gather_slots(self.positions, keep).masked_fill(keep < 0, -1)
        order = torch.where(positions < 0, torch.iinfo(torch.int32).max, positions).argsort(dim=-1, stable=True)
        keep = keep.gather(2, order)
        if uneven:
            evicted = int((self.positions >= 0).sum() - (positions >= 0).sum()) / self.geometry.num_kv_heads
        else:
            evicted = sum(live - count for live, count in zip(self.rows["live"], kept))
        self.counters.add("tokens_evicted", evicted)
        self.uneven = uneven
        packed = {
            name: gather_slots(movable(self.tensors[name]), keep) for name in self._slot_specs() if name in self.tensors
        }
        packed["positions"] = positions.gather(2, order)
        self.capacity = 0
        for name in packed:
            self.tensors.pop(name, None)
        self.rows["counts"], self.rows["live"] = list(kept), list(kept)
        self.freed, self.ordered, self.snapshots = None, True, {}
        self.reserve(max(1, *kept))
        for name, tensor in packed.items():
            movable(self.tensors[name])[:, :, : tensor.shape[2]] = tensor

    def compact(self) -> None:
        """Close the holes that eviction left, so that slots are packed and in the order of their positions."""
        if "positions" not in self.tensors or (self.ordered and self.freed is None and self.holes() is None):
            return
        positions = self.positions
        order = torch.where(positions < 0, torch.iinfo(torch.int32).max, positions).argsort(dim=-1, stable=True)
        self.retain([order[b : b + 1, :, :live] for b, live in enumerate(self.rows["live"])], self.uneven)


def movable(tensor: Tensor) -> Tensor:
    """The same memory in a dtype that can be gathered and scattered, which fp8 cannot."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 and tensor.is_floating_point() else tensor
