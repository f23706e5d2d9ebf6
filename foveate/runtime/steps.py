"""Decode steps of methods over keys and values that an engine owns, in blocks that its block table names.

The engine writes keys, values and block tables, and reads prompts; a method decides what a decoded token reads. Nothing
is read on the host: layers run as in a captured step (:mod:`foveate.runtime.capture`). The engine may capture them in
CUDA graphs of its own, see :meth:`EngineSteps.begin_capture`.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foveate import ops
from foveate.methods import Method, replay_obstacle, sparse_prompt
from foveate.ops import Choice, Logits
from foveate.runtime.decode import decode
from foveate.runtime.drafts import Drafting
from foveate.runtime.policy import SHORT_SEQUENCE, pays_from
from foveate.state import Counters, Geometry, Ranks, SlotCache, shareable
from foveate.state.device_rows import DeviceRows
from foveate.state.engine_blocks import engine_cache, enter, has_room


def obstacle(method: Method, geometry: Geometry) -> str:
    """Why an engine that owns the keys cannot decode by the method of a layer; empty when it can."""
    if method.evicts:
        return f"{method.name} evicts tokens, and the engine keeps them until a request ends"
    if method.per_request:
        return f"{method.name} {method.per_request}"
    if method.stateful or not shareable(method.channels(geometry)):
        return f"{method.name} keeps state beside the keys that requests which share the engine's blocks cannot share"
    if method.needs_rotary:
        return f"{method.name} needs rotary positions, which the engine does not give"
    if sparse_prompt(method):
        fix = f": add {method.dense_prompts_by}" if method.dense_prompts_by else ""
        return f"{method.name} reads prompts sparsely, and the engine reads them densely{fix}"
    return replay_obstacle(method)


@dataclass
class Totals:
    """Counts of all steps so far, on the host, without rows of padding."""

    steps: int = 0
    rows: int = 0
    """Rows of all steps: decoded tokens."""
    dense_rows: int = 0
    """Decoded tokens whose rows read all keys, see :meth:`EngineSteps.begin`."""
    keys_available: float = 0.0
    """Keys that dense attention would have read, over all layers."""
    selections: int = 0
    """Choices of keys: rows times layers that chose for themselves or for others."""


class Audited(NamedTuple):
    """Measurements of the layers in an audited step, see :meth:`EngineSteps.audit`."""

    mass: list[Tensor]
    """For each layer that chooses keys or reads a choice: the share of the attention that falls on the keys that the
    method reads, fp32 ``[B]``, 0 to 1, the mean over the heads of this rank."""
    alike: list[Tensor]
    """For each of these layers whose heads choose together with heads of other ranks: whether all ranks have chosen the
    same keys, fp32 ``[B]``, 0 or 1."""


class EngineSteps:
    """Runs the decode steps of an engine's layers by their methods, which stay as they are.

    In each step the engine calls :meth:`begin` first and then :meth:`attend` for every layer, in the order of layers.
    When the engine has written tokens of a layer, in a prompt or a decode step, it calls :meth:`written` before the
    layer's :meth:`attend`. Buffers keep their addresses, one set for each number of rows.

    :meth:`begin` fixes two things on the host: the bound of the lengths, which determines widths, and whether the whole
    step is dense. A step is dense if all its rows are short, or if the host launches its kernels one by one. Everything
    else depends on the device alone, which distinguishes short rows from others in a step that is not dense.

    Args:
        methods: the layers' methods, see :meth:`Method.for_layer`, by index.
        device: where keys and values are.
        dense_below: a step reads all keys of a row while the rows of the step, each counted as long as this row, hold
            fewer tokens than ``dense_below``; with 0 no step is dense, and no row because it is short. "auto": on a GPU
            :attr:`Method.sparse_from_tokens`, and rows of fewer tokens than `SHORT_SEQUENCE` are dense, too; elsewhere
            0.
        geometry: a layer's geometry, for "auto"; None: eight KV heads of 128.
        ranks: the ranks of the engine's tensor parallelism; None: this process has all heads.
    """

    def __init__(
        self,
        methods: Mapping[int, Method],
        device: torch.device,
        dense_below: int | str = "auto",
        geometry: Geometry | None = None,
        ranks: Ranks | None = None,
    ):
        self.methods, self.device, self.ranks = dict(sorted(methods.items())), device, ranks
        self.dense = False
        """Whether the present step is dense, see :meth:`begin`."""
        self.totals = Totals()
        self._read: Tensor | None = None
        """Keys read by each layer, fp64 on the device; None before the first step."""
        self._counters = {layer: Counters().declare(method.counters) for layer, method in self.methods.items()}
        self._sparse_from, self._automatic = self._first_sparse(dense_below, geometry), dense_below == "auto"
        self._short = SHORT_SEQUENCE if dense_below == "auto" and self._sparse_from else 0
        self.choosing = sum(method.role.chooses for method in self.methods.values())
        self._first, self._last = min(self.methods), max(self.methods)
        self._caches: dict[int, SlotCache] = {}
        self._rows: dict[int, DeviceRows] = {}
        """By number of rows."""
        self._forward: dict[Hashable, Any] = {}
        """Shared by the layers of a step, see :meth:`SlotCache.shared_key`."""
        self._step: tuple[DeviceRows, Tensor, int, bool] | None = None
        """Of the present step: row numbers, block table, bound, and whether it may have rows that are read whole."""
        self._audit: Audited | None = None
        self._drafts: dict[int, dict[int, Drafting]] = {}
        """What layers chose for the last draft, by layer: of captured steps by number of rows, of others at 0."""
        self._drafting: dict[int, Drafting] | None = None
        """Of the present step, which is one of a draft; None: it is none."""

    def _first_sparse(self, dense_below: int | str, geometry: Geometry | None) -> int:
        """Tokens from which a step is sparse."""
        if dense_below != "auto":
            return int(dense_below)
        if self.device.type != "cuda":
            return 0
        ranks = 1 if self.ranks is None else self.ranks.size
        return pays_from(self.methods.values(), geometry or Geometry(8, 8, 128, 128), ranks)

    def _is_short(self, length: Any, number: Any) -> Any:
        """Whether a row is read whole; ``length`` and ``number`` of rows are ints or tensors."""
        return (length * number < self._sparse_from) | (length < self._short)

    def reads_all(self, layer: int) -> bool:
        """Whether a layer reads all keys in the present step and chooses none, so that the engine may do it."""
        method = self.methods[layer]
        role = method.role
        return (role.reads_all and not role.chooses) or self._dense(method)

    def _dense(self, method: Method) -> bool:
        """Whether a layer reads all keys because the present step is dense."""
        known = method.sparse_from_tokens
        return self.dense and known is not None and (known > 0 or not self._automatic)

    def begin(
        self,
        lengths: Tensor,
        block_table: Tensor,
        bound: int,
        tokens: Sequence[int],
        rows: int | None = None,
        prompts: Sequence[bool] | None = None,
        dense: Sequence[bool] | None = None,
        launched: bool = False,
        draft: int | None = None,
    ) -> None:
        """Start a step.

        Args:
            lengths: int ``[B]`` on the device: tokens of each row, the new one included; 0 for a row of padding.
            block_table: int ``[B, M]``, see :class:`~foveate.ops.BlockTable`.
            bound: no row is longer.
            tokens: the lengths of the rows that decode, or bounds of them, for the counts: rows neither of padding nor
                of prompts.
            rows: rows that are no padding; None: all.
            prompts: rows whose token is a prompt's: they read all keys and are not counted. None: no row.
            dense: other rows that read all keys, whatever their lengths, and are counted; rows of padding come last
                then. None: no row.
            launched: whether an engine that replays other steps as graphs launches this one's kernels from the host.
                Such a step is dense: launching the selection kernels can cost more than reading every key.
            draft: of a token that lossless decoding drafts, how many of its draft come before it; None: it is no draft.
                What the first token of a draft reads, the others read again, see :mod:`foveate.runtime.drafts`. Drafts
                are not counted.
        """
        self._begin(lengths, block_table, bound, prompts, dense, draft, captured=False)
        number = len(lengths) if rows is None else rows
        if not draft:  # a draft stays what its first token was
            self.dense = self._sparse_from > 0 and (launched or self._is_short(bound, number))
        if draft is not None:
            return
        decoding, totals = len(tokens), self.totals
        totals.steps += decoding > 0
        totals.rows += decoding
        whole = [self._is_short(length, number) for length in tokens]
        if dense is not None:
            asked = (one for row, one in enumerate(dense) if prompts is None or not prompts[row])
            whole = map(operator.or_, whole, asked)
        totals.dense_rows += decoding if self.dense else sum(whole)
        totals.keys_available += sum(tokens) * len(self.methods)
        totals.selections += 0 if self.dense else decoding * self.choosing

    def count_dense(self, tokens: Sequence[int]) -> None:
        """Count a step whose layers the engine attends to itself, all keys of all rows; :meth:`begin` is not called.

        Args:
            tokens: the lengths of the rows that decode.
        """
        totals, read = self.totals, float(sum(tokens))
        totals.steps += bool(tokens)
        totals.rows += len(tokens)
        totals.dense_rows += len(tokens)
        totals.keys_available += read * len(self.methods)
        if self._read is None:
            self._count_on_device()
        self._read.add_(read)

    def begin_capture(self, lengths: Tensor, block_table: Tensor, bound: int, draft: int | None = None) -> None:
        """Start a step that an engine captures for the number of rows of ``lengths``; none of it is counted.

        Before each replay the engine calls :meth:`begin` with the same number of rows, which writes the buffers that
        the graph reads. The rows may have any lengths up to the bound, and may be short, of prompts or of padding. The
        graph also reads the memory of ``block_table`` and of the arguments of :meth:`written` and :meth:`attend`.

        Args:
            lengths, block_table: see :meth:`begin`.
            bound: the longest row that a replay may have.
            draft: see :meth:`begin`. A step captured with draft 1 serves all later tokens of a draft, too. It reads the
                choice of the step with draft 0 for the same number of rows, which must have been replayed before.
        """
        self._begin(lengths, block_table, bound, [True] * len(lengths), None, draft, captured=True)
        self.dense = False

    def _begin(
        self,
        lengths: Tensor,
        block_table: Tensor,
        bound: int,
        prompts: Sequence[bool] | None,
        dense: Sequence[bool] | None,
        draft: int | None,
        captured: bool,
    ) -> None:
        number = len(lengths)
        self._drafting = None if draft is None else self._draft(number, draft, captured)
        if self._read is None:
            self._count_on_device()
        if number not in self._rows:
            self._rows[number] = DeviceRows(number, False, self.device, ["sparse"])
            self._rows[number].capturing = True
        step, some_whole = self._rows[number], self._sparse_from > 0 or prompts is not None or dense is not None
        whole = dense if prompts is None else [a or b for a, b in zip(prompts, dense or prompts)]
        step.begin_of(lengths, live=prompts, sparse=whole)
        self._step = (step, block_table, bound, some_whole)
        self._forward.clear()

    def _draft(self, number: int, draft: int, captured: bool) -> dict[int, Drafting]:
        """What each layer reads again after the first token of a draft."""
        number = number if captured else 0
        if not draft:
            choosing = (layer for layer, method in self.methods.items() if method.role.reads_choice_of is None)
            self._drafts[number] = {layer: Drafting() for layer in choosing}
        return self._drafts[number]

    def _count_on_device(self) -> None:
        """Allocate the counters, in the first step: an engine that sleeps may drop what it allocates with its blocks.

        Summaries may be dropped, because the blocks are empty afterwards.
        """
        with torch.inference_mode(False):
            self._read = torch.zeros(len(self.methods), dtype=torch.float64, device=self.device)
            for read, counters in zip(self._read, self._counters.values()):
                counters.keys_read = read
                counters.on_device(self.device)

    def _whole(self) -> Tensor:
        """The lengths of rows that read all their keys: short rows, prompts and rows that are to be dense."""
        step = self._step[0]
        lengths = step["lengths"]
        short = self._is_short(lengths, (lengths > 0).sum())
        return lengths.where(short | (step["sparse"] == 0), 0)

    def allocate(self, layer: int, geometry: Geometry, memory: Tensor) -> None:
        """Allocate what a layer's method keeps of the pages in an engine's blocks; otherwise the first tokens do.

        Args:
            memory: shape and dtype of the blocks, ``[N, Hkv, n, any]``; may be on the meta device.

        Raises:
            ValueError: when pages do not divide blocks.
        """
        channels = self.methods[layer].channels(geometry)
        cache = engine_cache(geometry, memory, self.device, channels, self._counters[layer])
        cache.forward, cache.ranks = self._forward, self.ranks
        self._caches[layer] = cache

    def _cache(self, layer: int, heads: int, k: Tensor, v: Tensor) -> SlotCache:
        cache = self._caches.get(layer)
        if cache is None or not has_room(cache, k):
            self.allocate(layer, Geometry(heads, k.shape[1], k.shape[3], v.shape[3]), k)
            cache = self._caches[layer]
        cache.store.keys, cache.store.values = k, v
        return cache

    def summarises(self, layer: int) -> bool:
        """Whether a layer keeps summaries, for which :meth:`allocate` made room, so that :meth:`written` is needed."""
        return layer in self._caches and bool(self._caches[layer].specs)

    def written(self, layer: int, heads: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Summarise the pages that new tokens of a layer fill, of prompts and of decode steps alike.

        Args:
            heads: query heads of the layer.
            k, v: the engine's blocks, ``[N, Hkv, n, D(v)]``, which hold the new tokens.
            slots: int ``[T]``, where these are: block times n plus the place in it; negative for none.
        """
        cache = self._cache(layer, heads, k, v)
        for write in {one.written for one in cache.specs.values()}:
            write(cache, slots)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        logits: Logits,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attention of one token a row by the layer's method, ``[B, Hq, 1, Dv]``; rows of padding give zeros.

        Args:
            q: ``[B, Hq, 1, D]``.
            k, v: the engine's blocks, ``[N, Hkv, n, D(v)]``, which hold the new tokens.
            logits: how the layer's logits are made.
            out: contiguous ``[B, Hq, 1, Dv]``, to which the output is written; None: to new memory.
        """
        self._start(layer)
        rows, block_table, bound, some_whole = self._step
        if some_whole and rows.plan.whole is None:  # here, within a captured step
            rows.plan.whole = self._whole()
        method, cache = self.methods[layer], self._cache(layer, q.shape[1], k, v)
        cache.sink_logits, cache.softcap = logits.sinks, logits.softcap
        enter(cache, rows, block_table, bound, out)
        dense = self._dense(method)
        try:
            how = {"dense": dense, "need_lse": self._audit is not None}
            drafting = None if self._drafting is None else self._drafting.get(layer)
            attended, choice = decode(method, cache, q, logits.scaling, **how, drafting=drafting)
            found = attended.out
            if self._audit is not None and attended.lse is not None and not choice.reads_all:
                found = self._audited(method, cache, q, logits, attended.lse, choice)
        finally:
            cache.out = None  # which may be a view of much memory
        self._finish(layer)
        return found if out is None or found.data_ptr() == out.data_ptr() else out.copy_(found)

    @contextlib.contextmanager
    def audit(self) -> Iterator[Audited]:
        """Within it the present step runs densely, and counts nothing; the engine may run it as it is afterwards."""
        read, self._audit = self._read.clone(), Audited([], [])
        try:
            yield self._audit
        finally:
            self._audit = None
            self._read.copy_(read)

    def _audited(
        self, method: Method, cache: SlotCache, q: Tensor, logits: Logits, lse: Tensor, choice: Choice
    ) -> Tensor:
        """Attention to all keys, and how much of it a choice, whose log-sum-exp is given, has read."""
        if cache.ranks is not None and method.pools_layer:
            chosen = choice.keys if choice.pages is None else choice.pages
            found = cache.of_all_heads(chosen[:, :1])  # of each rank
            self._audit.alike.append((found == found[:, :1]).all(2).all(1).float())
        dense = ops.attend(q, cache.view(cache.plan["counts"]), logits=logits, need_lse=True, out=cache.out)
        self._audit.mass.append((lse - dense.lse).exp().clamp_max(1).mean((1, 2)))
        return dense.out

    def read_by_engine(self, layer: int) -> None:
        """Count a layer that the engine attends to itself instead of :meth:`attend`, see :meth:`reads_all`."""
        self._start(layer)
        rows = self._step[0]
        rows.tally.add(self._counters[layer]["keys_read"], rows.held())
        self._finish(layer)

    def _start(self, layer: int) -> None:
        if layer == self._first:  # of a step that has run before, too: captured after a first run, say
            self._step[0].run()
            self._forward.clear()

    def _finish(self, layer: int) -> None:
        if layer == self._last and self._drafting is None:
            self._step[0].tally.flush()

    def keys_read(self) -> Tensor:
        """Keys that decoded tokens have read so far, fp64 ``[]`` on the device; on the host before the first step."""
        return torch.zeros((), dtype=torch.float64) if self._read is None else self._read.sum()
