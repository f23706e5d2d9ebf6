"""Caches over memory that is not their own: the keys of one pass, a prompt that another cache has read, an engine's
blocks."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from foveate.ops import KV, BlockTable, Logits
from foveate.state.cache import SlotCache
from foveate.state.counters import Counters
from foveate.state.description import Channel, Evicts, Geometry, RowNumber
from foveate.state.device_rows import DeviceRows
from foveate.state.row_numbers import DeviceState


def cache_of(
    k: Tensor,
    v: Tensor,
    num_heads: int,
    forward: dict[Hashable, Any] | None = None,
    row: int | None = None,
    logits: Logits | None = None,
) -> SlotCache:
    """A cache over given keys and values, not copied, for a forward pass without a cache (training).

    Args:
        k, v: ``[B, Hkv, L, D(v)]``.
        num_heads: query heads.
        forward: shared by the layers of the pass, see :meth:`SlotCache.shared_key`.
        row: index of the row when a padded batch is computed row by row; None: the whole batch.
        logits: how the layer's logits are made, as far as that is not their scaling; None: without sinks and cap.
    """
    cache = SlotCache(Geometry(num_heads, k.shape[1], k.shape[3], v.shape[3]), k.shape[0], k.dtype, k.device)
    cache.forward, cache._row = {} if forward is None else forward, row
    if logits is not None:
        cache.sink_logits, cache.softcap = logits.sinks, logits.softcap
    cache.tensors |= {"keys": k, "values": v}
    cache.capacity = k.shape[2]
    cache._advance(k.shape[2], k.shape[2])
    return cache


def branch_of(
    cache: SlotCache,
    channels: Mapping[str, Channel | RowNumber],
    evicts: Evicts,
    counters: Counters,
    filled: Mapping[str, str],
) -> SlotCache:
    """A cache of the same tokens for another method, which shares the memory of keys and values.

    A branch writes its new tokens to the slots after the shared ones, and so does the next branch: use one at a time. A
    branch that evicts in decode copies keys and values before it overwrites them.

    Args:
        channels, evicts, counters: of the other method.
        filled: channels to copy: for each name in the branch, the name in the cache. Others are empty.
    """
    one = SlotCache(cache.geometry, cache.batch_size, cache.dtype, cache.device, channels, evicts, counters)
    one.rows = one.rows | {name: list(cache.rows[name]) for name in one.rows if name not in one.own_numbers}
    one.capacity, one._borrowed = cache.capacity, True
    one.sink_logits, one.softcap, one.rotary = cache.sink_logits, cache.softcap, cache.rotary
    shared = ("keys", "values")
    one.tensors |= {name: cache.tensors[name] for name in shared if name in cache.tensors}
    for name, spec in one._slot_specs().items():
        if name not in shared:
            one.tensors[name] = one._buffer(name, spec, cache.capacity)
    for name, here in filled.items():
        one.tensors[name].copy_(cache.tensors[here])
    if evicts:
        one.tensors["positions"][:, :, : cache.used] = cache.positions
    one._count_bytes()
    return one


class EngineCache(SlotCache):
    """A cache over blocks that an engine owns, for decode steps alone: it never copies, grows or writes them.

    Rows may share blocks. Channels are per page and beside the blocks, ``[N, Hkv, n / per, *shape]``, under the same
    table. :meth:`enter` says which rows and blocks a step has. The caller sets ``keys`` and ``values`` of
    :attr:`tensors`.

    Args:
        geometry, device, counters: as of :class:`SlotCache`.
        memory: shape and dtype of the blocks, ``[N, Hkv, n, any]``.
        channels: state per page.

    Raises:
        ValueError: when the pages of a channel do not divide a block.
    """

    fills_channels = True

    def __init__(
        self,
        geometry: Geometry,
        memory: Tensor,
        device: torch.device,
        channels: Mapping[str, Channel] | None = None,
        counters: Counters | None = None,
    ):
        super().__init__(geometry, 0, memory.dtype, device, channels, counters=counters)
        self.block_size = memory.shape[2]
        for name, spec in self.specs.items():
            if not spec.per or self.block_size % spec.per:
                raise ValueError(
                    f"pages of {spec.per} tokens do not divide the engine's blocks of {self.block_size}: choose a "
                    "page_size, or blocks of a size, so that they do"
                )
            shape = (len(memory), geometry.num_kv_heads, self.block_size // spec.per, *spec.shape)
            with torch.inference_mode(False):
                self.tensors[name] = torch.zeros(shape, dtype=spec.dtype or self.dtype, device=device)

    def enter(self, rows: DeviceRows, block_table: Tensor, bound: int, out: Tensor | None) -> None:
        """Take the rows of a step, which :meth:`DeviceRows.begin_of` has started.

        Args:
            block_table: int ``[B, M]``, see :class:`~foveate.ops.BlockTable`.
            bound: no row is longer; fixes the widths of selections.
            out: where a decode step writes its output, ``[B, Hq, 1, Dv]``; None: to new memory.
        """
        if self.batch_size != len(block_table):
            self.rows = {name: [0] * len(block_table) for name in self._rows}  # the real numbers are on the device
        self.tensors["block_table"], self.capacity = block_table, bound
        self.out, self.device_state = out, DeviceState(rows, None)

    def view(self, lengths: Tensor | None = None) -> KV:
        """All blocks of keys and values, ``[N, Hkv, block_size, D(v)]``, with the table of the step's rows."""
        tensors = self.tensors
        return KV(tensors["keys"], tensors["values"], BlockTable(tensors["block_table"], self.used), lengths)

    @property
    def keys(self) -> Tensor:
        """``[B, Hkv, used, D]``, copied."""
        return self._in_one_piece(self.tensors["keys"])

    @property
    def values(self) -> Tensor:
        """``[B, Hkv, used, Dv]``, copied."""
        return self._in_one_piece(self.tensors["values"])

    def _in_one_piece(self, memory: Tensor) -> Tensor:
        table = BlockTable(self.tensors["block_table"], self.used)
        return table.gather(table.table, memory)[0]

    def entries(self, name: str, number: int) -> tuple[Tensor, BlockTable]:
        return self.tensors[name], BlockTable(self.tensors["block_table"], number)
