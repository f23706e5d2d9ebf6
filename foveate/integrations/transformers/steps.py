"""Decode steps of one cache over buffers at fixed addresses, recorded once and replayed."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer
from transformers.utils import ModelOutput

from foveate.integrations.transformers import releases
from foveate.integrations.transformers.cache import Cache, Layer, recurrent_states
from foveate.integrations.transformers.stats import Use
from foveate.state.device_rows import DeviceRows

ROOM = 256
"""Tokens for which a cache gets room before its steps are recorded, where it has less: a full one is recorded anew."""


class CaptureError(RuntimeError):
    """A step could not be recorded; the cache is as it was before."""


class Recording(NamedTuple):
    """A recorded step."""

    out: ModelOutput
    """What it returned; a replay writes it anew."""
    replay: Callable[[], None]


class CudaRecorder:
    """Records steps as CUDA graphs. They share memory for what lives within a step, since one runs at a time.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._pool: Any = None
        self._stream: Any = None
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()

    def __call__(self, run: Callable[[], Any]) -> Recording:
        with torch.cuda.device(self.device):
            graph = torch.cuda.CUDAGraph()
            if self._stream is None:  # PyTorch's own is on whichever GPU came first
                self._stream = torch.cuda.Stream(self.device)
            if not self._graphs:  # memory that no graph uses any more is given back, and taken by no other
                self._pool = torch.cuda.graph_pool_handle()
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                out = run()
        self._graphs.add(graph)
        return Recording(out, graph.replay)


class _Alike(NamedTuple):
    """Layers of one method whose rows have the same numbers."""

    first: Layer
    group: int
    indices: tuple[int, ...]


class Steps:
    """Runs the decode steps of a cache: the first one as it is, the next ones as replays of what it recorded.

    While it does, the numbers of the cache's rows move on the device; whoever asks for them gets them back, and the
    next step puts them there again. A recording is good as long as the cache keeps its memory.

    Args:
        record: makes a :class:`Recording` of what it is given to call.
        use: where to count.
    """

    def __init__(self, record: Callable[[Callable[[], Any]], Recording], use: Use):
        self._record, self._use = record, use
        self._recording: Recording | None = None
        self._warm = False
        self._pauses: dict[tuple[int, ...], Recording | None] = {}
        """What is done between steps, by the layers that do it; None: done once, and not recorded yet."""
        self._inputs: dict[str, Tensor] = {}
        self._options: dict[str, Any] = {}
        self._groups: list[DeviceRows] = []
        self._grouping: list[int] = []
        self._batch = 0
        self._places: list[Tensor | None] = []
        self._memory: list[weakref.ref] = []
        self._methods: list[Any] = []
        self._alike: list[_Alike] = []
        self._room = 0
        self._totals: list[int] = []
        self._longest: list[int] = []
        self._counts: list[tuple[Layer, tuple[int, ...]]] = []
        """What a step adds to the counters of some layers."""

    def __deepcopy__(self, memo):  # a copy of the cache has memory of its own
        return None

    def __call__(
        self, cache: Cache, run: Callable[..., Any], inputs: dict[str, Tensor], options: dict[str, Any]
    ) -> Any:
        """One token for every row.

        Args:
            run: the model.
            inputs: its inputs whose contents change, each ``[B or 1, 1]``.
            options: the others, which do not change, or else the step is recorded anew.

        Raises:
            CaptureError: when the step cannot be recorded.
        """
        layers = [layer for layer in cache.layers if isinstance(layer, Layer)]
        self._load(inputs, options)
        if not self._ready(layers):
            recurrent = [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]
            self._enter(layers, [state for layer in recurrent for state in recurrent_states(layer)])
        self._choose_dense(layers)
        if self._recording is None and not self._warm:
            before = [_counted(layer) for layer in layers]
            out = self._run(run, cache)
            counts = (
                tuple(now - then for now, then in zip(_counted(layer), one)) for layer, one in zip(layers, before)
            )
            self._counts = [(layer, more) for layer, more in zip(layers, counts) if any(more)]
            self._warm = True
        else:
            if self._recording is None:
                self._recording = self._recorded(layers, run, cache)
                self._use.captured += 1
            self._recording.replay()
            self._use.replayed += 1
            out = self._recording.out
            for layer in layers:
                layer.seen += 1
            for layer, counts in self._counts:
                _set_counted(layer, (now + more for now, more in zip(_counted(layer), counts)))
        for rows in self._groups:
            rows.steps += 1
        available = [total + self._batch * rows.steps for total, rows in zip(self._totals, self._groups)]
        for layer, group in zip(layers, self._grouping):
            layer.counters.count_steps(1, self._batch, available[group])
        self._keep_up(layers)
        return releases.with_cache(out, cache)

    # Inputs

    def _load(self, inputs: dict[str, Tensor], options: dict[str, Any]) -> None:
        """Put the inputs where the recorded step reads them."""
        shapes = {name: (x.shape, x.dtype, x.device) for name, x in inputs.items()}
        if options != self._options or shapes != {n: (x.shape, x.dtype, x.device) for n, x in self._inputs.items()}:
            self._forget()
            self._options = dict(options)
            with torch.inference_mode(False):
                self._inputs = {name: torch.empty_like(x, requires_grad=False) for name, x in inputs.items()}
        for name, x in inputs.items():
            self._inputs[name].copy_(x)

    def _forget(self) -> None:
        self._recording, self._warm = None, False
        self._pauses.clear()

    # The cache

    def _ready(self, layers: list[Layer]) -> bool:
        """Whether the rows' numbers are on the device and there is room for a token."""
        if len(layers) != len(self._grouping) or any(rows.steps >= self._room for rows in self._groups):
            return False
        for layer, group in zip(layers, self._grouping):
            state = layer.store.device_state
            if state is None or state.rows is not self._groups[group]:
                return False
        return True

    def _enter(self, layers: list[Layer], recurrent: list[Tensor]) -> None:
        """Put the rows' numbers on the device; forget what was recorded for other memory.

        Args:
            recurrent: states of the layers that are not attention, which a step writes to in place.
        """
        stores = [layer.store for layer in layers]
        for store in stores:
            used = store.used
            if store.capacity - used < (1 if self._warm else ROOM):
                store.reserve(used + ROOM)
            if store.evicts:
                store.own_memory()
        self._room = min(store.capacity - store.used for store in stores)
        keys = [
            (
                layer.method.spec if store.evicts or layer.method.replay.captures_maintenance else None,
                store.capacity,
                *(tuple(numbers) for numbers in store.rows.values()),
                None if store.freed is None else tuple(store.freed.rows),
            )
            for layer, store in zip(layers, stores)
        ]
        different = list(dict.fromkeys(keys))
        grouping = [different.index(key) for key in keys]
        if grouping != self._grouping or stores[0].batch_size != self._batch:
            self._forget()
            self._grouping, self._batch = grouping, stores[0].batch_size
            of_groups = [stores[grouping.index(group)] for group in range(len(different))]
            self._groups = [DeviceRows(store.batch_size, store.evicts, store.device) for store in of_groups]
            with torch.inference_mode(False):
                self._places = [
                    torch.full((one.batch_size, one.geometry.num_kv_heads), -1, device=one.device)
                    if one.evicts
                    else None
                    for one in stores
                ]
        self._totals, self._longest = [], []
        for group, rows in enumerate(self._groups):
            store = stores[self._grouping.index(group)]
            rows.write(store.rows, None if store.freed is None else store.freed.rows, store.capacity)
            self._totals.append(sum(store.lengths))
            self._longest.append(max(store.lengths))
        memory = [tensor for store in stores for tensor in store.tensors.values()]
        memory += [count for store in stores for count in store.counters.on_device(store.device)]
        memory += recurrent
        methods = [layer.method.spec for layer in layers]
        same = len(memory) == len(self._memory) and all(ref() is now for ref, now in zip(self._memory, memory))
        if not same or methods != self._methods:
            self._forget()
            self._memory, self._methods = [weakref.ref(tensor) for tensor in memory], methods
        for store, group, places in zip(stores, self._grouping, self._places):
            store.move_to_device(self._groups[group], places)
        alike: dict[Hashable, list[int]] = {}
        for index, (layer, group) in enumerate(zip(layers, self._grouping)):
            alike.setdefault((group, methods[index], layer.dense_below, layer.replays_dense), []).append(index)
        self._alike = [_Alike(layers[same[0]], self._grouping[same[0]], tuple(same)) for same in alike.values()]

    def _choose_dense(self, layers: list[Layer]) -> None:
        """Forget a recording of a step that reads everything in other layers than this one is to."""
        for first, group, indices in self._alike:
            reads = first.reads_whole(self._longest[group] + self._groups[group].steps + 1)
            if reads != first.replays_dense:
                self._forget()
                for index in indices:
                    layers[index].replays_dense = reads

    # Running

    def _keep_up(self, layers: list[Layer]) -> None:
        """What some steps are followed by: replayed from its second time on."""
        due = (
            same.indices for same in self._alike if same.first.method.replay.maintenance_due(same.first.store.decoded)
        )
        which = tuple(sorted(itertools.chain.from_iterable(due)))
        if not which:
            return
        groups = {self._grouping[n]: layers[n].method for n in which}

        def run() -> None:
            moving = [self._groups[group] for group in groups]
            for rows in moving:
                rows.capturing = True
                rows.pause()
            try:
                for n in which:
                    layers[n].method.replay.maintain(layers[n].store)
                for rows in moving:
                    rows.resume()
            finally:
                for rows in moving:
                    rows.capturing = False

        if which not in self._pauses:
            run()
            self._pauses[which] = None
        else:
            if self._pauses[which] is None:
                try:
                    self._pauses[which] = self._record(run)
                except (RuntimeError, NotImplementedError) as error:  # nothing has been done yet
                    told = f"what follows some steps could not be captured ({str(error).partition(chr(10))[0]})"
                    warnings.warn(f"foveate: {told}; it is run as it is", stacklevel=2)
                    self._pauses[which] = Recording(None, run)
            self._pauses[which].replay()
        for group, method in groups.items():
            self._groups[group].apply_on_host(method.replay.rows_after_maintenance)

    def _run(self, run: Callable[..., Any], cache: Cache) -> ModelOutput:
        """The step itself: what is recorded, or done once to make ready what is made at a first use."""
        for rows in self._groups:
            rows.capturing = True
            rows.begin()
        try:
            out = run(**self._inputs, **self._options, **{releases.CACHE: cache})
            for rows in self._groups:
                rows.tally.flush()
        finally:
            for rows in self._groups:
                rows.capturing = False
        # the cache would keep itself alive through what was recorded for it
        return releases.without_cache(out)

    def _recorded(self, layers: list[Layer], run: Callable[..., Any], cache: Cache) -> Recording:
        """The step, recorded and not yet done: nothing has changed but what is recorded to change."""
        before = [(layer.seen, _counted(layer)) for layer in layers]
        try:
            return self._record(lambda: self._run(run, cache))
        except (RuntimeError, NotImplementedError) as error:
            raise CaptureError(str(error).partition("\n")[0]) from error
        finally:
            for layer, (seen, counts) in zip(layers, before):
                layer.seen, layer._pending = seen, False
                _set_counted(layer, counts)


def _counted(layer: Layer) -> tuple[int, ...]:
    """What the host counts of a step: the same in every replay."""
    return layer.counters.indices_reused, layer.counters.dense_steps


def _set_counted(layer: Layer, counts: Iterable[int]) -> None:
    layer.counters.indices_reused, layer.counters.dense_steps = counts
