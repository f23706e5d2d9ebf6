"""One attention layer of a cache: stores keys, runs its method's hooks, and undoes tokens.

An engine's cache layer derives from :class:`Layer`. Columns are positions of the engine's padded batch; the
:class:`~foveate.state.SlotCache` below holds real tokens only.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from foveate.methods import Dense, Method
from foveate.ops import Logits, PromptHeads, Rotary
from foveate.runtime import returned
from foveate.runtime.decode import decode
from foveate.runtime.drafts import Drafting, verified
from foveate.runtime.phase import Phase
from foveate.runtime.policy import dense_until
from foveate.runtime.stateless import without_cache
from foveate.state import Counters, Geometry, SlotCache
from foveate.state.borrowed import branch_of

_EMPTY_SLOTS = 256
"""Slots emptied by eviction during assisted decoding that are tolerated before the cache is compacted."""


class Layer:
    """The keys, values and method state of one attention layer, and the method that works on them.

    Args:
        method: the layer's method.
        counters: where the layer counts; they outlive its cache.
        phase: shared by the layers of one cache.
        dense_below: decode steps are dense while all sequences together hold fewer tokens than this; "auto": fewer than
            :attr:`Method.sparse_from_tokens`, or each fewer than `SHORT_SEQUENCE`, on a GPU with the kernels.
    """

    def __init__(self, method: Method, counters: Counters, phase: Phase, dense_below: int | str = 0):
        self.method, self.phase, self.dense_below = method, phase, dense_below
        self.counters = counters.declare(method.counters)
        self.cache: SlotCache | None = None
        """Keys, values and method state; None before the first token."""
        self.before = 0
        """Slots of each row before the last forward pass over a prompt."""
        self.seen = 0
        """Columns of the batch so far, padding included."""
        self.pending = False
        """Whether columns were announced whose keys :meth:`attend` has not got yet."""
        self.scaling: float | None = None
        """Factor of the logits in the last call of :meth:`attend`."""
        self.rotary: Rotary | None = None
        """How the queries and keys of the present pass are rotated; the engine sets it for methods that need it."""
        self.captured_dense = False
        """Whether the layer is dense in captured steps; set by :class:`~foveate.runtime.replay.ReplayedSteps`."""
        self.record_past = False
        """Whether tokens may be removed again (assisted decoding): the cache keeps their slots, and snapshots."""
        self.first_step = False
        """Whether the next decode step is the first after a prompt."""
        self.drafting: Drafting | None = None
        """What the layer has chosen for the present draft, in lossless decoding."""
        self.finite: Tensor | None = None
        """Whether the output at a prompt's last token is finite, bool ``[]`` on the device; None for a decode step."""

    def announce(self, n: int) -> None:
        """Count n new columns; the next call of :meth:`attend` must bring their keys."""
        self.pending = True
        self.seen += 1 if self.phase.verifying else n

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
        attention without a cache; the backward pass through a later one, or one that evicts, raises RuntimeError.

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
        except BaseException:  # nothing is written yet
            self.seen = first
            raise
        self.phase.written = True
        if not _differentiates(q, k, v):
            return self._attend(q, k, v, prompt, columns, first, logits)
        with torch.no_grad():
            given = (x.detach() for x in (q, k, v))
            out = self._attend(*given, prompt, columns, first, logits)
        if first == 0 and prompt == n and not 0 < self.method.prompt_evicts_every < n:
            return without_cache(self.method, q, k, v, mask, logits, self.phase.forward, self.rotary)
        return _WithoutGradient.apply(out, q)

    def _split(self, k: Tensor, mask: Tensor | None, first: int) -> tuple[int, list[Tensor] | None]:
        """How many of the new columns are prompt, and their real tokens as :meth:`Phase.rows` returns them."""
        n = k.shape[2]
        if self.cache is not None and k.shape[0] != self.cache.batch_size:
            raise ValueError(f"the cache holds {self.cache.batch_size} sequences, but the batch has {k.shape[0]}")
        if mask is not None and len(mask) != len(k):
            raise ValueError(f"attention_mask has {len(mask)} rows, but the batch has {len(k)}")
        guessed = self.phase.prompt_end is None
        prompt_end = self.seen if guessed else self.phase.prompt_end
        prompt = min(max(prompt_end - first, 0), n)
        columns = self.phase.rows(mask, first, prompt) if prompt else None
        single = self.phase.prompt_end_known and n == 1
        if prompt < n and not single and self.phase.rows(mask, first + prompt, n - prompt) is not None:
            raise ValueError(
                "attention_mask marks padding after the prompt: decoded tokens must be real in every row "
                "(a new turn with padding goes through generate)"
            )
        self.phase.prompt_end, self.phase.prompt_end_guessed = prompt_end, guessed or self.phase.prompt_end_guessed
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
        if self.method.needs_rotary and self.rotary is None:
            raise ValueError(f"{self.method.name} needs the layer's rotary positions, which the engine does not give")
        if self.cache is None:
            geometry = Geometry(q.shape[1], k.shape[1], k.shape[3], v.shape[3])
            self.cache = self.new_cache(geometry, len(k), k.dtype, k.device, self.counters)
            self.cache.record_past, self.cache.forward = self.record_past, self.phase.forward
            self.cache.count_in(self.phase.held)
        self.cache.sink_logits = None if logits.sinks is None else logits.sinks.detach()
        self.cache.softcap, self.cache.rotary = logits.softcap, self.rotary
        self.finite = None
        if not prompt:
            return self._decode(q, k, v, first, logits.scaling)
        out = self._prompt(*(x[:, :, :prompt] for x in (q, k, v)), columns, first, logits.scaling)
        self.finite = out[:, :, -1].isfinite().all()
        if prompt == k.shape[2]:
            return out
        decoded = self._decode(*(x[:, :, prompt:] for x in (q, k, v)), first + prompt, logits.scaling)
        return torch.cat([out, decoded], 2)

    def new_cache(
        self, geometry: Geometry, rows: int, dtype: torch.dtype, device: torch.device, counters: Counters | None = None
    ) -> SlotCache:
        """An empty cache of the layer's keys, values and state; see :class:`SlotCache` for the arguments."""
        channels, fetches = self.method.channels(geometry), self.method.fetches
        returned.check_channels(self.method, channels)
        how = {"store": self.phase.store_for(self.method), "page_size": None if fetches is None else fetches.page_size}
        return SlotCache(geometry, rows, dtype, device, channels, self.method.evicts, counters, **how)

    # Prompt

    def _prompt(
        self, q: Tensor, k: Tensor, v: Tensor, columns: list[Tensor] | None, first: int, scaling: float
    ) -> Tensor:
        cache, n = self.cache, k.shape[2]
        self.counters.prompt_tokens += n * k.shape[0] if columns is None else sum(map(len, columns))
        self.counters.sequences += 0 if first else k.shape[0]
        shape = cache.geometry
        dims = (shape.head_dim, shape.value_dim, shape.group)
        self.counters.prompt_heads = PromptHeads(q.device, q.dtype, *dims, cache.softcap)
        cache.compact()
        self.before = cache.capacity
        ends = first + n == self.phase.prompt_end
        out = self._prompt_parts(q, k, v, columns, scaling, ends)
        if ends or not self.method.needs_prompt_end:
            finish_prompt(self.method, cache, scaling)
            cache.save(first + n, prompt_ended=True)
        return out

    def _prompt_parts(
        self, q: Tensor, k: Tensor, v: Tensor, columns: list[Tensor] | None, scaling: float, ends: bool
    ) -> Tensor:
        """Attention of new prompt tokens, in parts after which rows evict; ``ends``: the prompt ends with them.

        Rows of equal length run as one batch, others one by one.
        """
        cache, n, out = self.cache, k.shape[2], None
        left = [range(n)] * cache.batch_size if columns is None else columns
        if not any(map(len, left)):  # all is padding
            cache.reserve(max(1, cache.used))
        while any(map(len, left)):
            takes = [self._until_eviction(*each) for each in zip(cache.rows["observed"], map(len, left))]
            cache.reserve(cache.used + max(takes))
            parts = [real[:take] for real, take in zip(left, takes)]
            left = [real[take:] for real, take in zip(left, takes)]
            alike = columns is None and cache.plan.alike and len(set(takes)) == 1
            if alike and takes[0] == n:
                out = self._prompt_rows(cache, q, k, v, scaling)
            else:
                out = q.new_zeros(*q.shape[:3], v.shape[3]) if out is None else out
                places = [slice(real.start, real.stop) if isinstance(real, range) else real for real in parts]
                if alike:
                    out[:, :, places[0]] = self._prompt_rows(cache, *(x[:, :, places[0]] for x in (q, k, v)), scaling)
                for b in [b for b, take in enumerate(takes) if take and not alike]:
                    at = places[b]
                    with cache.row(b) as row:
                        out[b, :, at] = self._prompt_rows(row, *(x[b : b + 1, :, at] for x in (q, k, v)), scaling)[0]
            self._evict_in_prompt([b for b, take in enumerate(takes) if take and (len(left[b]) or not ends)], scaling)
        return q.new_zeros(*q.shape[:3], v.shape[3]) if out is None else out  # a chunk may be all padding

    def _until_eviction(self, observed: int, new: int) -> int:
        """How many of a row's new prompt tokens it reads before it evicts, having read ``observed``."""
        every = self.method.prompt_evicts_every
        return min(every - observed % every, new) if every else new

    def _evict_in_prompt(self, rows: Iterable[int], scaling: float) -> None:
        """Evict from the rows whose prompt goes on and that have read a multiple of ``prompt_evicts_every`` tokens."""
        every, observed = self.method.prompt_evicts_every, self.cache.rows["observed"]
        due = [b for b in rows if observed[b] % every == 0] if every else []
        if due:
            evict_prompt(self.method, self.cache, scaling, due)

    def _prompt_rows(self, cache: SlotCache, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """Run the prompt hooks on unpadded rows of one length: store tokens, ``Method.prompt``, ``Method.observe``."""
        cache.append(k, v)
        attended = self.method.prompt(cache, q, scaling)
        returned.check_attended(self.method, "prompt", attended, q, v.shape[3])
        self.first_step = True
        self.method.observe(cache, q, attended, scaling)
        cache.rows["observed"] = [number + k.shape[2] for number in cache.rows["observed"]]
        return attended.out

    def continue_from(self, read: Layer) -> tuple[int, int]:
        """Start from the prompt of another layer, whose method is :class:`~foveate.methods.SharedPrompt`.

        Returns:
            The bytes that this layer would have held before and after the last pass over the prompt, before it evicts.
        """
        cache = read.cache
        channels, filled = self.method.channels(cache.geometry), read.method.filled(self.method, cache.geometry)
        self.cache = branch_of(cache, channels, self.method.evicts, self.counters, filled)
        self.cache.rows["observed"], self.cache.forward = list(cache.lengths), self.phase.forward
        self.cache.count_in(self.phase.held)
        whole = self.cache.resident_bytes
        self.seen = read.seen
        self.counters.prompt_tokens += sum(cache.lengths)
        self.counters.sequences += cache.batch_size
        self.counters.prompt_heads = read.counters.prompt_heads
        finish_prompt(self.method, self.cache, read.scaling)
        self.first_step = True
        return whole * read.before // read.cache.capacity, whole

    # Decode

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, first: int, scaling: float) -> Tensor:
        cache, n = self.cache, k.shape[2]
        if self.phase.verifying:
            self.counters.dense_steps += self._is_dense(1)
            return verified(self.method, cache, q, k, v, scaling)
        if n > 1 and isinstance(self.method, Dense) and cache.plan.alike:
            cache.append(k, v)
            for missing in range(n - 1, -1, -1):
                cache.count_read(cache.used - missing, available=cache.used - missing)
            return self.method.prompt(cache, q, scaling).out
        outs = []
        for i in range(n):
            cache.write_step(k[:, :, i : i + 1], v[:, :, i : i + 1])
            outs.append(self._step(q[:, :, i : i + 1], scaling))
            if self.method.stateful:
                cache.save(first + i + 1)
        return torch.cat(outs, 2) if n > 1 else outs[0]

    def _step(self, q: Tensor, scaling: float) -> Tensor:
        """Attention of one token per row. What the first sparse step after a prompt chooses is checked."""
        cache = self.cache
        dense = self._is_dense()
        self.counters.dense_steps += dense
        check = self.first_step and not cache.plan.captured and not dense
        self.first_step = self.first_step and not check
        draft = self.phase.draft
        if draft is not None:
            self.drafting = self.drafting if draft else Drafting()
        drafting = None if draft is None or self.method.role.reads_choice_of is not None else self.drafting
        return decode(self.method, cache, q, scaling, dense=dense, check=check, drafting=drafting)[0].out

    def _is_dense(self, new: int = 0) -> bool:
        """Whether the present step is dense, ``new`` of whose tokens are not stored yet."""
        captured = self.cache.plan.captured
        return self.captured_dense if captured else self.decodes_densely(self.cache.used + new)

    def decodes_densely(self, held: int) -> bool:
        """Whether ``dense_below`` makes a decode step dense when the fullest row holds ``held`` tokens."""
        cache = self.cache
        return held < dense_until(self.method, self.dense_below, cache.geometry, cache.device, cache.batch_size)

    # Undo

    def start_recording_past(self) -> None:
        """Keep what later tokens would overwrite and save a snapshot after each token, as :meth:`remove_last` needs."""
        self.record_past = True
        if self.cache is not None and not self.cache.record_past:
            self.cache.compact()
            self.cache.record_past = True
            self.cache.save(self.seen)

    def stop_recording_past(self) -> None:
        """Make all tokens so far final."""
        self.record_past = False
        if self.cache is not None and self.cache.record_past:
            self.cache.record_past = False
            self.cache.snapshots = {}
            self.cache.compact()

    def remove_last(self, count: int) -> None:
        """Remove the last ``count`` columns.

        The caller has checked that they can be removed: a ``stateful`` method needs a snapshot taken before them. Older
        snapshots are dropped, so that the columns that remain are final.
        """
        cache, target = self.cache, self.seen - count
        if cache is None:
            return
        self.seen = target
        if not self.method.stateful:
            cache.truncate(count)
        elif target in cache.snapshots:
            cache.restore(target)
            keep = target - 1 if self.phase.assistant else target
            cache.snapshots = {clock: saved for clock, saved in cache.snapshots.items() if clock >= keep}
            empty = cache.rows["counts"][0] - cache.rows["live"][0]
            if empty > max(_EMPTY_SLOTS, cache.rows["live"][0] // 4) and not self.phase.assistant:
                cache.compact()
                cache.save(target)

    def take_back(self, tokens: Sequence[int]) -> None:
        """Remove the last ``tokens[b]`` decoded tokens of row b; the method keeps no state of tokens.

        Rows may then hold different numbers of decoded tokens. The row with the most tokens gives the columns.
        """
        self.cache.truncate(tokens)
        self.count_columns(self.cache.rows)

    def count_columns(self, rows: dict[str, list[int]]) -> None:
        """Note that rows hold different numbers of decoded tokens."""
        self.seen = self.phase.prompt_end + max(map(operator.sub, rows["lengths"], rows["prompt"]))

    def forget(self) -> None:
        """Drop all tokens."""
        self.cache, self.seen, self.pending, self.drafting = None, 0, False, None

    def take_rows(self, index: Tensor) -> None:
        """Replace the batch by the rows ``index``, int64 ``[B']``, as beam search does."""
        if self.cache is not None:
            self.cache.take_rows(index.to(self.cache.device))


def read_once(
    method: Method,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    logits: Logits,
    forward: dict[Hashable, Any],
    rotary: Rotary | None = None,
) -> Tensor:
    """Attention of a prompt whose keys are not kept.

    If the method evicts while the prompt is read, a temporary layer attends; otherwise :func:`without_cache` does. See
    :func:`without_cache` for arguments, result and errors.
    """
    n = k.shape[2]
    if not 0 < method.prompt_evicts_every < n or _differentiates(q, k, v):
        return without_cache(method, q, k, v, mask, logits, forward, rotary)
    layer = Layer(method, Counters(), Phase(prompt_end=n, forward=forward))
    layer.rotary = rotary
    layer.announce(n)
    return layer.attend(q, k, v, mask, logits)


def _differentiates(*given: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in given)


def evict_prompt(method: Method, cache: SlotCache, scaling: float, rows: Collection[int]) -> bool:
    """Call ``Method.prompt_end`` for these rows, and evict the slots that it does not keep.

    Returns:
        Whether it was called for all rows at once, and not row by row, as if lengths differ.
    """
    together = cache.plan.alike and len(set(cache.rows["observed"])) == 1 and len(rows) == cache.batch_size
    if together:
        keep = _kept(method, cache, scaling)
    else:
        kept = []
        for b in range(cache.batch_size):
            with cache.row(b) as row:
                kept.append(_kept(method, row, scaling) if row.used and b in rows else None)
        everything = [torch.arange(count, device=cache.device) for count in cache.rows["counts"]]
        keep = [every if one is None else one for one, every in zip(kept, everything)]
        keep = keep if any(one is not None for one in kept) else None
    if keep is not None:
        cache.retain(keep, method.evicts.unevenly)
    return together


def finish_prompt(method: Method, cache: SlotCache, scaling: float) -> None:
    """Evict what ``Method.prompt_end`` does not keep, and call ``Method.prompt_packed``.

    Both hooks are called row by row if lengths differ.

    Args:
        cache: the cache, which holds the prompt and nothing after it.
    """
    if evict_prompt(method, cache, scaling, range(cache.batch_size)):
        method.prompt_packed(cache)
    else:
        for b in range(cache.batch_size):
            with cache.row(b) as row:
                method.prompt_packed(row)
    cache.rows["prompt"], cache.rows["observed"] = list(cache.lengths), [0] * cache.batch_size


def _kept(method: Method, cache: SlotCache, scaling: float) -> Tensor | None:
    keep = method.prompt_end(cache, scaling)
    return None if keep is None else returned.check_slots(method, keep, cache)


class _WithoutGradient(torch.autograd.Function):
    """The identity, whose backward pass is an error."""

    @staticmethod
    def forward(ctx, out: Tensor, q: Tensor) -> Tensor:
        return out.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        raise RuntimeError("gradients do not flow through foveate's cache: train with use_cache=False")
