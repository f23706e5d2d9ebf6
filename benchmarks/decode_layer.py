"""Layers that decode token after token: level `layer` of the decode bench."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import cold_cache_timing as cold
from foveate import ops
from foveate.methods import Method
from foveate.runtime import capture
from foveate.state import SlotCache

_WARM_UP, _STEPS = 8, 32
"""Tokens that are not timed where steps are not replayed, and those that are."""


def room(period: int) -> int:
    """Tokens that a layer is given in all, of which every ``period``-th does more."""
    return _WARM_UP + max(_STEPS, 3 * period)


def newest(cache: SlotCache) -> tuple[Tensor, Tensor]:
    """A token like the last one, ``[B, Hkv, 1, D(v)]``."""
    return cache.keys[:, :, -1:].clone(), cache.values[:, :, -1:].clone()


class TimedLayer(NamedTuple):
    """A cache, and what looks at it in a step."""

    cache: SlotCache
    decode: Callable[[SlotCache], Any]

    def look(self) -> None:
        """Attend."""
        self.decode(self.cache)
        if self.cache.tally is not None:
            self.cache.tally.forget()

    def token(self, k: Tensor, v: Tensor) -> None:
        """Store a token and attend."""
        self.cache.write_step(k, v)
        self.look()

    def newest_again(self) -> Callable[[], None]:
        """What stores a token more in always the same place, and attends: for libraries, to which the length is not a
        number on the device."""
        k, v = newest(self.cache)
        self.cache.append(k, v)
        memory = ops.KV(self.cache.store.keys, self.cache.store.values)
        slots = torch.full((len(k),), self.cache.used - 1, device=k.device)

        def token() -> None:
            ops.put_token(memory, k, v, slots)
            self.look()

        return token


def one_by_one(layer: TimedLayer, chooser: TimedLayer | None, period: int) -> tuple[float, float]:
    """Milliseconds of steps that are not replayed, with the time that the host takes.

    Args:
        chooser: the layer whose choice this one reads, and which is not timed.
        period: every so many steps one does more.

    Returns:
        Medians: of ordinary steps, and of every ``period``-th.
    """
    k, v = newest(layer.cache)
    times: dict[bool, list[float]] = {False: [], True: []}
    for step in range(room(period)):
        layer.cache.forward.clear()
        if chooser is not None:
            chooser.token(k, v)
        rare = period > 0 and (layer.cache.plan.decoded + 1) % period == 0
        ms = cold.once(functools.partial(layer.token, k, v), layer.cache.device.type)
        if step >= _WARM_UP:
            times[rare].append(ms)
    return statistics.median(times[False]), statistics.median(times[True] or [0.0])


class Replayed:
    """A layer that decodes as in a replayed step, after another layer, which computes what the layers of a step share.

    Both decode one token at once, as a warm-up step does. After that the same tokens are decoded again and again: the
    row numbers are reset each time, and for methods that evict the freed slots, too.

    Args:
        layer: the layer that is timed.
        other: the layer before it: the one whose selection it reads, or one of its own kind.
        policy: the method of the timed layer.
        period: tokens between two maintenances, such as making pages; 0: there is none.
    """

    def __init__(self, layer: TimedLayer, other: TimedLayer, policy: Method, period: int):
        self.layer, self.other, self.replay, self.period = layer, other, policy.replay, period
        cache, self._token = layer.cache, newest(layer.cache)
        self._forget()
        other.token(*self._token)
        layer.token(*self._token)
        self.rows = capture.move_to_device([cache, other.cache])
        self._on_device = [self.rows.numbers, self.rows.freed]
        for one in (cache, other.cache):
            if one.evicts.in_decode:
                self._on_device += [one.device_state.freed_slots, one.tensors["positions"]]
        self._decoded = self.rows.decoded
        self._first = [numbers.clone() for numbers in self._on_device]

    def ms(self) -> float | None:
        """Milliseconds that the layer adds to a CUDA graph for a token, with its share of maintenance.

        None where that cannot be captured.
        """
        turns = self.turns()
        with capture.capturing([self.rows]):
            for turn in turns:  # warm-up: sets up what a first use sets up
                if turn.before is not None:
                    turn.before()
                turn.step()
                if turn is turns[0]:
                    self._count()
            ms = cold.added(turns, self.again)
        return None if ms is None else ms / max(1, self.period)

    def again(self) -> None:
        """Reset the row numbers, so that the same tokens follow again."""
        for numbers, first in zip(self._on_device, self._first):
            numbers.copy_(first)

    def turns(self) -> list[cold.Turn]:
        """One token, or a period of tokens with the maintenance that is due among them."""
        token = cold.Turn(lambda: self.layer.token(*self._token), self._begin)
        more = cold.Turn(lambda: self.replay.maintain_captured(self.layer.cache), self._pause)
        turns = []
        for decoded in range(1, 1 + max(1, self.period)):
            turns.append(token)
            if self.replay.maintenance_due(self._decoded + decoded):
                turns += [more, cold.Turn(lambda: None, self.rows.resume)]
        return turns

    def _begin(self) -> None:
        self.rows.begin()
        self._forget()
        self.other.token(*self._token)

    def _pause(self) -> None:
        self.rows.pause()
        self.replay.maintain_captured(self.other.cache)

    def _count(self) -> None:
        """Add what a token has counted to the totals, as the end of a step does for all layers."""
        self.rows.tally.flush()
        for one in (self.other.cache, self.layer.cache):
            one.counters.count_step(one.batch_size, 0)

    def _forget(self) -> None:
        for one in (self.other, self.layer):
            one.cache.forward.clear()
