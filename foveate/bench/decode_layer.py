"""Layers that decode token after token: level `layer` of the decode bench."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foveate import ops
from foveate.bench import cold
from foveate.methods import Method
from foveate.state import SlotCache
from foveate.state.device_rows import DeviceRows

_WARM_UP, _STEPS = 8, 32
"""Tokens that are not timed where steps are not replayed, and those that are."""


def room(period: int) -> int:
    """Tokens that a layer is given in all, of which every ``period``-th does more."""
    return _WARM_UP + max(_STEPS, 3 * period)


def newest(cache: SlotCache) -> tuple[Tensor, Tensor]:
    """A token like the last one, ``[B, Hkv, 1, D(v)]``."""
    return cache.keys[:, :, -1:].clone(), cache.values[:, :, -1:].clone()


class Layer(NamedTuple):
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
        keys, values = (self.cache.tensors[name] for name in ("keys", "values"))
        slots = torch.full((len(k),), self.cache.used - 1, device=k.device)

        def token() -> None:
            ops.put_token(keys, values, k, v, slots)
            self.look()

        return token


def one_by_one(layer: Layer, chooser: Layer | None, period: int) -> tuple[float, float]:
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
        rare = period > 0 and (layer.cache.decoded + 1) % period == 0
        ms = cold.once(functools.partial(layer.token, k, v), layer.cache.device.type)
        if step >= _WARM_UP:
            times[rare].append(ms)
    return statistics.median(times[False]), statistics.median(times[True] or [0.0])


class Replayed:
    """A layer of which each token is stored and attended to as in a step that is replayed, behind another layer, which
    computes what all layers of a step share.

    Either stores and attends to a token at once, as a first step does that is not recorded yet. Then the same tokens
    follow again and again: the rows' numbers are put back, and where tokens are given up the places that are taken.

    Args:
        layer: the one that is timed.
        other: the one before it: whose choice it reads, or one of its own kind.
        policy: of the layer.
        period: every so many tokens more is done, such as making pages; 0: never.
    """

    def __init__(self, layer: Layer, other: Layer, policy: Method, period: int):
        self.layer, self.other, self.replay, self.period = layer, other, policy.replay, period
        cache, self._token = layer.cache, newest(layer.cache)
        self._forget()
        other.token(*self._token)
        layer.token(*self._token)
        freed = None if cache.freed is None else cache.freed.rows
        self.rows = DeviceRows(cache.batch_size, cache.evicts, cache.device)
        self.rows.write(cache.rows, freed, cache.capacity)
        self._moving = [self.rows.numbers, self.rows.freed]
        for one in (cache, other.cache):
            places = None
            if one.evicts:
                one.own_memory()
                places = torch.full((one.batch_size, one.geometry.num_kv_heads), -1, device=one.device)
                self._moving += [places, one.tensors["positions"]]
            one.move_to_device(self.rows, places)
        self._decoded = cache.decoded
        self._first = [numbers.clone() for numbers in self._moving]

    def ms(self) -> float | None:
        """Milliseconds that the layer adds to a CUDA graph for a token, with its share of what is done now and then;
        None where that cannot be recorded."""
        turns = self.turns()
        with self.sealed():
            for turn in turns:  # as it is, which makes ready what is made at a first use
                if turn.before is not None:
                    turn.before()
                turn.step()
                if turn is turns[0]:
                    self._count()
            ms = cold.added(turns, self.again)
        return None if ms is None else ms / max(1, self.period)

    def again(self) -> None:
        """Put the numbers of the rows back where they were: the same tokens follow anew."""
        for numbers, first in zip(self._moving, self._first):
            numbers.copy_(first)

    def turns(self) -> list[cold.Turn]:
        """A token; or as many as there are between two times that more is done, and that where it is due."""
        token = cold.Turn(lambda: self.layer.token(*self._token), self._begin)
        more = cold.Turn(lambda: self.replay.maintain(self.layer.cache), self._pause)
        turns = []
        for decoded in range(1, 1 + max(1, self.period)):
            turns.append(token)
            if self.replay.maintenance_due(self._decoded + decoded):
                turns += [more, cold.Turn(lambda: None, self.rows.resume)]
        return turns

    @contextmanager
    def sealed(self) -> Iterator[None]:
        """Within a step: nothing asks the host for numbers that change."""
        self.rows.capturing = True
        try:
            yield
        finally:
            self.rows.capturing = False

    def _begin(self) -> None:
        self.rows.begin()
        self._forget()
        self.other.token(*self._token)

    def _pause(self) -> None:
        self.rows.pause()
        self.replay.maintain(self.other.cache)

    def _count(self) -> None:
        """Add what a token has counted to the totals, as steps do for all layers at their end."""
        self.rows.tally.flush()
        for one in (self.other.cache, self.layer.cache):
            one.counters.count_steps(1, one.batch_size, 0)

    def _forget(self) -> None:
        for one in (self.other, self.layer):
            one.cache.forward.clear()
