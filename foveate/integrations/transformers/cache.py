"""The cache that `generate` builds for an attached model, and the bookkeeping of prompt, decode and undo."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, LinearAttentionLayer

from foveate.integrations.transformers import handover
from foveate.integrations.transformers.attention import without_cache
from foveate.methods import Method, Together
from foveate.models import MemoryLayer, cache_layers
from foveate.ops import PromptHeads
from foveate.ops._dispatch import runs_kernel
from foveate.state import Counters, Geometry, SlotCache

if TYPE_CHECKING:
    from foveate.integrations.transformers.attach import Attachment
    from foveate.integrations.transformers.steps import Steps

_DEAD_SLOTS = 256
"""Slots given up during assisted decoding that are tolerated before the cache is packed again."""


@dataclass
class Phase:
    """Where the prompt ends and whether the past is recorded: shared by the layers of one cache."""

    prompt_end: int | None = None
    """Number of columns that are prompt; None until it is told or the first forward has shown it."""
    told: bool = False
    """`generate` said where the prompt ends; single tokens after it are never padding."""
    assistant: bool = False
    layout: tuple | None = None
    behind: list[int] = field(default_factory=list)
    """Columns of padding behind the last real token of each row in the layout; empty when all are real."""
    forward: dict[Hashable, Any] = field(default_factory=dict)
    """What the layers of the present forward pass share."""

    def rows(self, mask: Tensor | None, first: int, n: int) -> list[Tensor] | None:
        """Columns of the real tokens of each row among ``first .. first + n - 1``; None when all are real.

        Read from the device once for all layers of a forward.
        """
        if mask is None:
            return None
        if self.layout is None or self.layout[0] is not mask or self.layout[1:3] != (first, n):
            if mask.dim() != 2:
                raise ValueError(
                    f"attention_mask has shape {tuple(mask.shape)}; foveate's cache takes a 2-D mask of real tokens, "
                    "not one of pairs of tokens (packing and overlays are not supported with a cache)"
                )
            if mask.shape[1] < first + n:
                raise ValueError(
                    f"attention_mask covers {mask.shape[1]} tokens, but the cache holds {first} and {n} are new: "
                    "pass a mask over all of them"
                )
            columns = mask[:, first : first + n].bool()
            rows = None if bool(columns.all()) else [row.nonzero()[:, 0] for row in columns]
            self.layout = (mask, first, n, rows)
            self.behind = [] if rows is None else columns.flip(1).int().argmax(1).tolist()
        return self.layout[3]


class Layer(CacheLayerMixin):
    """One attention layer's part of a :class:`Cache`: a :class:`SlotCache` and the method that works on it."""

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, method: Method, counters: Counters, phase: Phase, dense_below: int | str = 0):
        super().__init__()
        self.method, self.counters, self.phase, self.dense_below = method, counters, phase, dense_below
        self.store: SlotCache | None = None
        self.seen = 0
        self.scaling: float | None = None
        self.replays_dense = False
        """Whether the step that is being recorded reads everything."""
        self.record_past = False
        self._pending = False
        self.finite: Tensor | None = None
        """Whether attention to a prompt is finite at its last token, a bool on the device; None of a decode step."""

    # Called by the model

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Announce new keys; they are stored by the attention function, which knows the queries and the padding."""
        if self._pending:
            raise RuntimeError(
                "keys were handed to the cache but attention never took them: is the model's attention implementation "
                "still 'foveate'?"
            )
        handover.post(self, key_states)
        self.is_initialized = self._pending = True
        self.seen += key_states.shape[2]
        return key_states, value_states

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scaling: float,
        sink_logits: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Store the keys, attend: ``q [B, Hq, n, D]``, ``k, v [B, Hkv, n, D(v)]`` to ``[B, Hq, n, Dv]``.

        ``sink_logits [Hq]``: the layer's learned sinks, if it has any; ``softcap``: the cap of its logits, if there is
        one.

        The cache holds no gradients: with gradients enabled, those of a first forward pass are as without a cache, and
        going back through a later one is an error.
        """
        self._pending, self.scaling = False, scaling
        n = k.shape[2]
        first = self.seen - n
        try:
            prompt, columns = self._split(k, mask, first)
        except ValueError:
            self.seen = first
            raise
        if not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
            return self._attend(q, k, v, prompt, columns, first, scaling, sink_logits, softcap)
        with torch.no_grad():
            given = (x.detach() for x in (q, k, v))
            out = self._attend(*given, prompt, columns, first, scaling, sink_logits, softcap)
        if first == 0 and prompt == n:
            return without_cache(self.method, q, k, v, mask, scaling, self.phase.forward, sink_logits, softcap)
        return _NoWayBack.apply(out, q)

    def _split(self, k: Tensor, mask: Tensor | None, first: int) -> tuple[int, list[Tensor] | None]:
        """How many of the new tokens are prompt, and which of these are real; refuses what cannot be."""
        n = k.shape[2]
        if self.store is not None and k.shape[0] != self.store.batch_size:
            raise ValueError(f"the cache holds {self.store.batch_size} sequences, but the batch has {k.shape[0]}")
        prompt_end = self.seen if self.phase.prompt_end is None else self.phase.prompt_end
        prompt = min(max(prompt_end - first, 0), n)
        columns = self.phase.rows(mask, first, prompt) if prompt else None
        single = self.phase.told and n == 1
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
        scaling: float,
        sink_logits: Tensor | None,
        softcap: float | None,
    ) -> Tensor:
        if self.store is None:
            geometry = Geometry(q.shape[1], k.shape[1], k.shape[3], v.shape[3])
            channels = self.method.channels(geometry)
            self.store = SlotCache(geometry, k.shape[0], k.dtype, k.device, channels, self.method.evicts, self.counters)
            self.store.staged, self.store.forward = self.record_past, self.phase.forward
        self.store.sink_logits = None if sink_logits is None else sink_logits.detach()
        self.store.softcap = softcap
        outs, self.finite = [], None
        if prompt:
            outs.append(self._prompt(*(x[:, :, :prompt] for x in (q, k, v)), columns, first, scaling))
            self.finite = outs[0][:, :, -1].isfinite().all()
        if prompt < k.shape[2]:
            outs.append(self._decode(*(x[:, :, prompt:] for x in (q, k, v)), first + prompt, scaling))
        return torch.cat(outs, 2) if len(outs) > 1 else outs[0]

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
        store.to_come = self.phase.prompt_end - first - n
        if columns is None and store.uniform:
            out = self._read(store, q, k, v, scaling)
        else:
            out = q.new_zeros(*q.shape[:3], v.shape[3])
            for b in range(store.batch_size):
                real = columns[b] if columns is not None else torch.arange(n, device=q.device)
                if len(real) == 0:
                    continue
                row = store.row(b)
                row.to_come += self.phase.behind[b] if columns is not None else 0
                out[b, :, real] = self._read(row, *(x[b : b + 1, :, real] for x in (q, k, v)), scaling)[0]
                store.put_back(b, row)
        if first + n == self.phase.prompt_end or not self.method.needs_prompt_end:
            self._finish_prompt(scaling)
            store.save(first + n)
        return out

    def _read(self, store: SlotCache, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """Prompt tokens of rows of one length: stored, attended, learnt from."""
        store.append(k, v)
        attended = self.method.prompt(store, q, scaling)
        self.method.observe(store, q, attended, scaling)
        store.rows["observed"] = [number + k.shape[2] for number in store.rows["observed"]]
        return attended.out

    def _finish_prompt(self, scaling: float) -> None:
        store = self.store
        if store.uniform and len(set(store.rows["observed"])) == 1:
            keep = self.method.prompt_end(store, scaling)
        else:
            kept = []
            for b in range(store.batch_size):
                row = store.row(b)
                kept.append(self.method.prompt_end(row, scaling) if row.used else None)
                store.put_back(b, row)
            slots = [torch.arange(count, device=store.device) for count in store.rows["counts"]]
            everything = [every.expand(1, store.geometry.num_kv_heads, -1) for every in slots]
            keep = [every if one is None else one for one, every in zip(kept, everything)]
            keep = keep if any(one is not None for one in kept) else None
        if keep is not None:
            store.retain(keep, self.method.uneven)
        store.rows["prompt"], store.rows["observed"] = list(store.lengths), [0] * store.batch_size

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, first: int, scaling: float) -> Tensor:
        store, n = self.store, k.shape[2]
        if n > 1 and self.method.decodes_in_blocks and store.uniform:
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
        """Attention of one token a row, dense while the sequences are short."""
        store, method = self.store, self.method
        if not (self.replays_dense if store.step is not None else self.reads_whole(max(store.lengths))):
            return method.decode(store, q, scaling)
        self.counters.dense_steps += 1
        return method.decode_dense(store, q, scaling)

    def reads_whole(self, longest: int) -> bool:
        """Whether a step reads everything when the longest sequence has so many tokens, see ``dense_below``."""
        below, store = self.dense_below, self.store
        if below == "auto":
            below = self.method.sparse_from_tokens if store.device.type == "cuda" and runs_kernel("attend") else 0
        return self.method.can_decode_dense and store.batch_size * longest < below

    def go_on_from(self, read: Layer) -> None:
        """Begin after a prompt that another layer has read, which had :class:`Together` for its method."""
        store = read.store
        channels, filled = self.method.channels(store.geometry), read.method.filled(self.method, store.geometry)
        self.store = store.branch(channels, self.method.evicts, self.counters, filled)
        self.store.rows["observed"], self.store.forward = list(store.lengths), self.phase.forward
        self.seen, self.is_initialized = read.seen, True
        self.counters.prompt_tokens += sum(store.lengths)
        self.counters.prompt_heads = read.counters.prompt_heads
        self._finish_prompt(read.scaling)

    # Called by generate and the cache

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        return -1 if self.store is None else self.store.batch_size

    def reset(self) -> None:
        self.store, self.seen, self._pending = None, 0, False
        self.is_initialized = False

    def activate_past_recording(self) -> None:
        """From now on keep what :meth:`crop` needs to undo tokens."""
        self.record_past = True
        if self.store is not None and not self.store.staged:
            self.store.compact()
            self.store.staged = True
            self.store.save(self.seen)

    def stop_recording(self) -> None:
        """Make everything since final."""
        self.record_past = False
        if self.store is not None and self.store.staged:
            self.store.staged = False
            self.store.snapshots = {}
            self.store.compact()

    def check_crop(self, tokens_to_remove: int) -> None:
        """Refuse a crop that cannot be done.

        Raises:
            ValueError: when what would be removed was already made final (evicted, compressed or accumulated).
        """
        count = -int(tokens_to_remove)
        target = self.seen - count
        if count < 0:
            raise ValueError(f"crop takes the negative number of tokens to remove, not {-count}")
        if self.store is None or count == 0:
            return
        if target < 0:
            raise ValueError(f"crop({-count}) of a cache of {self.seen} tokens")
        if not self.method.stateful:
            if target < (self.phase.prompt_end or 0) and not self.store.uniform:
                raise ValueError("a padded prompt cannot be cropped: its rows end at different tokens")
        elif target not in self.store.snapshots:
            raise ValueError(
                f"crop({-count}): the {self.method.name} method has already made the last tokens final; call "
                "cache.activate_past_recording() before decoding tokens that may be removed"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens, and make what remains final while the past is recorded.

        Raises:
            ValueError: as :meth:`check_crop`.
        """
        self.check_crop(tokens_to_remove)
        store, target = self.store, self.seen + int(tokens_to_remove)
        if store is None:
            return
        self.seen = target
        if not self.method.stateful:
            store.truncate(-int(tokens_to_remove))
        elif target in store.snapshots:
            store.restore(target)
            keep = target - 1 if self.phase.assistant else target
            store.snapshots = {clock: saved for clock, saved in store.snapshots.items() if clock >= keep}
            dead = store.rows["counts"][0] - store.rows["live"][0]
            if dead > max(_DEAD_SLOTS, store.rows["live"][0] // 4) and not self.phase.assistant:
                store.compact()
                store.save(target)

    def _take_rows(self, index: Tensor) -> None:
        if self.store is not None:
            self.store.take_rows(index.to(self.store.device))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._take_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.store is not None:
            self._take_rows(torch.arange(self.store.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.store is not None:
            self._take_rows(_as_rows(indices))

    def offload(self) -> None:
        raise ValueError("foveate's cache cannot be offloaded")

    prefetch = offload


class HybridLayer(LinearAttentionLayer, Layer):
    """A layer with recurrent states, which stay Transformers' own, beside its attention (Falcon-H1)."""

    is_compileable = False
    supports_early_init = False

    def __init__(self, method: Method, counters: Counters, phase: Phase, dense_below: int | str, states: int):
        Layer.__init__(self, method, counters, phase, dense_below)
        LinearAttentionLayer.__init__(self, number_of_states=states)

    @property
    def is_croppable(self) -> bool:
        return LinearAttentionLayer.is_croppable.fget(self)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        (Layer if args else LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)

    def get_max_length(self) -> int:
        return Layer.get_max_length(self)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        Layer.reset(self)

    def activate_past_recording(self) -> None:
        LinearAttentionLayer.activate_past_recording(self)
        Layer.activate_past_recording(self)

    def crop(self, tokens_to_remove: int) -> None:
        Layer.crop(self, tokens_to_remove)
        LinearAttentionLayer.crop(self, tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._take_rows(beam_idx)

    def _take_rows(self, index: Tensor) -> None:
        LinearAttentionLayer.reorder_cache(self, index)
        Layer._take_rows(self, index)

    def offload(self) -> None:
        Layer.offload(self)

    prefetch = offload


class _NoWayBack(torch.autograd.Function):
    """The identity, but for its gradient, which does not exist."""

    @staticmethod
    def forward(ctx, out: Tensor, q: Tensor) -> Tensor:
        return out.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        raise RuntimeError("gradients do not flow through foveate's cache: train with use_cache=False")


class Cache(transformers.Cache):
    """Keys, values and method state of an attached model, for one batch of sequences over any number of turns.

    `generate` builds one by itself. Build one by hand to feed a prompt in several forward passes.

    Args:
        model: an attached model.
        prompt_length: number of tokens, padding included, that are prompt; None: those of the first forward pass.

    Raises:
        ValueError: when the model is not attached.
    """

    def __init__(self, model: torch.nn.Module, prompt_length: int | None = None):
        attachment: Attachment | None = getattr(model, "foveate", None)
        if attachment is None:
            raise ValueError("the model is not attached: call foveate.attach(model, method) first")
        self.owner = attachment.uid
        self.phase = Phase(prompt_end=prompt_length)
        layers = cache_layers(attachment.config)
        if len(layers) <= max(attachment.policies):
            raise ValueError(
                f"the model's configuration has {len(layers)} layers, and had more when the method was attached; "
                "leaving layers out (assistant_early_exit) is not supported"
            )
        for index, policy in attachment.policies.items():
            how = (policy.method, policy.counters, self.phase, policy.dense_below)
            own = layers[index]
            recurrent = isinstance(own, LinearAttentionLayer)
            layers[index] = HybridLayer(*how, own.number_of_states) if recurrent else Layer(*how)
        super().__init__(layers=layers)
        self.pausing = [
            layer
            for layer in layers
            if isinstance(layer, Layer)
            and layer.method.replay is not None
            and layer.method.replay.maintains
            and not layer.method.replay.captures_maintenance
        ]
        """Layers of which some steps cannot be recorded."""
        self.steps: Steps | None = None
        attachment.remember(self)

    def begin(self, prompt_end: int, assistant: bool) -> None:
        """A call of `generate` starts: tell where its prompt ends.

        What an earlier call recorded is forgotten, since it reads weights that may have moved since.
        """
        self.steps = None
        empty = self.get_seq_length() == 0
        self.phase.told, self.phase.assistant = True, assistant
        if not assistant:
            for layer in self.layers:
                if isinstance(layer, Layer):
                    layer.stop_recording()
                elif hasattr(layer, "record_past"):
                    layer.record_past = False
            self.phase.prompt_end = prompt_end
        elif empty:
            # an assistant's cache is cropped to one token before its prompt's end: that token is decoded
            self.phase.prompt_end = prompt_end - 1

    def branch(self, model: torch.nn.Module) -> Cache:
        """The cache with which a method goes on after the prompt that :class:`~foveate.methods.Together` has read.

        It is what the method would hold had it read the prompt alone. Where nothing is evicted, keys and values stay in
        this cache's memory, and those of decoded tokens are written behind them: use one branch after the other.

        Args:
            model: the model that read the prompt, with one of the methods attached.

        Raises:
            ValueError: when the prompt was read by another method, or not to its end.
        """
        read = [layer for layer in self.layers if isinstance(layer, Layer)]
        if not all(isinstance(layer.method, Together) for layer in read):
            raise ValueError("only the cache of a prompt that methods.Together has read can be branched")
        if not self.get_seq_length() or self.get_seq_length() != self.phase.prompt_end:
            raise ValueError("the prompt is not complete: branches begin at its end")
        cache = Cache(model)
        cache.phase.prompt_end, cache.phase.told = self.phase.prompt_end, self.phase.told
        for index, layer in enumerate(self.layers):
            if isinstance(layer, Layer):
                cache.layers[index].go_on_from(layer)
            else:
                cache.layers[index] = (copy.deepcopy if isinstance(layer, MemoryLayer) else copy.copy)(layer)
            if isinstance(layer, LinearAttentionLayer):
                copy_states(layer, cache.layers[index])
        return cache

    def begin_forward(self) -> None:
        """A forward pass starts on this cache.

        Raises:
            ValueError: when an earlier one was interrupted between two layers.
        """
        pending = any(isinstance(layer, Layer) and layer._pending for layer in self.layers)
        lengths = {layer.get_seq_length() for layer in self.layers if isinstance(layer, CacheLayerMixin)}
        if pending or len(lengths) > 1:
            raise ValueError(
                "a forward pass on this cache was interrupted, so its layers hold different tokens; start a new cache"
            )
        self.phase.forward.clear()

    def crop(self, tokens_to_remove: int) -> None:
        for index, layer in enumerate(self.layers):
            if isinstance(layer, (Layer, MemoryLayer)):
                layer.check_crop(tokens_to_remove)
            if isinstance(layer, LinearAttentionLayer) and int(tokens_to_remove):
                if not layer.is_croppable:
                    raise ValueError(
                        f"crop({int(tokens_to_remove)}): layer {index} is recurrent and cannot forget tokens"
                    )
                if not layer.record_past:
                    raise ValueError(
                        f"crop({int(tokens_to_remove)}): layer {index} keeps the last tokens of its convolution alone; "
                        "call cache.activate_past_recording() before tokens that may be removed"
                    )
        unfinished = self.get_seq_length() < (self.phase.prompt_end or 0)  # more of the prompt is to come
        super().crop(int(tokens_to_remove))
        if self.phase.prompt_end is not None and not unfinished:
            self.phase.prompt_end = min(self.phase.prompt_end, self.get_seq_length())

    def _take_rows(self, index: Tensor) -> None:
        for layer in self.layers:
            if isinstance(layer, Layer):
                layer._take_rows(index)
            elif isinstance(layer, (LinearAttentionLayer, MemoryLayer)):
                layer.reorder_cache(index)
            elif isinstance(layer, DynamicLayer):
                layer.batch_select_indices(index)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = next(layer.batch_size for layer in self.layers if isinstance(layer, Layer))
        self._take_rows(torch.arange(max(rows, 0)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._take_rows(_as_rows(indices))

    def reset(self) -> None:
        super().reset()
        self.phase.prompt_end, self.phase.told, self.phase.layout = None, False, None
        self.phase.forward.clear()
        self.steps = None

    @property
    def resident_bytes(self) -> int:
        """Bytes of keys, values and method state held by all layers."""
        stores = [layer.store for layer in self.layers if isinstance(layer, Layer) and layer.store is not None]
        return self.unchanged_bytes + sum(store.resident_bytes for store in stores)

    @property
    def unchanged_bytes(self) -> int:
        """Bytes of keys and values held by the layers that foveate leaves alone."""
        return held_bytes(self.layers)


def held_bytes(layers: Sequence[CacheLayerMixin]) -> int:
    """Bytes of keys, values, states and memories in layers that are not foveate's own."""
    held = [
        x for one in layers if isinstance(one, DynamicLayer) and one.keys is not None for x in (one.keys, one.values)
    ]
    held += [x for one in layers if isinstance(one, LinearAttentionLayer) for x in recurrent_states(one)]
    memories = [one.memory for one in layers if isinstance(one, MemoryLayer)]
    return sum(x.untyped_storage().nbytes() for x in held) + sum(memory.nbytes for memory in memories)


def _as_rows(indices: Tensor) -> Tensor:
    """Numbers of rows, which may be given as a mask."""
    indices = torch.as_tensor(indices)
    return indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices


def recurrent_states(layer: LinearAttentionLayer) -> list[Tensor]:
    """What a recurrent layer keeps, which is written to in place."""
    states = (*layer.conv_states.values(), *layer.recurrent_states.values())
    return [state for state in states if state is not None]


def copy_states(layer: LinearAttentionLayer, to: LinearAttentionLayer) -> None:
    """Give another layer the same recurrent states in memory of its own."""
    names = LinearAttentionLayer(number_of_states=layer.number_of_states).__dict__
    for name in names:
        state = getattr(layer, name)
        if isinstance(state, dict):
            state = {number: one.clone() if isinstance(one, Tensor) else one for number, one in state.items()}
        setattr(to, name, state)
