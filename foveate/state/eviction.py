"""Removing tokens from a cache: one slot per decode step, or all but a chosen set after the prompt.

A mixin of :class:`~foveate.state.SlotCache`. Under ``record_past`` (assisted decoding may undo tokens), an evicted
slot is only marked empty: the next token goes to a new slot, so that a snapshot can restore the evicted token.
:meth:`Eviction.compact` reclaims the empty slots later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from foveate.ops import first_keys, gather_slots
from foveate.ops.attend import gather_fields
from foveate.ops.retain import give_up, weakest


class Freed(NamedTuple):
    """The slots that the next token of each row reuses."""

    slots: Tensor
    """int64 ``[B, Hkv]``; -1: the token goes after the last slot in use."""
    rows: list[bool]
    """Rows whose next token reuses a slot in every KV head, so that it needs no new slot."""


class Eviction:
    """The operations of a :class:`~foveate.state.SlotCache` that remove tokens."""

    def evict(
        self,
        rows: Iterable[bool] | Tensor,
        *,
        scores: Tensor | None = None,
        before: Tensor | None = None,
        at: Tensor | None = None,
    ) -> None:
        """Evict one token from every KV head of some rows; the row's next token reuses its slot, unless tokens may be
        undone.

        Args:
            rows: for each row whether it evicts; in a captured step bool ``[B]`` on the device.
            scores, before, at: which token leaves, see :func:`foveate.ops.retain.give_up`.
        """
        step, by = self._step, {"scores": scores, "before": before, "at": at}
        if step is not None:
            give_up(self.positions, rows=rows, out=self.device_state.freed_slots, **by)
            step.evict(rows)
            self.count("tokens_evicted", step.plan.cached("evicted", rows.sum))
            return
        rows = list(rows)
        if not any(rows):
            return
        self.store.own_memory()
        some = None if all(rows) else self.plan.constant(map(int, rows)) != 0
        slots = give_up(self.positions, rows=some, **by)
        self.rows["live"] = [live - evicted for live, evicted in zip(self.rows["live"], rows)]
        self.counters.add("tokens_evicted", sum(rows))
        if not self.record_past:
            self.freed = Freed(slots, rows)

    def evict_by_head(self, heads: list[list[bool]], held: list[list[int]], scores: Tensor, before: Tensor) -> None:
        """Evict the token with the lowest score from some KV heads; unless tokens may be undone, the next token reuses
        its slot.

        If a head does not evict but has empty slots, the next token goes to the first empty slot. KV heads of a row may
        then hold different numbers of tokens; ``live`` is the largest of these numbers.

        Args:
            heads: ``[B][Hkv]``: whether the KV head evicts.
            held: ``[B][Hkv]``: tokens that the KV head holds, before the eviction.
            scores: fp32 ``[B, Hkv, used]``, see :func:`foveate.ops.retain.weakest`.
            before: int64 ``[B]``: only tokens before this position can leave.
        """
        reuses = [  # heads whose next token reuses a slot
            [evicts or own < count for evicts, own in zip(*row)]
            for *row, count in zip(heads, held, self.rows["counts"])
        ]
        if not any(map(any, heads if self.record_past else reuses)):
            return
        self.store.own_memory()
        some = self.plan.constant(int(evicts) for row in heads for evicts in row).view(len(heads), -1) != 0
        positions = self.positions
        empty = (positions < 0) & first_keys(self.plan["counts"][:, None], self.used)
        slots = weakest(scores, (positions >= 0) & (positions < before[:, None, None]), positions)[..., None]
        kept = positions.gather(2, slots)
        positions.scatter_(2, slots, kept.masked_fill(some[..., None], -1))
        self.uneven = self.uneven or not all(len(set(row)) == 1 for row in heads)
        self.rows["live"] = [max(own - evicts for evicts, own in zip(*row)) for row in zip(heads, held)]
        self.counters.add("tokens_evicted", sum(map(sum, heads)) / len(heads[0]))
        if not self.record_past:
            first = torch.where(empty.any(-1), empty.to(torch.uint8).argmax(-1), -1)
            self.freed = Freed(torch.where(some, slots[..., 0], first), [all(row) for row in reuses])

    def retain(self, keep: Tensor | list[Tensor], uneven: bool = False) -> None:
        """Keep only the given slots, packed in the order of their positions, and free the memory of the others, unless
        a snapshot needs it.

        Channels per page are 0 afterwards, for their pages hold other tokens.

        The KV head with the most tokens determines how many slots a row uses. Heads with fewer tokens leave their first
        slots empty, so that the newest tokens of a row are in its last slots in every head.

        Args:
            keep: slots, int64 ``[B, Hkv, K]`` or ``[K]`` for all rows and heads; or for each row ``[1, Hkv, K_b]`` or
                ``[K_b]``. -1 for none.
            uneven: whether KV heads may keep different numbers of slots. Counting them then waits for the device.
        """
        heads = self.geometry.num_kv_heads
        if isinstance(keep, Tensor):
            keep = keep.expand(self.batch_size, heads, -1)
            kept = [keep.shape[2]] * self.batch_size
        else:
            kept = [one.shape[-1] for one in keep]
            each = (one.expand(1, heads, -1) for one in keep)
            keep = torch.cat([F.pad(one, (0, max(kept) - one.shape[2]), value=-1) for one in each])
        positions = gather_slots(self.positions, keep).masked_fill(keep < 0, -1)
        if uneven:
            there = (positions >= 0).sum(-1)
            gone = (self.positions >= 0).sum() - there.sum()
            *kept, gone = torch.cat([there.amax(-1), gone[None]]).tolist()
            evicted = gone / heads
        else:
            evicted = sum(live - count for live, count in zip(self.rows["live"], kept))
        width = keep.shape[2]
        last = torch.arange(max(kept), device=self.device) - self.plan.constant(kept)[:, None]  # counted from the end
        order = positions.argsort(dim=-1, stable=True)
        order = order.gather(2, (last % max(width, 1))[:, None].expand(-1, order.shape[1], -1))
        keep, positions = keep.gather(2, order), positions.gather(2, order)
        self.counters.add("tokens_evicted", evicted)
        self.uneven = uneven
        per_slot = [name for name, spec in self.specs.items() if spec.per == 1]
        k, v, *channels = gather_fields([self.keys, self.values, *map(self.tensors.get, per_slot)], keep)
        packed = dict(zip(per_slot, channels)) | {"positions": positions}
        self._keep_memory()
        self.capacity = 0
        for name in self._slot_specs():
            self.tensors.pop(name, None)
        self.rows["counts"], self.rows["live"] = list(kept), list(kept)
        self.freed, self.ordered, self.store = None, True, self._new_store()
        self.reserve(max(1, *kept))
        self.store.write(0, k, v)
        for name, tensor in packed.items():
            self.tensors[name][:, :, : tensor.shape[2]] = tensor

    def compact(self) -> None:
        """Pack the tokens into each row's first slots, in the order of their positions; no-op if they are packed."""
        counts, live = self.rows["counts"], self.rows["live"]
        if "positions" not in self.tensors or (self.ordered and self.freed is None and counts == live):
            return
        order = self.positions.argsort(dim=-1, stable=True)  # the tokens after all empty slots
        rows = (order[b : b + 1, :, self.used - own :] for b, own in enumerate(live))
        self.retain(list(rows), self.uneven)
