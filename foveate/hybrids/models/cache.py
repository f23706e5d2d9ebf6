"""The cache of a hybrid: one memory for each layer, under the interface that `generate` calls."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from foveate.hybrids.state import Memory


class MemoryLayer(CacheLayerMixin):
    """One layer's part of a cache. The layer's mixer uses its :class:`~foveate.hybrids.state.Memory` directly."""

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False
    keeps_memory = True

    def __init__(self, memory: Memory):
        super().__init__()
        self.memory = memory
        self.seen = 0
        """Columns read, padding included."""

    @property
    def record_past(self) -> bool:
        """Whether the last tokens can be undone."""
        return self.memory.record_past

    @record_past.setter
    def record_past(self, on: bool) -> None:
        self.memory.record_past = on

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, *args: Any, **kwargs: Any):
        raise RuntimeError(f"a {type(self.memory).__name__} takes in tokens by its own mixer, not keys and values")

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        return self.memory.batch_size or -1

    def activate_past_recording(self) -> None:
        """From now on keep what :meth:`crop` needs to undo tokens."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Undo the last ``-tokens_to_remove`` tokens.

        Raises:
            ValueError: for a positive number, or tokens that are final.
        """
        self.check_crop(tokens_to_remove)
        self.memory.crop(-int(tokens_to_remove))
        self.seen += int(tokens_to_remove)

    def check_crop(self, tokens_to_remove: int) -> None:
        """Refuse a crop that cannot be done, as :meth:`crop` does."""
        if int(tokens_to_remove) > 0:
            raise ValueError(f"crop takes the negative number of tokens to remove, not {int(tokens_to_remove)}")
        self.memory.check_crop(-int(tokens_to_remove))

    def reset(self) -> None:
        record_past = self.memory.record_past
        self.memory, self.seen = self.memory.emptied(), 0
        self.memory.record_past = record_past

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.memory.take_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.memory.take_rows(torch.arange(self.memory.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        indices = torch.as_tensor(indices)
        self.memory.take_rows(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def offload(self) -> None:
        raise ValueError("the cache of a hybrid cannot be offloaded")

    prefetch = offload


class HybridCache(transformers.Cache):
    """Memories of a hybrid's layers for one batch of sequences over any number of turns.

    `generate` makes one by itself. Layers of kind gdn, swa and lte keep as much however long the sequences are.

    Args:
        config: of the model, a :class:`~foveate.hybrids.models.HybridConfig`.
    """

    def __init__(self, config: transformers.PreTrainedConfig):
        super().__init__(layers=config.cache_layers())

    def crop(self, tokens_to_remove: int) -> None:
        for layer in self.layers:
            if isinstance(layer, MemoryLayer):
                layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)

    @property
    def nbytes(self) -> int:
        """Bytes held by all layers."""
        memories = [layer.memory for layer in self.layers if isinstance(layer, MemoryLayer)]
        tensors = [
            x
            for layer in self.layers
            if isinstance(layer, DynamicLayer)
            for x in (layer.keys, layer.values)
            if x is not None
        ]
        return sum(memory.nbytes for memory in memories) + sum(x.untyped_storage().nbytes() for x in tensors)
