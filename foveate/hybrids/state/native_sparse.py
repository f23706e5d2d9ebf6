"""The memory of a native-sparse-attention layer: all keys and values, and a compressed pair for each full block."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foveate.hybrids.state.memory import Memory, Packing

_ALIGN = 64


class BlockMemory(Memory):
    """Keys and values of all tokens, packed per row, and a compressed key and value for each full block.

    Tensors: ``keys``, ``values`` ``[B, Hkv, capacity, D(v)]`` and ``block_keys``, ``block_values`` ``[B, Hkv,
    capacity // block, D(v)]``.

    Args:
        block: tokens of a block.
    """

    def __init__(self, block: int):
        super().__init__()
        self.block = block
        self.capacity = 0
        self._summarised: list[int] = []
        """Blocks of each row whose compressed key and value are up to date."""

    def append(self, k: Tensor, v: Tensor, packing: Packing | None) -> None:
        """Add tokens ``[B, Hkv, n, D(v)]`` after the last ones of each row; ``packing``: which of them are real."""
        if not self.lengths:
            self.lengths = [0] * k.shape[0]
        n = k.shape[2]
        self._reserve(max(self.lengths) + n, k, v)
        if packing is None and len(set(self.lengths)) == 1:
            first = self.lengths[0]
            self.tensors["keys"][:, :, first : first + n] = k
            self.tensors["values"][:, :, first : first + n] = v
        else:
            index = self.lengths_on(k.device)[:, None] + torch.arange(n, device=k.device)  # padding: overwritten later
            index = index[:, None, :, None].expand(-1, k.shape[1], -1, -1)
            for name, x in (("keys", k), ("values", v)):
                self.tensors[name].scatter_(2, index.expand(x.shape), x)
        self.advance(n, packing)

    def summaries(self, compress: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """A key and a value for each full block, ``[B, Hkv, capacity // block, D(v)]``; other entries are undefined.

        Args:
            compress: maps keys and values of n full blocks, ``[B, Hkv, n * block, D(v)]``, to one key and value each,
                ``[B, Hkv, n, D(v)]``; called for blocks that are not up to date.
        """
        counts, names = [length // self.block for length in self.lengths], ("block_keys", "block_values")
        self._summarised = self._summarised or [0] * self.batch_size
        for name in names:
            x = self.tensors[name.removeprefix("block_")]
            if name not in self.tensors or self.tensors[name].shape[2] < self.capacity // self.block:
                with torch.inference_mode(False):  # an inference tensor could not be changed later
                    grown = x.new_zeros(*x.shape[:2], self.capacity // self.block, x.shape[3])
                if name in self.tensors:
                    grown[:, :, : self.tensors[name].shape[2]] = self.tensors[name]
                self.tensors[name] = grown
        if counts != self._summarised:
            first, last = min(self._summarised), max(counts)
            span = slice(first * self.block, last * self.block)
            new = compress(self.tensors["keys"][:, :, span], self.tensors["values"][:, :, span])
            for name, x in zip(names, new):
                self.tensors[name][:, :, first:last] = x
            self._summarised = counts
        return self.tensors["block_keys"], self.tensors["block_values"]

    def take_rows(self, index: Tensor) -> None:
        if self._summarised:
            self._summarised = [self._summarised[b] for b in index.tolist()]
        super().take_rows(index)

    def crop(self, tokens: int) -> None:
        super().crop(tokens)
        self._summarised = [min(blocks, length // self.block) for blocks, length in zip(self._summarised, self.lengths)]

    def check_crop(self, tokens: int) -> None:
        if tokens > min(self.lengths, default=0):
            raise ValueError(f"{tokens} tokens cannot be undone: the shortest row has {min(self.lengths, default=0)}")

    def emptied(self) -> BlockMemory:
        return BlockMemory(self.block)

    def _reserve(self, tokens: int, k: Tensor, v: Tensor) -> None:
        if tokens <= self.capacity:
            return
        unit = max(_ALIGN, self.block)
        capacity = -(-max(tokens, self.capacity * 9 // 8) // unit) * unit
        for name, x in (("keys", k), ("values", v)):
            with torch.inference_mode(False):  # an inference tensor could not be changed later
                grown = x.new_zeros(*x.shape[:2], capacity, x.shape[3])
            if name in self.tensors:
                grown[:, :, : self.capacity] = self.tensors[name]
            self.tensors[name] = grown
        self.capacity = capacity
