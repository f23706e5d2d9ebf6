"""Keys and values in host memory: the device keeps the pages chosen last.

While a prompt is read, a layer's keys are on the device in one piece (:class:`~foveate.state.transfers.Transfers`), and
methods read them as in any store. Decode steps read the pages that they :meth:`~HostPages.fetch` and nothing else; with
:attr:`Method.fetches` a method declares that it keeps to that.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from foveate.ops import KV, BlockTable
from foveate.ops.attend.gather import membership_mask
from foveate.ops.fetch import HotPages, fetch_pages, place_pages, put_both
from foveate.ops.fetch.types import NEVER
from foveate.state.counters import BytesInUse
from foveate.state.host_memory import HostMemory
from foveate.state.store import Fetched, FetchingStore, StoreShape
from foveate.state.transfers import Transfers


class HotPageBudget(Protocol):
    """The buffers that the layers of a cache share, and the number of pages that each layer may keep on the device."""

    transfers: Transfers

    def hot_pages(self, store: HostPages, capacity: int) -> int:
        """The number of pages of each KV head and sequence that a layer with ``capacity`` slots may keep on the device.

        Raises:
            ValueError: if a step may choose more pages.
        """


class _Decoding(NamedTuple):
    """The memory on the device that decode steps read and write."""

    hot: HotPages
    open_keys: Tensor
    """``[B, Hkv, n, D]``: the page that each sequence's newest token is in."""
    open_values: Tensor
    open_table: Tensor
    """int32 ``[B, M]``: names the open page of its sequence for each page, as a block."""


class HostPages(FetchingStore):
    """Keys and values in host memory, in pages of ``shape.page_size`` keys.

    Args:
        room: shared by the layers of the cache.
    """

    can_be_captured = True
    counters = ("pages_asked", "pages_fetched")
    """Pages that decode steps chose, and chosen pages that came from host memory: means over the KV heads, summed over
    steps and rows."""

    def __init__(self, shape: StoreShape, room: HotPageBudget):
        super().__init__(shape)
        heads, dims = shape.geometry.num_kv_heads, (shape.geometry.head_dim, shape.geometry.value_dim)
        self.host = HostMemory(shape.batch_size, heads, dims, shape.page_size, shape.dtype, shape.device)
        self.room = room
        self.order = room.transfers.join(self)
        self.used = 0
        """No row uses more slots, nor more than the steps since the last prompt have room for."""
        self._capacity = 0
        self._parent: HostPages | None = None
        """The store of the batch, if this store holds one of its rows."""
        self._row: int | None = None
        """The number of this row in the batch."""
        self._decoding: _Decoding | None = None
        self._open = False
        """Whether the open pages on the device are up to date."""
        self._counted: list[tuple[str, Tensor]] = []

    def __getstate__(self) -> dict[str, Any]:
        self.room.transfers.wait()
        return self.__dict__ | {"_decoding": None, "_parent": None}

    @property
    def page_size(self) -> int:
        """Keys of a page, n."""
        return self.shape.page_size

    @property
    def batch_size(self) -> int:
        """Rows of the batch."""
        return self.shape.batch_size

    @property
    def held(self) -> BytesInUse:
        """The bytes that all layers of the cache hold."""
        return self.bytes.held

    # Memory

    @property
    def resident_bytes(self) -> int:
        """Bytes on the device; the buffers that layers share while a prompt is read are counted with all layers."""
        held = [] if self._decoding is None else [*self._decoding.hot, *self._decoding[1:]]
        return sum(x.nbytes for x in held)

    @property
    def host_bytes(self) -> int:
        return self.host.nbytes

    def device_tensors(self) -> list[Tensor]:
        return [] if self._decoding is None else [*self._decoding.hot, *self._decoding[1:], self.host.pages.addresses]

    def reserve(self, slots: int) -> None:
        """See :meth:`Store.reserve`.

        Raises:
            ValueError: if a step over ``slots`` slots may choose more pages than the device may keep. Nothing has
                changed then.
        """
        if self._decoding is not None:
            self._grow(slots)
        self.host.reserve(max(slots, self.room.transfers.room))
        self._capacity = slots

    # Writing

    def write(self, first: int, k: Tensor, v: Tensor) -> None:
        whole, transfers, row = self._parent or self, self.room.transfers, self._row or 0
        whole.stop_decoding()
        k, v = k.to(self.shape.device), v.to(self.shape.device)
        end = first + k.shape[2]
        if self._parent is None:  # rows use the same number of slots
            self.used = first
        keys, values = transfers.open(whole, end)
        keys[row : row + len(k), :, first:end], values[row : row + len(k), :, first:end] = k, v
        transfers.write(whole, row, first, k, v)
        held, whole.used = whole.used, max(whole.used, end)
        transfers.fetch_ahead(self.order, held)

    def fill(self, k: Tensor, v: Tensor) -> None:
        self.host.write(0, 0, k, v)
        self.used = k.shape[2]

    def put(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        put_both(k, v, slots[:, 0], self.host.pages, *self._decoding[:3])

    # What methods read while a prompt is read

    def _on_device(self, used: int) -> tuple[Tensor, Tensor]:
        whole, transfers = self._parent or self, self.room.transfers
        if whole._decoding is not None:
            raise RuntimeError("keys and values are in host memory: a decode step reads the pages that it fetches")
        found = transfers.holds(self.order) or transfers.open(whole, whole.used)
        row = slice(None) if self._row is None else slice(self._row, self._row + 1)
        return found[0][row, :, :used], found[1][row, :, :used]

    def view(self, used: int, lengths: Tensor | None = None) -> KV:
        """Keys and values ``[B, Hkv, used, D(v)]`` on the device, while a prompt is read.

        Raises:
            RuntimeError: in a decode step.
        """
        return KV(*self._on_device(used), None, lengths)

    def contents(self, used: int) -> tuple[Tensor, Tensor]:
        """Copies of the first ``used`` slots in host memory, ``[B, Hkv, used, D(v)]``."""
        self.room.transfers.wait()
        shape = (self.batch_size, self.shape.geometry.num_kv_heads, used)
        k, v = (torch.empty(*shape, dim, dtype=self.shape.dtype) for dim in self.host.dims)
        self.host.read(0, used, 0, k, v)
        return k, v

    def read(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """See :meth:`Store.read`; in a decode step copies straight from host memory."""
        if not self.decoding:
            k, v = self._on_device(last)
            return k[:, :, first:], v[:, :, first:]
        shape, row = (self.batch_size, self.shape.geometry.num_kv_heads, last - first), self._row or 0
        k, v = (torch.empty(*shape, dim, dtype=self.shape.dtype, device=self.shape.device) for dim in self.host.dims)
        self.host.read(first, last, row, k, v)
        return k, v

    # What decode steps read

    @property
    def decoding(self) -> bool:
        """Whether decode steps have begun, which read the pages that they fetch, and :meth:`newest_page`, alone."""
        return (self._parent or self)._decoding is not None

    def newest_page(self, used: int, lengths: Tensor) -> KV:
        decoding = self._decoding
        return KV(decoding.open_keys, None, BlockTable(decoding.open_table, used), lengths)

    def fetch(self, chosen: Tensor, page_size: int, used: int, lengths: Tensor | None, again: bool) -> Fetched:
        """See :meth:`FetchingStore.fetch`. Brings the pages of the chosen slots to the device, and returns all pages on
        the device as blocks ``[N, 1, n, D(v)]``.

        Raises:
            ValueError: for pages of another size than the store's.
        """
        if page_size not in (0, self.page_size):
            raise ValueError(
                f"pages of {page_size} keys are chosen, but the method's fetches.page_size is {self.page_size}: choose "
                "pages of that size"
            )
        if not again:
            pages = chosen
            if not page_size:
                number = -(-used // self.page_size)
                there = membership_mask(chosen.div(self.page_size, rounding_mode="floor"), number)
                pages = torch.arange(number, dtype=torch.int32, device=chosen.device).where(there, -1)
            self._fetch(pages)
        hot = self._decoding.hot
        kv = KV(hot.keys, hot.values, BlockTable(hot.table, used), lengths)
        return Fetched(kv, chosen.flatten(0, 1)[:, None], page_size)

    def _fetch(self, pages: Tensor) -> None:
        """Bring pages int32 ``[B, Hkv, P]`` to the device, and count them; -1 for none."""
        rows, hot = pages.flatten(0, 1), self._decoding.hot
        placed = place_pages(rows, hot)
        fetch_pages(rows, placed.blocks, self.host.pages, hot)
        numbers = (number.view(pages.shape[:2]) for number in (placed.asked, placed.missing))
        self._counted += zip(self.counters, numbers)

    def counted(self) -> list[tuple[str, Tensor]]:
        found, self._counted = self._counted, []
        return found

    def keys_of_pages(self, pages: Tensor) -> Tensor:
        self._fetch(pages)
        hot, rows = self._decoding.hot, pages.flatten(0, 1)
        blocks = hot.table.gather(1, rows.clamp_min(0).long()).clamp_min(0).long()
        return hot.keys[blocks, 0].flatten(1, 2).unflatten(0, pages.shape[:2])

    def fetch_slots(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Store.fetch_slots`; a decode step fetches their pages."""
        if not self.decoding:
            k, v = self._on_device((self._parent or self).used)
            index = slots.clamp(0, k.shape[2] - 1)[..., None]
            return tuple(x.gather(2, index.expand(-1, -1, -1, x.shape[3])) for x in (k, v))
        hot, size, shape = self._decoding.hot, self.page_size, slots.shape[:2]
        entries = hot.table.shape[1]
        there = membership_mask(slots.div(size, rounding_mode="floor"), entries)
        self._fetch(torch.arange(entries, dtype=torch.int32, device=slots.device).where(there, -1))
        rows = slots.flatten(0, 1)
        block = hot.table.gather(1, rows.clamp_min(0) // size).where(rows >= 0, len(hot.keys) - 1).long()
        return tuple(x[block, 0, rows % size].unflatten(0, shape) for x in (hot.keys, hot.values))

    # Between prompts and decode steps

    def prepare_steps(self, counts: list[int]) -> None:
        """Give the buffers of the prompt back and get room for hot pages, unless that is done."""
        self.used = self._capacity  # captured steps use slots without a word
        if self._decoding is None:
            self.room.transfers.note(self)
            self.room.transfers.close(self.held)
            hot = self.room.hot_pages(self, self._capacity)
            self._decoding = self._allocate(hot, -(-self._capacity // self.page_size))
            self.bytes.note(self.resident_bytes)
            self._open = False
        if not self._open:
            self._read_open_pages(counts)

    def _allocate(self, slots: int, entries: int) -> _Decoding:
        """Allocate ``slots`` hot pages for each KV head of each sequence, which has ``entries`` pages."""
        shape, size, dims = self.shape, self.page_size, self.host.dims
        heads, device = shape.geometry.num_kv_heads, shape.device
        rows = shape.batch_size * heads

        def numbers(*sizes: int, fill: int) -> Tensor:
            return torch.full(sizes, fill, dtype=torch.int32, device=device)

        def zeros(*sizes: int) -> list[Tensor]:
            return [torch.zeros(*sizes, dim, dtype=shape.dtype, device=device) for dim in dims]

        with torch.inference_mode(False):
            tables = [numbers(rows, entries, fill=-1), numbers(rows, slots, fill=-1), numbers(rows, slots, fill=NEVER)]
            hot = HotPages(*zeros(rows * slots + 1, 1, size), *tables, numbers(rows, fill=0))
            table = torch.arange(shape.batch_size, dtype=torch.int32, device=device)[:, None].repeat(1, entries)
            return _Decoding(hot, *zeros(shape.batch_size, heads, size), table)

    def _read_open_pages(self, counts: list[int]) -> None:
        """Read the filled part of the page that each row's next token goes to."""
        self.room.transfers.wait()
        for row, count in enumerate(counts):
            first = count // self.page_size * self.page_size
            if first < count:
                opened = (self._decoding.open_keys, self._decoding.open_values)
                for memory, x in zip(opened, self.host.page(row, first, count)):
                    memory[row, :, : count - first] = x.to(self.shape.device)
        self._open = True

    def stop_decoding(self) -> None:
        """Give the hot pages back: a prompt, or other tokens, follow."""
        if self._decoding is not None:
            self._decoding = None
            self.bytes.note(self.resident_bytes)

    def _grow(self, capacity: int) -> None:
        """Have entries for the pages of a larger capacity; hot pages stay, unless the number changes that may be."""
        slots, hot = self.room.hot_pages(self, capacity), self._decoding.hot
        entries = max(-(-capacity // self.page_size), hot.table.shape[1])  # more after a growth that failed elsewhere
        if slots != hot.holds.shape[1]:
            self.stop_decoding()
            return
        with torch.inference_mode(False):
            table = hot.table.new_full((len(hot.table), entries), -1)
            table[:, : hot.table.shape[1]] = hot.table
            opened = self._decoding.open_table[:, :1].repeat(1, entries)
        self._decoding = self._decoding._replace(hot=hot._replace(table=table), open_table=opened)

    # Rows of a batch, and undoing

    def of_row(self, b: int, used: int) -> HostPages:
        self.used = used
        one = object.__new__(HostPages)
        one.__dict__ |= self.__dict__ | {"shape": self.shape._replace(batch_size=1), "_parent": self, "_row": b}
        return one

    def take_rows(self, index: Tensor) -> bool:
        chosen = index.tolist()
        if chosen == list(range(self.batch_size)):
            return True
        self.stop_decoding()
        self.room.transfers.wait()
        self.room.transfers.drop(self.order, self.held)
        self.host.take_rows(chosen)
        return False

    def tokens_removed(self, used: int) -> None:
        self.used, self._open = used, False
