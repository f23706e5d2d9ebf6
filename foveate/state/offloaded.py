"""A cache whose keys and values are in host memory: the device keeps summaries, and the pages chosen last.

While a prompt is read, a layer's keys are on the device in one piece (:class:`~foveate.state.transfers.Transfers`), and
methods read them as in any cache. Decode steps read the pages that they :meth:`~OffloadedCache.fetch` and nothing else;
with :attr:`Method.fetches` a method declares that it keeps to that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from foveate.ops import KV, BlockTable
from foveate.ops.attend.gather import membership_mask
from foveate.ops.fetch import HotPages, fetch_pages, place_pages, put_both
from foveate.ops.fetch.types import NEVER
from foveate.state.cache import SlotCache
from foveate.state.counters import Counters
from foveate.state.description import Channel, Geometry, RowNumber
from foveate.state.host_memory import HostMemory
from foveate.state.storage import capacity_for
from foveate.state.transfers import Transfers

COUNTERS = ("pages_asked", "pages_fetched")
"""Pages that decode steps chose, and those of them that came from host memory: means over the KV heads, summed over
steps and rows."""


class HotPageBudget(Protocol):
    """What the layers of a cache share: buffers, and how many pages each may keep on the device."""

    transfers: Transfers

    def hot_pages(self, store: OffloadedCache, capacity: int) -> int:
        """Pages that a layer of so many slots may keep on the device, of each KV head and sequence.

        Raises:
            ValueError: for fewer than a step may choose.
        """


class _Decoding(NamedTuple):
    """What decode steps read and write on the device."""

    hot: HotPages
    open_keys: Tensor
    """``[B, Hkv, n, D]``: the page that each sequence's newest token is in."""
    open_values: Tensor
    open_table: Tensor
    """int32 ``[B, M]``: names the open page of its sequence for each page, as a block."""


class OffloadedCache(SlotCache):
    """A :class:`SlotCache` whose keys and values are in host memory.

    Args:
        geometry, batch_size, dtype, device, channels, counters: as of :class:`SlotCache`; ``device`` computes.
        page_size: keys of a page that is fetched.
        room: shared by the layers of the cache.
    """

    offloaded = True

    def __init__(
        self,
        geometry: Geometry,
        batch_size: int,
        dtype: torch.dtype,
        device: torch.device,
        channels: Mapping[str, Channel | RowNumber] | None,
        counters: Counters | None,
        page_size: int,
        room: HotPageBudget,
    ):
        super().__init__(geometry, batch_size, dtype, device, channels, counters=counters)
        self.counters.declare(COUNTERS)
        dims = geometry.head_dim, geometry.value_dim
        self.host = HostMemory(batch_size, geometry.num_kv_heads, dims, page_size, dtype, device)
        self.page_size, self.room = page_size, room
        self.order = room.transfers.join(self)
        self._parent: OffloadedCache | None = None
        """The batch that this is a row of."""
        self._decoding: _Decoding | None = None
        self._open = False
        """Whether what decode steps read of open pages is up to date."""

    def __getstate__(self) -> dict[str, Any]:
        self.room.transfers.wait()
        return super().__getstate__() | {"_decoding": None, "_parent": None}

    # Memory

    def _slot_specs(self) -> dict[str, Channel]:
        return {name: spec for name, spec in super()._slot_specs().items() if name not in ("keys", "values")}

    @property
    def resident_bytes(self) -> int:
        """Bytes on the device; the buffers that layers share while a prompt is read are counted with all layers."""
        held = [] if self._decoding is None else [*self._decoding.hot, *self._decoding[1:]]
        return super().resident_bytes + sum(x.nbytes for x in held)

    def _device_tensors(self) -> list[Tensor]:
        parts = [] if self._decoding is None else [*self._decoding.hot, *self._decoding[1:], self.host.pages.addresses]
        return [*super()._device_tensors(), *parts]

    def reserve(self, slots: int) -> None:
        """See :class:`Storage`.

        Raises:
            ValueError: where a step over so many slots may choose more pages than the device may keep; nothing has
                changed then.
        """
        if slots > self.capacity and self._row is None:
            capacity = capacity_for(slots)
            if self._decoding is not None:
                self._grow(capacity)
            self.host.reserve(max(capacity, self.room.transfers.room))
            self.counters.host_bytes = self.host.nbytes
        super().reserve(slots)

    # What methods read

    def _on_device(self) -> tuple[Tensor, Tensor]:
        whole, transfers = self._parent or self, self.room.transfers
        if whole._decoding is not None:
            raise RuntimeError("keys and values are in host memory: a decode step reads the pages that it fetches")
        found = transfers.holds(self.order) or transfers.open(whole, whole.used)
        row = slice(None) if self._row is None else slice(self._row, self._row + 1)
        return found[0][row, :, : self.used], found[1][row, :, : self.used]

    def view(self, lengths: Tensor | None = None) -> KV:
        """Keys and values ``[B, Hkv, used, D(v)]`` on the device, while a prompt is read.

        Raises:
            RuntimeError: in a decode step.
        """
        return KV(*self._on_device(), None, lengths)

    @property
    def keys(self) -> Tensor:
        return self._on_device()[0]

    @property
    def values(self) -> Tensor:
        return self._on_device()[1]

    def copied_to_host(self) -> tuple[Tensor, Tensor]:
        """Copies of keys and values in host memory, ``[B, Hkv, used, D(v)]``."""
        self.room.transfers.wait()
        shape = (self.batch_size, self.geometry.num_kv_heads, self.used)
        k, v = (torch.empty(*shape, dim, dtype=self.dtype) for dim in self.host.dims)
        self.host.read(0, self.used, 0, k, v)
        return k, v

    def newest_page(self, lengths: Tensor) -> KV:
        """Keys of the page that each row's newest token is in, as blocks, and a table that names it for every page.

        Args:
            lengths: see :class:`~foveate.ops.KV`.
        """
        decoding = self._decoding
        return KV(decoding.open_keys, None, BlockTable(decoding.open_table, self.used), lengths)

    def view_of_pages(self, pages: Tensor, held: Callable[[Any], Any]) -> tuple[KV, Tensor]:
        """A copy of the keys of some pages, which are fetched: ``[B, Hkv, P * n, D]`` in the order of the pages."""
        heads = self.geometry.num_kv_heads
        every = pages.expand(-1, heads, -1)
        self.fetch(every)
        hot, rows = self._decoding.hot, every.flatten(0, 1)
        blocks = hot.table.gather(1, rows.clamp_min(0).long()).clamp_min(0).long()
        keys = hot.keys[blocks, 0].flatten(1, 2).unflatten(0, (-1, heads))
        places = torch.arange(pages.shape[2], dtype=pages.dtype, device=pages.device)
        return KV(keys, lengths=self.plan.per_row(held)), places.where(pages >= 0, -1)

    @property
    def decoding(self) -> bool:
        """Whether decode steps have begun, which read the pages that they fetch, and :meth:`newest_page`, alone."""
        return (self._parent or self)._decoding is not None

    def hot(self, lengths: Tensor | None = None) -> KV:
        """The pages that are on the device, as blocks ``[N, 1, n, D(v)]``. Each KV head of a sequence is a row of its
        own, with one KV head.

        Args:
            lengths: of these rows, see :class:`~foveate.ops.KV`.
        """
        hot = self._decoding.hot
        return KV(hot.keys, hot.values, BlockTable(hot.table, self.used), lengths)

    def fetch(self, pages: Tensor) -> None:
        """Bring the pages that a decode step reads to the device, and count them.

        Args:
            pages: int32 ``[B, Hkv, P]``, -1 for none; no page stands twice for a KV head.
        """
        rows = pages.flatten(0, 1)
        hot = self._decoding.hot
        placed = place_pages(rows, hot)
        fetch_pages(rows, placed.blocks, self.host.pages, hot)
        shape = (self.batch_size, self.geometry.num_kv_heads)
        for name, number in zip(COUNTERS, (placed.asked, placed.missing)):
            self.count(name, number.view(shape))

    def fetch_slots(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Storage.fetch_slots`; a decode step fetches their pages."""
        if not self.decoding:
            return super().fetch_slots(slots)
        hot, size, shape = self._decoding.hot, self.page_size, slots.shape[:2]
        entries = hot.table.shape[1]
        there = membership_mask(slots.div(size, rounding_mode="floor"), entries)
        self.fetch(torch.arange(entries, dtype=torch.int32, device=slots.device).where(there, -1))
        rows = slots.flatten(0, 1)
        block = hot.table.gather(1, rows.clamp_min(0) // size).where(rows >= 0, len(hot.keys) - 1).long()
        return tuple(x[block, 0, rows % size].unflatten(0, shape) for x in (hot.keys, hot.values))

    def read_slots(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """See :meth:`Storage.read_slots`; in a decode step copies straight from host memory."""
        if not self.decoding:
            return super().read_slots(first, last)
        shape, row = (self.batch_size, self.geometry.num_kv_heads, last - first), self._row or 0
        k, v = (torch.empty(*shape, dim, dtype=self.dtype, device=self.device) for dim in self.host.dims)
        self.host.read(first, last, row, k, v)
        return k, v

    # Writing

    def _write(self, first: int, k: Tensor, v: Tensor) -> None:
        whole, transfers, row = self._parent or self, self.room.transfers, self._row or 0
        whole.stop_decoding()
        k, v = k.to(self.device), v.to(self.device)
        end = first + k.shape[2]
        keys, values = transfers.open(whole, end)
        keys[row : row + len(k), :, first:end], values[row : row + len(k), :, first:end] = k, v
        transfers.write(whole, row, first, k, v)
        transfers.fetch_ahead(self.order)

    def _fill(self, k: Tensor, v: Tensor) -> None:
        self.host.write(0, 0, k, v)

    def write_step(self, k: Tensor, v: Tensor) -> None:
        step = self._step
        if step is None:
            self.reserve(max(self.rows["counts"]) + 1)
            self._start_decoding()
        slots = self.plan["counts"] if step is None else step.slots
        put_both(k, v, slots, self.host.pages, *self._decoding[:3])
        self._clear_channels(slots.view(-1, 1))
        if step is None:
            self._advance(1, 1)

    # Decode steps

    def _start_decoding(self) -> None:
        """Give the buffers of the prompt back and get room for hot pages, unless that is done."""
        if self._decoding is None:
            self.room.transfers.note(self)
            self.room.transfers.close(self.held)
            self._decoding = self._allocate(
                self.room.hot_pages(self, self.capacity), -(-self.capacity // self.page_size)
            )
            self._count_bytes()
            self._open = False
        if not self._open:
            self._read_open_pages()

    def _allocate(self, slots: int, entries: int) -> _Decoding:
        """Room for hot pages in so many slots of each KV head, of ``entries`` pages of a sequence."""
        heads, size, dims = self.geometry.num_kv_heads, self.page_size, self.host.dims
        rows = self.batch_size * heads

        def numbers(*shape: int, fill: int) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int32, device=self.device)

        def zeros(*shape: int) -> list[Tensor]:
            return [torch.zeros(*shape, dim, dtype=self.dtype, device=self.device) for dim in dims]

        with torch.inference_mode(False):
            tables = [numbers(rows, entries, fill=-1), numbers(rows, slots, fill=-1), numbers(rows, slots, fill=NEVER)]
            hot = HotPages(*zeros(rows * slots + 1, 1, size), *tables, numbers(rows, fill=0))
            table = torch.arange(self.batch_size, dtype=torch.int32, device=self.device)[:, None].repeat(1, entries)
            return _Decoding(hot, *zeros(self.batch_size, heads, size), table)

    def _read_open_pages(self) -> None:
        """Read the filled part of the page that each row's next token goes to."""
        self.room.transfers.wait()
        for row, count in enumerate(self.rows["counts"]):
            first = count // self.page_size * self.page_size
            if first < count:
                opened = (self._decoding.open_keys, self._decoding.open_values)
                for memory, x in zip(opened, self.host.page(row, first, count)):
                    memory[row, :, : count - first] = x.to(self.device)
        self._open = True

    def stop_decoding(self) -> None:
        """Give the hot pages back: a prompt, or other tokens, follow."""
        if self._decoding is not None:
            self._decoding = None
            self._count_bytes()

    def _grow(self, capacity: int) -> None:
        """Have entries for the pages of a larger capacity; hot pages stay, unless the number changes that may be."""
        slots, entries, hot = self.room.hot_pages(self, capacity), -(-capacity // self.page_size), self._decoding.hot
        if slots != hot.holds.shape[1]:
            self.stop_decoding()
            return
        with torch.inference_mode(False):
            table = hot.table.new_full((len(hot.table), entries), -1)
            table[:, : hot.table.shape[1]] = hot.table
            opened = self._decoding.open_table[:, :1].repeat(1, entries)
        self._decoding = self._decoding._replace(hot=hot._replace(table=table), open_table=opened)

    # Rows of a batch, and undoing

    def _view_of_row(self, b: int) -> SlotCache:
        one = super()._view_of_row(b)
        one._parent = self
        return one

    def take_rows(self, index: Tensor) -> None:
        if index.tolist() == list(range(self.batch_size)):
            self.snapshots = {}
            return
        self.stop_decoding()
        self.room.transfers.wait()
        self.room.transfers.drop(self.order, self.held)
        self.host.take_rows(index.tolist())
        super().take_rows(index)
        self.counters.host_bytes = self.host.nbytes

    def truncate(self, tokens: int | Sequence[int]) -> None:
        self._open = False
        super().truncate(tokens)

    def restore(self, clock: int) -> None:
        self._open = False
        super().restore(clock)
