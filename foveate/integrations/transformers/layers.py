"""Attention layers as layers of a Transformers cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from foveate.methods import Method
from foveate.runtime import handover
from foveate.runtime.layer import Layer
from foveate.runtime.phase import Phase
from foveate.state import Counters
from foveate.state.packing import contents


class CacheLayer(Layer, CacheLayerMixin):
    """One attention layer's part of a :class:`Cache`."""

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, method: Method, counters: Counters, phase: Phase, dense_below: int | str = 0):
        CacheLayerMixin.__init__(self)
        Layer.__init__(self, method, counters, phase, dense_below)

    # What the layer holds, under the names of Transformers' layers

    @property
    def keys(self) -> Tensor | None:
        """The keys held, ``[B, Hkv, n, D]``, of rows or heads that hold fewer first, then anything; None without."""
        return None if self.cache is None else contents(self.cache)[0]

    @property
    def values(self) -> Tensor | None:
        """The values of :attr:`keys`, ``[B, Hkv, n, Dv]``."""
        return None if self.cache is None else contents(self.cache)[1]

    @keys.setter
    def keys(self, given: None) -> None:
        _only_none(given)

    @values.setter
    def values(self, given: None) -> None:
        _only_none(given)

    # Called by the model

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    @torch.compiler.disable
    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Post the layer for the attention function, which knows the queries and the padding and stores the keys.

        Args:
            key_states, value_states: of the new tokens, ``[B, Hkv, n, D(v)]``.

        Returns:
            The same two tensors.

        Raises:
            RuntimeError, ValueError: as :func:`foveate.runtime.handover.post`.
        """
        handover.post(self, key_states)
        self.is_initialized = True
        return key_states, value_states

    # Called by generate and the cache

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        return -1 if self.cache is None else self.cache.batch_size

    def continue_from(self, read: Layer) -> tuple[int, int]:
        self.is_initialized = True
        return super().continue_from(read)

    def reset(self) -> None:
        self.forget()
        self.is_initialized = False

    def activate_past_recording(self) -> None:
        """Keep from now on what :meth:`crop` needs to undo tokens."""
        self.start_recording_past()

    def check_crop(self, tokens_to_remove: int) -> None:
        """Refuse a crop that cannot be done.

        Args:
            tokens_to_remove: minus the number of tokens, as Transformers counts them.

        Raises:
            ValueError: when the tokens to be removed are already final (evicted, compressed or accumulated).
        """
        count = -int(tokens_to_remove)
        target = self.seen - count
        if count < 0:
            raise ValueError(f"crop takes the negative number of tokens to remove, not {-count}")
        if self.cache is None or count == 0:
            return
        if target < 0:
            raise ValueError(f"crop({-count}) of a cache of {self.seen} tokens")
        if not self.method.stateful:
            if target < (self.phase.prompt_end or 0) and self.cache.rows["counts"] != self.cache.lengths:
                raise ValueError(
                    f"crop({-count}): the {self.method.name} method has evicted tokens of the prompt, which ends at "
                    f"token {self.phase.prompt_end}; remove decoded tokens alone"
                )
            padded = not self.cache.plan.alike or self.cache.lengths[0] != self.seen
            if target < (self.phase.prompt_end or 0) and padded:
                raise ValueError("a padded prompt cannot be cropped: its last columns are not tokens of every row")
        elif target not in self.cache.snapshots and self.record_past:
            there = ", ".join(map(str, sorted(self.cache.snapshots)))
            raise ValueError(
                f"crop({-count}): of {self.seen} tokens, the {self.method.name} method can return to the ends of "
                f"prompts and to decoded tokens alone, that is to {there or 'no number'} of tokens"
            )
        elif target not in self.cache.snapshots:
            raise ValueError(
                f"crop({-count}): the {self.method.name} method has already made the last tokens final; call "
                "cache.activate_past_recording() before tokens that may be removed"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens; what remains becomes final while the past is recorded.

        Raises:
            ValueError: as :meth:`check_crop`.
        """
        self.check_crop(tokens_to_remove)
        self.remove_last(-int(tokens_to_remove))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.take_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.cache is not None:
            self.take_rows(torch.arange(self.cache.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.cache is not None:
            self.take_rows(row_indices(indices))

    def offload(self) -> None:
        raise ValueError("foveate's cache cannot be offloaded")

    prefetch = offload


class HybridCacheLayer(LinearAttentionLayer, CacheLayer):
    """An attention layer with recurrent states beside it, which stay Transformers' own (Falcon-H1)."""

    is_compileable = False
    supports_early_init = False

    def __init__(self, method: Method, counters: Counters, phase: Phase, dense_below: int | str, states: int):
        CacheLayer.__init__(self, method, counters, phase, dense_below)
        LinearAttentionLayer.__init__(self, number_of_states=states)

    @property
    def is_croppable(self) -> bool:
        return LinearAttentionLayer.is_croppable.fget(self)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        (CacheLayer if args else LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)

    def get_max_length(self) -> int:
        return CacheLayer.get_max_length(self)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        CacheLayer.reset(self)

    def activate_past_recording(self) -> None:
        LinearAttentionLayer.activate_past_recording(self)
        CacheLayer.activate_past_recording(self)

    def crop(self, tokens_to_remove: int) -> None:
        CacheLayer.crop(self, tokens_to_remove)
        LinearAttentionLayer.crop(self, tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.take_rows(beam_idx)

    def take_rows(self, index: Tensor) -> None:
        LinearAttentionLayer.reorder_cache(self, index)
        CacheLayer.take_rows(self, index)

    def offload(self) -> None:
        CacheLayer.offload(self)

    prefetch = offload


def _only_none(given: Tensor | None) -> None:
    if given is not None:
        raise ValueError("foveate's cache takes keys and values from attention alone; they cannot be set")


def row_indices(indices: Tensor) -> Tensor:
    """Indices of rows, int64 ``[B']``; a bool mask ``[B]`` is converted."""
    indices = torch.as_tensor(indices)
    return indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices


def recurrent_states(layer: LinearAttentionLayer) -> list[Tensor]:
    """The states of a recurrent layer, which a decode step writes to in place."""
    states = (*layer.conv_states.values(), *layer.recurrent_states.values())
    return [state for state in states if state is not None]


def copy_states(layer: LinearAttentionLayer, to: LinearAttentionLayer) -> None:
    """Give another layer copies of the same recurrent states."""
    names = LinearAttentionLayer(number_of_states=layer.number_of_states).__dict__
    for name in names:
        state = getattr(layer, name)
        if isinstance(state, dict):
            state = {number: one.clone() if isinstance(one, Tensor) else one for number, one in state.items()}
        setattr(to, name, state)
