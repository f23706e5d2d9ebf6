"""The cache that `generate` builds for an attached model: the layers' parts, turns, branches and undo."""

from __future__ import annotations

import copy
import itertools
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from foveate.errors import FoveateWarning
from foveate.integrations.transformers import offloading
from foveate.integrations.transformers.attachment import Attachment
from foveate.integrations.transformers.layers import (
    CacheLayer,
    HybridCacheLayer,
    copy_states,
    recurrent_states,
    row_indices,
)
from foveate.integrations.transformers.positions import rotated_otherwise
from foveate.integrations.transformers.support import cache_layers, keeps_memory
from foveate.integrations.transformers.token_ids import TokenIds
from foveate.methods import SharedPrompt
from foveate.ops._math import on_host
from foveate.ops.checks import check_number
from foveate.runtime import Phase, ReplayedSteps, returned
from foveate.state import BytesInUse, SlotCache
from foveate.state.contiguous import Contiguous
from foveate.state.store import class_of

_IN_HOST: weakref.WeakSet[Cache] = weakref.WeakSet()
"""Caches whose keys and values are in host memory."""


class Cache(transformers.Cache):
    """Keys, values and method state of an attached model, for one batch of sequences over any number of turns.

    `generate` builds one by itself. Build one by hand to feed a prompt in several forward passes.

    Args:
        model: an attached model.
        prompt_length: number of tokens of the prompt, padding included; None: all tokens of the first forward pass.

    Raises:
        ValueError: when the model is not attached, and for a prompt length that is no integer of at least 1.
    """

    def __init__(self, model: torch.nn.Module, prompt_length: int | None = None):
        attachment: Attachment | None = getattr(model, "foveate", None)
        if attachment is None:
            raise ValueError("the model is not attached: call foveate.attach(model, method) first")
        if prompt_length is not None:
            check_number("prompt_length", prompt_length, 1)
        self.owner = attachment.uid
        self.assisted = False
        """Whether the last call of `generate` was one of assisted decoding, which records the past."""
        self.ids = TokenIds()
        self.offsets: list[Tensor | None] | None = None
        """The difference between the positions of coming tokens and their number, ``[B, 1]``, for each part of the
        model that keeps one (``rope_deltas`` of models that read images), after the last pass; None before the first
        pass."""
        self.rotated = 0
        """Tokens at the end of the first pass, by which its keys are rotated where rotation depends on the length."""
        self.phase = Phase(prompt_end=prompt_length)
        self._before_begin: tuple[int | None, bool, bool] = (prompt_length, False, False)
        """Of the phase, what :meth:`begin` changes."""
        number = attachment.config.num_hidden_layers  # fewer where drafts leave layers out (assistant_early_exit)
        layers = cache_layers(attachment.config)[:number]
        for index, policy in attachment.policies.items():
            if index >= number:
                continue
            how = (policy.method, policy.counters, self.phase, policy.dense_below)
            own = layers[index]
            recurrent = isinstance(own, LinearAttentionLayer)
            layers[index] = HybridCacheLayer(*how, own.number_of_states) if recurrent else CacheLayer(*how)
        super().__init__(layers=layers)
        self.steps: ReplayedSteps | None = None
        if attachment.offload:
            methods = {index: one.method for index, one in enumerate(self.layers) if isinstance(one, CacheLayer)}
            shared = offloading.share(model, attachment.gpu_budget, attachment.geometries, methods)
            self.phase.keep_in_host(shared)
            _IN_HOST.add(self)
        elif attachment.store is not None:
            self.phase.make_store = attachment.store

    def __getstate__(self) -> dict[str, Any]:  # copies and pickles record steps of their own
        return self.__dict__ | {"steps": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.phase.offload is not None:
            _IN_HOST.add(self)
            self.phase.held.bytes = 0  # copies have no buffers of a prompt, and no hot pages
            for store in self._stores:
                store.count_in(self.phase.held)

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        if self.phase.offload is not None:
            self.phase.offload.check_host("a copy of the cache", self.host_bytes)
        made = memo[id(self)] = object.__new__(type(self))
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made

    def begin(self, prompt_end: int, assistant: bool, assisted: bool = False) -> None:
        """Start a call of `generate`; discard the steps that an earlier call recorded, since weights may have moved.

        It stops the recording of the past that an assisted call started. A recording that a user started, by
        :meth:`activate_past_recording`, goes on.

        Args:
            prompt_end: columns of the batch that are prompt, padding and earlier turns included.
            assistant: whether this cache belongs to the assistant in assisted decoding.
            assisted: whether an assistant drafts for this cache in this call.
        """
        self.phase.check_whole()
        self.steps = None
        empty = self.get_seq_length() == 0
        phase = self.phase
        self._before_begin = (phase.prompt_end, phase.prompt_end_known, phase.prompt_end_guessed)
        self.phase.prompt_end_known, self.phase.prompt_end_guessed, self.phase.assistant = True, False, assistant
        if not assistant:
            if self.assisted:
                self._stop_recording_past()
            self.assisted = assisted
            self.phase.prompt_end = prompt_end
        elif empty:
            # assisted decoding crops the assistant's cache to one token before the prompt's end, and decodes that token
            self.phase.prompt_end = prompt_end - 1

    def anew(self, model: torch.nn.Module) -> Cache:
        """The cache with which a call of `generate` reads its whole prompt: this one if it is empty, else a new one."""
        if not self.get_seq_length():
            return self
        made = Cache(model)
        made.begin(self.phase.prompt_end, self.phase.assistant, self.assisted)
        return made

    def check_rotation(self, config: transformers.PreTrainedConfig, new: int) -> None:
        """Check that a pass of ``new`` tokens rotates its keys as the cached keys are rotated.

        A decoded token is read all the same, as Transformers reads it, with a warning.

        Raises:
            ValueError: for more of a prompt, or another turn, whose keys are not; the cache is left as it was.
        """
        seen = self.get_seq_length()
        if not seen:
            self.rotated = new
            return
        reason = rotated_otherwise(config, self.rotated, seen + new)
        if reason and new > 1 and not any(getattr(layer, "record_past", False) for layer in self.layers):
            raise ValueError(f"{reason}: pass the whole prompt, or conversation, at once with a new cache")
        if reason:
            warnings.warn(
                "decoding goes beyond the length whose rotation the keys in the cache have, and Transformers does not "
                "rotate them anew: what the model makes of them may be worse",
                FoveateWarning,
                stacklevel=2,
            )

    def cancel(self) -> None:
        """Undo :meth:`begin`, where the call of `generate` ended before it read anything."""
        self.phase.prompt_end, self.phase.prompt_end_known, self.phase.prompt_end_guessed = self._before_begin

    def _stop_recording_past(self) -> None:
        with self.phase.change():
            for layer in self.layers:
                if isinstance(layer, CacheLayer):
                    layer.stop_recording_past()
                elif hasattr(layer, "record_past"):
                    layer.record_past = False

    def branch(self, model: torch.nn.Module) -> Cache:
        """A cache with which one method continues after a prompt that :class:`~foveate.methods.SharedPrompt` has read.

        It holds what the method would hold if it had read the prompt alone. Where nothing is evicted, keys and values
        stay in this cache's memory, and decoded tokens are written after them: use one branch after the other.

        Args:
            model: the model that read the prompt, with one of the methods attached.

        Raises:
            ValueError: when the prompt was read by another method, or not to its end.
        """
        self.phase.check_whole()
        read = [layer for layer in self.layers if isinstance(layer, CacheLayer)]
        if not all(isinstance(layer.method, SharedPrompt) for layer in read):
            raise ValueError("only the cache of a prompt that methods.SharedPrompt has read can be branched")
        if not self.get_seq_length() or self.get_seq_length() != self.phase.prompt_end:
            raise ValueError("the prompt is not complete: branches begin at its end")
        cache = Cache(model)
        if cache.phase.make_store is not Contiguous:
            offloaded = cache.phase.offload is not None
            option = "offload=True" if offloaded else f"store={class_of(cache.phase.make_store).__name__}"
            without = option.partition("=")[0]
            raise ValueError(f"{option}: a branch keeps its keys and values on the device; attach without {without}")
        cache.phase.prompt_end, cache.phase.prompt_end_known = self.phase.prompt_end, self.phase.prompt_end_known
        cache.ids, cache.offsets, held = copy.deepcopy(self.ids), self.offsets, []
        cache.rotated = self.rotated
        for index, layer in enumerate(self.layers):
            if isinstance(layer, CacheLayer):
                held.append((*cache.layers[index].continue_from(layer), cache.layers[index].cache.resident_bytes))
            else:
                cache.layers[index] = (copy.deepcopy if keeps_memory(layer) else copy.copy)(layer)
            if isinstance(layer, LinearAttentionLayer):
                copy_states(layer, cache.layers[index])
        returned.check_noted(cache.phase.forward)
        before, _, kept = map(sum, zip(*held))
        at_layers = itertools.accumulate(held, lambda total, one: total - one[0] + one[2], initial=before)
        most = max(total - one[0] + one[1] for total, one in zip(at_layers, held))
        cache.phase.held.peak = max(most, kept)
        model.foveate.remember(cache)
        return cache

    def reserve_memory(self, rows: int, tokens: int) -> None:
        """Announce the rows and tokens that will come, for a cache whose keys and values are in host memory.

        Raises:
            ValueError: where memory does not suffice for them; the cache is left as it was.
        """
        offload = self.phase.offload
        if offload is not None:
            offload.reserve_memory(rows, tokens, self.resident_bytes, self.host_bytes)

    def release(self) -> None:
        """Give all memory back, of a cache that nobody can use any more: its method was detached."""
        self.phase.changing = True
        for layer in self.layers:
            if isinstance(layer, CacheLayer):
                layer.forget()
        self.steps = None
        self.phase.offload.transfers.close(self.phase.held)

    def begin_forward(self) -> None:
        """Start a forward pass on this cache, which ends with :meth:`end_forward`; until then the cache is refused.

        Raises:
            ValueError: when an earlier pass, or another change, was interrupted, or layers hold different numbers of
                tokens; the cache is left as it was.
        """
        self.phase.begin_change()
        if len({layer.get_seq_length() for layer in self.layers if isinstance(layer, CacheLayerMixin)}) > 1:
            self.phase.end_change()
            raise ValueError("the layers of this cache hold different numbers of tokens; start a new cache")
        self.phase.forward.clear()

    def end_forward(self, failed: bool) -> None:
        """End a forward pass; one that failed after it had written to a layer is never ended."""
        self.phase.forward.clear()
        if failed:
            self.ids.columns = min(self.ids.columns, self.get_seq_length())
            # layers without a method do not record what they wrote
            whole = all(type(layer) is CacheLayer and not layer.pending for layer in self.layers)
            if self.phase.written or not whole:
                return
        self.phase.end_change()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens; what remains becomes final while the past is recorded.

        Raises:
            ValueError: when a layer cannot forget the tokens; no layer is changed.
        """
        self.phase.check_whole()
        remove, seen = int(tokens_to_remove), self.get_seq_length()
        if not remove and not (seen and any(getattr(layer, "record_past", False) for layer in self.layers)):
            return
        for index, layer in enumerate(self.layers):
            if isinstance(layer, CacheLayer) or keeps_memory(layer):
                layer.check_crop(remove)
            if isinstance(layer, LinearAttentionLayer) and remove and not layer.is_croppable:
                raise ValueError(f"crop({remove}): layer {index} is recurrent and cannot forget tokens")
            if remove and any(held + remove < needed for held, needed in _last_tokens(layer, seen + remove)):
                raise ValueError(
                    f"crop({remove}): layer {index} keeps the last tokens of its window, or convolution, alone; call "
                    "cache.activate_past_recording() before tokens that may be removed"
                )
        unfinished = seen < (self.phase.prompt_end or 0)  # more of the prompt is to come
        with self.phase.change():
            super().crop(remove)
            if self._stores and not unfinished:  # the end of an earlier prompt perhaps
                self.phase.prompt_end = self.get_seq_length() - self._stores[0].plan.decoded
            self.ids.columns = min(self.ids.columns, self.get_seq_length())

    def activate_past_recording(self) -> None:
        """Keep from now on what :meth:`crop` needs to undo tokens."""
        with self.phase.change():
            super().activate_past_recording()

    @property
    def batch_size(self) -> int:
        """Rows of the batch; -1 before there are any."""
        return next(layer.batch_size for layer in self.layers if isinstance(layer, CacheLayer))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the batch by its rows ``beam_idx``, int64 ``[B']``.

        Raises:
            ValueError: on the CPU for a row that is not there; no layer is changed.
        """
        rows = self.batch_size
        if rows >= 0 and on_host(beam_idx) and bool(((beam_idx < 0) | (beam_idx >= rows)).any()):
            raise ValueError(f"rows must be among the {rows} of the cache, from 0, not {beam_idx.tolist()}")
        if 0 <= rows < len(beam_idx):
            self.reserve_memory(len(beam_idx), self.get_seq_length())
        with self.phase.change():
            self.ids.take_rows(beam_idx)
            if self.offsets is not None:
                self.offsets = [
                    one if one is None or len(one) != rows else one[beam_idx.to(one.device)] for one in self.offsets
                ]
            for layer in self.layers:
                if isinstance(layer, CacheLayer):
                    layer.take_rows(beam_idx)
                elif isinstance(layer, LinearAttentionLayer) or keeps_memory(layer):
                    layer.reorder_cache(beam_idx)
                elif isinstance(layer, DynamicLayer):
                    layer.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(max(self.batch_size, 0)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(row_indices(indices))

    def reset(self) -> None:
        self.phase.changing = True
        super().reset()
        self.phase.prompt_end, self.phase.prompt_end_known, self.phase.layout = None, False, None
        self.phase.prompt_end_guessed, self.phase.changing, self.phase.unusable = False, False, ""
        self.phase.forward.clear()
        if self.phase.offload is not None:
            self.phase.offload.transfers.close(self.phase.held)
            self.phase.offload.forget()
        self.phase.held = BytesInUse()
        self.steps, self.ids, self.offsets = None, TokenIds(), None

    @property
    def resident_bytes(self) -> int:
        """Bytes of keys, values and method state held by all layers."""
        return self.unchanged_bytes + sum(store.resident_bytes for store in self._stores)

    @property
    def host_bytes(self) -> int:
        """Bytes of keys and values in host memory."""
        return sum(one.store.host_bytes for one in self._stores)

    @property
    def _stores(self) -> list[SlotCache]:
        return [layer.cache for layer in self.layers if isinstance(layer, CacheLayer) and layer.cache is not None]

    @property
    def unchanged_bytes(self) -> int:
        """Bytes of keys, values and states in layers without a method."""
        return held_bytes(self.layers)


def release_host_memory(owner: str) -> None:
    """Empty the caches of an attachment that are in host memory."""
    for cache in list(_IN_HOST):
        if cache.owner == owner:
            cache.release()


def _last_tokens(layer: CacheLayerMixin, left: int) -> list[tuple[int, int]]:
    """How many of the last tokens a layer without a method keeps, of its window and before its convolutions, and how
    many it needs where ``left`` tokens are left."""
    pairs = []
    if isinstance(layer, DynamicSlidingWindowLayer) and layer.is_initialized:
        pairs.append((layer.keys.shape[2], min(left, layer.sliding_window - 1)))
    if isinstance(layer, LinearAttentionLayer):
        there = [n for n, filled in layer.is_conv_states_initialized.items() if filled]
        pairs += [(layer.conv_states[n].shape[-1], layer.conv_kernel_size[n]) for n in there]
    return pairs


def held_bytes(layers: Sequence[CacheLayerMixin]) -> int:
    """Bytes of keys, values, states and memories in layers that have no method."""
    held = [
        x for one in layers if isinstance(one, DynamicLayer) and one.keys is not None for x in (one.keys, one.values)
    ]
    held += [x for one in layers if isinstance(one, LinearAttentionLayer) for x in recurrent_states(one)]
    memories = [one.memory for one in layers if keeps_memory(one)]
    return sum(x.untyped_storage().nbytes() for x in held) + sum(memory.nbytes for memory in memories)
