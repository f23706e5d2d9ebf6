"""One attention layer of a cache: stores keys, runs its method's prompt and decode hooks, and undoes tokens.

An engine's cache layer derives from :class:`Layer`. Columns are positions of the engine's padded batch; the
:class:`~foveate.state.SlotCache` below holds real tokens only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foveate.methods import Dense, Method
from foveate.ops import Logits, PromptHeads
from foveate.ops._dispatch import runs_kernel
from foveate.runtime.phase import Phase
from foveate.runtime.stateless import without_cache
from foveate.state import Counters, Geometry, SlotCache

_EMPTY_SLOTS = 256
"""Slots emptied by eviction during assisted decoding that are tolerated before the cache is compacted."""


class Layer:
    """The keys, values and method state of one attention layer, and the method that works on them.

    Args:
        method: the layer's method.
        counters: where the layer counts; they outlive its cache.
        phase: shared by the layers of one cache.
        dense_below: decode steps are dense while all sequences together hold fewer tokens than this; "auto": fewer than
            :attr:`Method.sparse_from_tokens`, on a GPU with the kernels.
        block_size: slots of a block of keys and values, see :class:`~foveate.state.storage.Storage`; 0: contiguous.
    """

    def __init__(
        self, method: Method, counters: Counters, phase: Phase, dense_below: int | str = 0, block_size: int = 0
    ):
        self.block_size = block_size
        self.method, self.phase, self.dense_below = method, phase, dense_below
        self.counters = counters.declare(method.counters)
        self.store: SlotCache | None = None
        """Keys, values and method state; None before the first token."""
        self.seen = 0
        """Columns of the batch so far, padding included."""
        self.pending = False
        """Whether columns were announced whose keys :meth:`attend` has not got yet."""
        self.scaling: float | None = None
        """Factor of the logits in the last call of :meth:`attend`."""
        self.captured_dense = False
        """Whether the layer is dense in captured steps; set by :class:`~foveate.runtime.replay.ReplayedSteps`."""
        self.record_past = False
        """Whether tokens may be removed again (assisted decoding): the cache keeps their slots, and snapshots."""
        self.finite: Tensor | None = None
        """Whether the output at a prompt's last token is finite, bool ``[]`` on the device; None for a decode step."""

    def announce(self, n: int) -> None:
        """Count n new columns; the next call of :meth:`attend` must bring their keys."""
        self.pending = True
        self.seen += n

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        logits: Logits,
    ) -> Tensor:
        """Store the announced tokens and return their attention over all tokens so far, ``[B, Hq, n, Dv]``.

        The cache holds no gradients. With gradients enabled, the first forward pass of a cache is differentiated as
        attention without a cache; the backward pass through a later one raises RuntimeError.

        Args:
            q, k, v: ``[B, Hq, n, D]`` and ``[B, Hkv, n, D(v)]``.
            mask: ``[B, columns]``, nonzero for real tokens, see :meth:`Phase.rows`; None: all are real.
            logits: how the layer's logits are made.

        Raises:
            ValueError: for a batch size other than the cache's, for a mask of the wrong shape, or for padding after the
                prompt.
        """
        self.pending, self.scaling = False, logits.scaling
        n = k.shape[2]
        first = self.seen - n
        try:
            prompt, columns = self._split(k, mask, first)
        except ValueError:
            self.seen = first
            raise
        self.phase.written = True
        if not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
            return self._attend(q, k, v, prompt, columns, first, logits)
        with torch.no_grad():
            given = (x.detach() for x in (q, k, v))
            out = self._attend(*given, prompt, columns, first, logits)
        if first == 0 and prompt == n:
            return without_cache(self.method, q, k, v, mask, logits, self.phase.forward)
        return _WithoutGradient.apply(out, q)

    def _split(self, k: Tensor, mask: Tensor | None, first: int) -> tuple[int, list[Tensor] | None]:
        """How many of the new columns are prompt, and their real tokens as :meth:`Phase.rows` returns them."""
        n = k.shape[2]
        if self.store is not None and k.shape[0] != self.store.batch_size:
            raise ValueError(f"the cache holds {self.store.batch_size} sequences, but the batch has {k.shape[0]}")
        prompt_end = self.seen if self.phase.prompt_end is None else self.phase.prompt_end
        prompt = min(max(prompt_end - first, 0), n)
        columns = self.phase.rows(mask, first, prompt) if prompt else None
        single = self.phase.prompt_end_known and n == 1
        if prompt < n and not single and self.phase.rows(mask, first + prompt, n - prompt) is not None:
            raise ValueError(
                "attention_mask marks padding after the prompt: decoded tokens must be real in every row "
                "(a new turn with padding goes through generate)"
            )
        self.phase.prompt_end = prompt_end
        return prompt, columns

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prompt: int,
        columns: list[Tensor] | None,
        first: int,
        logits: Logits,
    ) -> Tensor:
        if self.store is None:
            geometry = Geometry(q.shape[1], k.shape[1], k.shape[3], v.shape[3])
            channels, evicts, kept = self.method.channels(geometry), self.method.evicts, (k.dtype, k.device)
            self.store = SlotCache(geometry, len(k), *kept, channels, evicts, self.counters, self.block_size)
            self.store.record_past, self.store.forward = self.record_past, self.phase.forward
        self.store.sink_logits = None if logits.sinks is None else logits.sinks.detach()
        self.store.softcap = logits.softcap
        outs, self.finite = [], None
        if prompt:
            outs.append(self._prompt(*(x[:, :, :prompt] for x in (q, k, v)), columns, first, logits.scaling))
            self.finite = outs[0][:, :, -1].isfinite().all()
        if prompt < k.shape[2]:
            outs.append(self._decode(*(x[:, :, prompt:] for x in (q, k, v)), first + prompt, logits.scaling))
        return torch.cat(outs, 2) if len(outs) > 1 else outs[0]

    # Prompt

    def _prompt(
        self, q: Tensor, k: Tensor, v: Tensor, columns: list[Tensor] | None, first: int, scaling: float
    ) -> Tensor:
        store, n = self.store, k.shape[2]
        self.counters.prompt_tokens += n * k.shape[0] if columns is None else sum(map(len, columns))
        shape = store.geometry
        dims = (shape.head_dim, shape.value_dim, shape.group)
        self.counters.prompt_heads = PromptHeads(q.device, q.dtype, *dims, store.softcap)
        store.compact()
        store.reserve(store.used + n)
        if columns is None and store.uniform:
            out = self._prompt_rows(store, q, k, v, scaling)
        else:
            out = q.new_zeros(*q.shape[:3], v.shape[3])
            for b in range(store.batch_size):
                real = columns[b] if columns is not None else torch.arange(n, device=q.device)
                if len(real) == 0:
                    continue
                row = store.row(b)
                out[b, :, real] = self._prompt_rows(row, *(x[b : b + 1, :, real] for x in (q, k, v)), scaling)[0]
                store.put_back(b, row)
        if first + n == self.phase.prompt_end or not self.method.needs_prompt_end:
            finish_prompt(self.method, store, scaling)
            store.save(first + n)
        return out

    def _prompt_rows(self, store: SlotCache, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """Run the prompt hooks on unpadded rows of one length: store tokens, ``Method.prompt``, ``Method.observe``."""
        store.append(k, v)
        attended = self.method.prompt(store, q, scaling)
        self.method.observe(store, q, attended, scaling)
        store.rows["observed"] = [number + k.shape[2] for number in store.rows["observed"]]
        return attended.out

    def continue_from(self, read: Layer) -> None:
        """Start from the prompt of another layer, whose method is :class:`~foveate.methods.SharedPrompt`."""
        store = read.store
        channels, filled = self.method.channels(store.geometry), read.method.filled(self.method, store.geometry)
        self.store = store.branch(channels, self.method.evicts, self.counters, filled)
        self.store.rows["observed"], self.store.forward = list(store.lengths), self.phase.forward
        self.seen = read.seen
        self.counters.prompt_tokens += sum(store.lengths)
        self.counters.prompt_heads = read.counters.prompt_heads
        finish_prompt(self.method, self.store, read.scaling)

    # Decode

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, first: int, scaling: float) -> Tensor:
        store, n = self.store, k.shape[2]
        if n > 1 and isinstance(self.method, Dense) and store.uniform:
            store.append(k, v)
            for missing in range(n - 1, -1, -1):
                store.count_read(store.used - missing, available=store.used - missing)
            return self.method.prompt(store, q, scaling).out
        outs = []
        for i in range(n):
            store.write_step(k[:, :, i : i + 1], v[:, :, i : i + 1])
            outs.append(self._step(q[:, :, i : i + 1], scaling))
            if self.method.stateful:
                store.save(first + i + 1)
        return torch.cat(outs, 2) if n > 1 else outs[0]

    def _step(self, q: Tensor, scaling: float) -> Tensor:
        """Attention of one token per row by ``Method.decode`` or, in short contexts, ``Method.decode_dense``."""
        store, method = self.store, self.method
        if not (self.captured_dense if store.step is not None else self.decodes_densely(store.used)):
            return method.decode(store, q, scaling)
        self.counters.dense_steps += 1
        return method.decode_dense(store, q, scaling)

    def decodes_densely(self, held: int) -> bool:
        """Whether ``dense_below`` makes a decode step dense when the fullest row holds ``held`` tokens."""
        below, store, sparse_from = self.dense_below, self.store, self.method.sparse_from_tokens
        if sparse_from is None:
            return False
        if below == "auto":
            below = store.geometry.at_least(sparse_from) if store.device.type == "cuda" and runs_kernel("attend") else 0
        return store.batch_size * held < below

    # Undo

    def start_recording_past(self) -> None:
        """Keep what later tokens would overwrite and save a snapshot after each token, as :meth:`remove_last` needs."""
        self.record_past = True
        if self.store is not None and not self.store.record_past:
            self.store.compact()
            self.store.record_past = True
            self.store.save(self.seen)

    def stop_recording_past(self) -> None:
        """Make all tokens so far final."""
        self.record_past = False
        if self.store is not None and self.store.record_past:
            self.store.record_past = False
            self.store.snapshots = {}
            self.store.compact()

    def remove_last(self, count: int) -> None:
        """Remove the last ``count`` columns.

        The caller has checked that they can be removed: a ``stateful`` method needs a snapshot taken before them. Older
        snapshots are dropped, so that the columns that remain are final.
        """
        store, target = self.store, self.seen - count
        if store is None:
            return
        self.seen = target
        if not self.method.stateful:
            store.truncate(count)
        elif target in store.snapshots:
            store.restore(target)
            keep = target - 1 if self.phase.assistant else target
            store.snapshots = {clock: saved for clock, saved in store.snapshots.items() if clock >= keep}
            empty = store.rows["counts"][0] - store.rows["live"][0]
            if empty > max(_EMPTY_SLOTS, store.rows["live"][0] // 4) and not self.phase.assistant:
                store.compact()
                store.save(target)

    def forget(self) -> None:
        """Drop all tokens."""
        self.store, self.seen, self.pending = None, 0, False

    def take_rows(self, index: Tensor) -> None:
        """Replace the batch by the rows ``index``, int64 ``[B']``, as beam search does."""
        if self.store is not None:
            self.store.take_rows(index.to(self.store.device))


def finish_prompt(method: Method, store: SlotCache, scaling: float) -> None:
    """Call ``Method.prompt_end``, evict the slots that it does not keep, and call ``Method.prompt_packed``.

    Both hooks are called row by row if lengths differ.

    Args:
        store: the cache, which holds the prompt and nothing after it.
    """
    together = store.uniform and len(set(store.rows["observed"])) == 1
    if together:
        keep = method.prompt_end(store, scaling)
    else:
        kept = []
        for b in range(store.batch_size):
            row = store.row(b)
            kept.append(method.prompt_end(row, scaling) if row.used else None)
            store.put_back(b, row)
        everything = [torch.arange(count, device=store.device) for count in store.rows["counts"]]
        keep = [every if one is None else one for one, every in zip(kept, everything)]
        keep = keep if any(one is not None for one in kept) else None
    if keep is not None:
        store.retain(keep, method.uneven)
    for row in [store] if together else map(store.row, range(store.batch_size)):
        method.prompt_packed(row)
    store.rows["prompt"], store.rows["observed"] = list(store.lengths), [0] * store.batch_size


class _WithoutGradient(torch.autograd.Function):
    """The identity, whose backward pass is an error."""

    @staticmethod
    def forward(ctx, out: Tensor, q: Tensor) -> Tensor:
        return out.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        raise RuntimeError("gradients do not flow through foveate's cache: train with use_cache=False")
