"""Capture and replay of the decode steps of one cache, and of the maintenance that follows some of them.

The first step of a kind runs eagerly and warms up, the second is captured and replayed, later ones are replays. The
recordings are discarded when the memory, the methods, the inputs' shapes or the choice of dense layers change.
"""

from __future__ import annotations

import itertools
import operator
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foveate.errors import FoveateWarning
from foveate.runtime import capture
from foveate.runtime.capture import ROOM
from foveate.runtime.layer import Layer
from foveate.runtime.recorder import CaptureError, Recorder, Recording, Use
from foveate.state.device_rows import DeviceRows


class LayerGroup(NamedTuple):
    """Layers with the same method and the same row numbers, for which one decides whether they are dense."""

    first: Layer
    group: int
    """Index of their row numbers in ``ReplayedSteps._groups``."""
    indices: tuple[int, ...]
    """Of the layers."""


@dataclass
class _Kind:
    """Steps that run the same launches."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    """Buffers at fixed addresses, which the captured step reads its inputs from."""
    options: dict[str, Any] = field(default_factory=dict)
    recording: Recording | None = None
    warm: bool = False
    """Whether a step has run eagerly, so that the next one can be captured."""


class ReplayedSteps:
    """Runs the decode steps of a cache: the first one of a kind eagerly, later ones as replays of a captured one.

    Between steps the cache's row numbers stay on the device. Reading them elsewhere moves them to the host, and the
    next step moves them back; the recording stays valid.

    Args:
        record: captures a function, see :class:`~foveate.runtime.recorder.CudaRecorder`.
        use: where to count captures and replays.
    """

    def __init__(self, record: Recorder, use: Use):
        self._record, self._use = record, use
        self._kinds: dict[Hashable, _Kind] = {}
        self._maintenance: dict[tuple[int, ...], Recording | None] = {}
        """Recorded maintenance, by the indices of its layers; None: it has run eagerly and is not captured yet."""
        self._groups: list[DeviceRows] = []
        """Row numbers, one for all layers that have the same."""
        self._grouping: list[int] = []
        """For each layer, the index of its row numbers in ``_groups``."""
        self._batch = 0
        self._freed_slots: list[Tensor | None] = []
        """For each layer, see :func:`foveate.runtime.capture.freed_slots`."""
        self._memory: list[weakref.ref] = []
        """Tensors whose addresses the recording contains."""
        self._methods: list[Any] = []
        """Specs of the layers' methods."""
        self._layer_groups: list[LayerGroup] = []
        self._room = 0
        """Steps for which the caches have slots: those since the last :meth:`_enter`, and more."""
        self._totals: list[int] = []
        """For each group, the sum of its rows' lengths, without the steps since the last :meth:`_enter`."""
        self._longest: list[int] = []
        """For each group, the tokens in its fullest row, without these steps."""

    def __call__(
        self,
        layers: Sequence[Layer],
        run: Callable[..., Any],
        inputs: dict[str, Tensor],
        options: dict[str, Any],
        written: Callable[[], list[Tensor]] = list,
        kind: Hashable = None,
        after: Hashable = None,
    ) -> Any:
        """Decode one token for every row, and return what the model returns; the next replay overwrites its tensors.

        Args:
            layers: the cache's attention layers that have a method.
            run: the model's forward pass. It must not return the cache: the recording, which the cache owns, would keep
                it alive.
            inputs: its inputs that change with each step, ``[B or 1, 1]`` each, by keyword; ``[B or 1, n]`` of a step
                that verifies the last n tokens.
            options: its other inputs; a change discards the recordings.
            written: returns other tensors that a step writes to in place, such as recurrent states.
            kind: what steps with the same launches have in common.
            after: a kind whose tensors this step reads, and which is captured before it; None: it reads none.

        Raises:
            CaptureError: when the step cannot be captured; nothing has run then.
            ValueError: when an earlier change of the cache was interrupted.
        """
        phase = layers[0].phase
        phase.begin_change()
        try:
            one = self._load(kind, inputs, options)
            if not self._ready(layers):
                self._enter(layers, written())
            self._choose_dense(layers)
        except Exception:  # such as too little memory: the layers hold the tokens that they held
            phase.end_change()
            raise
        try:
            out = self._decode(one, layers, run, after)
        except CaptureError:
            phase.end_change()
            raise
        phase.end_change()
        return out

    def take_back(self, layers: Sequence[Layer], tokens: Sequence[int]) -> None:
        """Remove the last ``tokens[b]`` tokens of row b. The methods keep no state of tokens, and row numbers on the
        device stay there."""
        if not self._ready(layers):
            for layer in layers:
                layer.take_back(tokens)
            return
        for rows in self._groups:
            rows.take_back(tokens)
        numbers, longest = [rows.read()[0] for rows in self._groups], self._longest
        self._totals = [total - sum(tokens) for total in self._totals]
        self._longest = [max(now["counts"]) - rows.steps for now, rows in zip(numbers, self._groups)]
        self._room += min(map(operator.sub, longest, self._longest))
        for layer, group in zip(layers, self._grouping):
            layer.count_columns(numbers[group])

    def _decode(self, one: _Kind, layers: Sequence[Layer], run: Callable[..., Any], after: Hashable) -> Any:
        waits = after is not None and (after not in self._kinds or self._kinds[after].recording is None)
        if one.recording is None and (waits or not one.warm):
            out = self._run(one, layers, run)
            one.warm = True
        else:
            if one.recording is None:
                one.recording = self._recorded(one, layers, run)
                self._use.captured += 1
            one.recording.replay()
            self._use.replayed += 1
            out = one.recording.out
            for layer in layers:
                layer.seen += 1
                layer.counters.dense_steps += layer.captured_dense
        for rows in self._groups:
            rows.steps += 1
        available = [total + self._batch * rows.steps for total, rows in zip(self._totals, self._groups)]
        for layer, group in zip(layers, self._grouping):
            layer.counters.count_step(self._batch, available[group])
        self._maintain(layers)
        return out

    # Inputs

    def _load(self, kind: Hashable, inputs: dict[str, Tensor], options: dict[str, Any]) -> _Kind:
        """Copy the inputs to the buffers of the captured step of this kind."""
        one = self._kinds.setdefault(kind, _Kind())
        shapes = {name: (x.shape, x.dtype, x.device) for name, x in inputs.items()}
        before = {name: (x.shape, x.dtype, x.device) for name, x in one.inputs.items()}
        if options != one.options or shapes != before:
            if grown := [name for name, shape in shapes.items() if shape != before.get(name, shape)]:
                self._use.reason = f"{grown[0]} changes its shape from step to step"
            if before:
                self._discard()
            one.options = dict(options)
            with torch.inference_mode(False):
                one.inputs = {name: torch.empty_like(x, requires_grad=False) for name, x in inputs.items()}
        for name, x in inputs.items():
            one.inputs[name].copy_(x)
        return one

    def forget(self, kinds: Iterable[Hashable]) -> None:
        """Drop the recordings of these kinds, and what they read and wrote."""
        for kind in kinds:
            self._kinds.pop(kind, None)

    def _discard(self) -> None:
        """Drop the recordings."""
        for one in self._kinds.values():
            one.recording, one.warm = None, False
        self._maintenance.clear()

    # The cache

    def _ready(self, layers: Sequence[Layer]) -> bool:
        """Whether all row numbers are on the device and there is a free slot for each row's token."""
        if len(layers) != len(self._grouping) or any(rows.steps >= self._room for rows in self._groups):
            return False
        for layer, group in zip(layers, self._grouping):
            state = layer.cache.device_state
            if state is None or state.rows is not self._groups[group]:
                return False
        return True

    def _enter(self, layers: Sequence[Layer], written: list[Tensor]) -> None:
        """Reserve slots and move the row numbers to the device; discard the recording if its memory was replaced.

        Args:
            written: other tensors that a step writes to in place.
        """
        caches, warm = [layer.cache for layer in layers], any(one.warm for one in self._kinds.values())
        for cache in caches:
            used = cache.used
            if cache.capacity - used < (1 if warm else ROOM):
                cache.reserve(used + ROOM)
        self._room = min(cache.capacity - cache.used for cache in caches)
        keys = [
            (
                layer.method.spec if cache.evicts.in_decode or layer.method.replay.maintains else None,
                cache.capacity,
                *((name, tuple(numbers)) for name, numbers in cache.rows.items()),
                None if cache.freed is None else tuple(cache.freed.rows),
            )
            for layer, cache in zip(layers, caches)
        ]
        different = list(dict.fromkeys(keys))
        grouping = [different.index(key) for key in keys]
        if grouping != self._grouping or caches[0].batch_size != self._batch:
            self._discard()
            groups = [capture.device_rows(caches[grouping.index(group)]) for group in range(len(different))]
            self._freed_slots = [capture.freed_slots(cache) for cache in caches]
            self._grouping, self._batch, self._groups = grouping, caches[0].batch_size, groups
        self._totals, self._longest = [], []
        for group, rows in enumerate(self._groups):
            cache = caches[self._grouping.index(group)]
            capture.write_rows(rows, cache)
            self._totals.append(sum(cache.lengths))
            self._longest.append(cache.used)
        memory = [count for cache in caches for count in cache.counters.on_device(cache.device)]
        for cache, group, slots in zip(caches, grouping, self._freed_slots):
            memory += cache.move_to_device(self._groups[group], slots)
        memory += written
        methods = [layer.method.spec for layer in layers]
        same = len(memory) == len(self._memory) and all(ref() is now for ref, now in zip(self._memory, memory))
        if not same or methods != self._methods:
            self._discard()
            self._memory, self._methods = [weakref.ref(tensor) for tensor in memory], methods
        found: dict[Hashable, list[int]] = {}
        for index, (layer, group) in enumerate(zip(layers, self._grouping)):
            found.setdefault((group, methods[index], layer.dense_below, layer.captured_dense), []).append(index)
        self._layer_groups = [
            LayerGroup(layers[indices[0]], self._grouping[indices[0]], tuple(indices)) for indices in found.values()
        ]

    def _choose_dense(self, layers: Sequence[Layer]) -> None:
        """Decide which layers are dense in this step; discard a recording made under another choice."""
        for first, group, indices in self._layer_groups:
            dense = first.decodes_densely(self._longest[group] + self._groups[group].steps + 1)
            if dense != first.captured_dense:
                self._discard()
                for index in indices:
                    layers[index].captured_dense = dense

    # Running

    def _run(self, one: _Kind, layers: Sequence[Layer], run: Callable[..., Any]) -> Any:
        """The decode step: run eagerly once to warm up (compile kernels, allocate), then captured."""
        with layers[0].phase.step(), capture.step(self._groups):
            return run(**one.inputs, **one.options)

    def _recorded(self, one: _Kind, layers: Sequence[Layer], run: Callable[..., Any]) -> Recording:
        """Capture the step. Nothing runs on the device, so the host's counters are reset to what they were."""
        before = [(layer.seen, layer.counters.dense_steps) for layer in layers]
        try:
            return self._record(lambda: self._run(one, layers, run))
        except (RuntimeError, NotImplementedError) as error:
            raise CaptureError(str(error).partition("\n")[0]) from error
        finally:
            for layer, (seen, dense_steps) in zip(layers, before):
                layer.seen, layer.pending, layer.counters.dense_steps = seen, False, dense_steps

    def _maintain(self, layers: Sequence[Layer]) -> None:
        """Run the maintenance that is due after this step: eagerly the first time, then as replays."""
        due = (
            alike.indices
            for alike in self._layer_groups
            if alike.first.method.replay.maintenance_due(self._groups[alike.group].decoded)
        )
        which = tuple(sorted(itertools.chain.from_iterable(due)))
        if not which:
            return
        groups = {self._grouping[n]: layers[n].method for n in which}

        def run() -> None:
            with capture.maintenance([self._groups[group] for group in groups]):
                for n in which:
                    layers[n].method.replay.maintain_captured(layers[n].cache)

        if which not in self._maintenance:
            run()
            self._maintenance[which] = None
        else:
            if self._maintenance[which] is None:
                try:
                    self._maintenance[which] = self._record(run)
                except (RuntimeError, NotImplementedError) as error:  # nothing has run yet
                    reason = str(error).partition("\n")[0]
                    warnings.warn(
                        f"foveate: maintenance after decode steps could not be captured ({reason}); "
                        "it runs without a CUDA graph",
                        FoveateWarning,
                        stacklevel=2,
                    )
                    self._maintenance[which] = Recording(None, run)
            self._maintenance[which].replay()
        for group, method in groups.items():
            self._groups[group].apply_on_host(method.replay.rows_after_maintenance)
