"""Keys and values in blocks that an engine owns, for decode steps alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from foveate.ops import KV, BlockTable
from foveate.state.cache import SlotCache
from foveate.state.counters import Counters
from foveate.state.description import Channel, Geometry
from foveate.state.device_rows import DeviceRows
from foveate.state.row_numbers import DeviceState
from foveate.state.store import Store, StoreShape


class EngineBlocks(Store):
    """Blocks ``[N, Hkv, n, D(v)]`` that rows may share, and a table of each row's blocks.

    The engine writes and frees blocks. A step reads them where they are: nothing here copies, grows or writes them. The
    caller sets :attr:`keys` and :attr:`values`, and :func:`enter` the table.
    """

    can_be_captured = True
    fills_channels = True

    def __init__(self, shape: StoreShape):
        super().__init__(shape)
        self.keys: Tensor | None = None
        """The engine's blocks, ``[N, Hkv, n, D]``."""
        self.values: Tensor | None = None
        self.block_table: Tensor | None = None
        """int ``[B, M]``: the blocks of the present step's rows, see :class:`~foveate.ops.BlockTable`."""

    def view(self, used: int, lengths: Tensor | None = None) -> KV:
        """All blocks of keys and values, ``[N, Hkv, n, D(v)]``, with the table of the step's rows."""
        return KV(self.keys, self.values, self.table(used), lengths)

    def table(self, length: int) -> BlockTable:
        return BlockTable(self.block_table, length)

    def fetch_slots(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        block, place = self.table(0).slots(slots.clamp_min(0), self.keys)
        head = torch.arange(self.keys.shape[1], device=slots.device)[:, None]
        return self.keys[block, head, place], self.values[block, head, place]

    def device_tensors(self) -> list[Tensor]:
        return [self.keys, self.values, self.block_table]

    def contents(self, used: int) -> tuple[Tensor, Tensor]:
        return self.read(0, used)

    # What the engine does

    def reserve(self, slots: int) -> None:
        """Blocks are reserved by the engine; see :meth:`_refuse`."""
        self._refuse("reserved")

    def write(self, first: int, k: Tensor, v: Tensor) -> None:
        """Prompts are written by the engine; see :meth:`_refuse`."""
        self._refuse("written")

    def put(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Tokens are written by the engine; see :meth:`_refuse`."""
        self._refuse("written")

    def of_row(self, b: int, used: int) -> EngineBlocks:
        """Steps have all rows at once; see :meth:`_refuse`."""
        self._refuse("divided by row")

    def take_rows(self, index: Tensor) -> None:
        """Rows are arranged by the engine; see :meth:`_refuse`."""
        self._refuse("rearranged")

    def _refuse(self, what: str) -> None:
        """Raises RuntimeError: the engine does it."""
        raise RuntimeError(f"an engine's blocks are {what} by the engine alone")


def engine_cache(
    geometry: Geometry,
    memory: Tensor,
    device: torch.device,
    channels: Mapping[str, Channel] | None = None,
    counters: Counters | None = None,
) -> SlotCache:
    """A cache over blocks that an engine owns. :func:`enter` sets the rows and blocks of a step.

    Channels are per page. Their entries lie beside the blocks, ``[N, Hkv, n / per, *shape]``, under the same table.

    Args:
        geometry, device, counters: see :class:`SlotCache`.
        memory: shape and dtype of the blocks, ``[N, Hkv, n, any]``.
        channels: state per page.

    Raises:
        ValueError: when the pages of a channel do not divide a block.
    """
    cache = SlotCache(geometry, 0, memory.dtype, device, channels, counters=counters, store=EngineBlocks)
    block_size = memory.shape[2]
    for name, spec in cache.specs.items():
        if not spec.per or block_size % spec.per:
            raise ValueError(
                f"pages of {spec.per} tokens do not divide the engine's blocks of {block_size}: choose a "
                "page_size, or blocks of a size, so that they do"
            )
        shape = (len(memory), geometry.num_kv_heads, block_size // spec.per, *spec.shape)
        with torch.inference_mode(False):
            cache.tensors[name] = torch.zeros(shape, dtype=spec.dtype or cache.dtype, device=device)
    return cache


def has_room(cache: SlotCache, memory: Tensor) -> bool:
    """Whether the channels of a cache have entries for the pages of the blocks ``memory [N, Hkv, n, any]``."""
    of_blocks = len(memory), memory.shape[2]
    return all((len(x), x.shape[2] * cache.specs[name].per) == of_blocks for name, x in cache.tensors.items())


def enter(cache: SlotCache, rows: DeviceRows, block_table: Tensor, bound: int, out: Tensor | None) -> None:
    """Have a cache of :func:`engine_cache` take the rows of a step, which :meth:`DeviceRows.begin_of` has started.

    Args:
        block_table: int ``[B, M]``, see :class:`~foveate.ops.BlockTable`.
        bound: no row is longer; fixes the widths of selections.
        out: where a decode step writes its output, ``[B, Hq, 1, Dv]``; None: to new memory.
    """
    if cache.batch_size != len(block_table):
        cache.rows = {name: [0] * len(block_table) for name in cache._rows}  # the real numbers are on the device
        cache.store.shape = cache.store.shape._replace(batch_size=len(block_table))
    cache.store.block_table, cache.capacity = block_table, bound
    cache.out, cache.device_state = out, DeviceState(rows, None)
