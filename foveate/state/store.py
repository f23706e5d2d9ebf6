"""The protocol of stores: where the keys and values of one layer are, and how they are written and read.

A :class:`~foveate.state.SlotCache` has a store. The cache keeps row numbers, channels and counters, and decides which
slots tokens go to; the store keeps keys and values, by slot. Three classes stand side by side:
:class:`~foveate.state.contiguous.Contiguous`, :class:`~foveate.state.host_pages.HostPages` and
:class:`~foveate.state.engine_blocks.EngineBlocks`. docs/guide/stores.md shows how to write another one.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from foveate.ops import KV, BlockTable
from foveate.ops.attend.gather import page_slots
from foveate.ops.retain import place_token
from foveate.state.counters import LayerBytes
from foveate.state.description import Geometry

ALIGN = 64
"""The capacity of a row is a multiple of this many slots."""


def capacity_for(slots: int) -> int:
    """The capacity to which a cache grows that needs this many slots of a row."""
    return -(-(slots + max(ALIGN, slots // 16)) // ALIGN) * ALIGN


class StoreShape(NamedTuple):
    """What a store is made for."""

    geometry: Geometry
    """Shapes of the layer: ``num_kv_heads`` (Hkv), ``head_dim`` (D), ``value_dim`` (Dv) and others."""
    batch_size: int
    """Rows of the batch, B."""
    dtype: torch.dtype
    """Of keys and values."""
    device: torch.device
    """The device that computes, on which new tokens come and what is read is expected."""
    page_size: int | None = None
    """Keys of the pages in which the method reads what a step has chosen; None: its steps read all keys."""


class Fetched(NamedTuple):
    """What a step has fetched. Each KV head of a sequence is a row of its own, with one KV head."""

    kv: KV
    """Keys and values of ``B * Hkv`` rows."""
    places: Tensor
    """int ``[B * Hkv, 1, K]``: where in a row of :attr:`kv` the chosen slots or pages are; -1 for none."""
    page_size: int = 0
    """Keys of a page, where :attr:`places` names pages; 0: it names slots."""


class Store(ABC):
    """Keys and values of one layer for a batch of rows. Slot s of a row holds one token in every KV head.

    The methods that a store must have come first; the others have a default, which is right for any store. Calls come
    without gradients. A token in a slot that is in use is overwritten only by :meth:`put` and :meth:`write`. Tokens are
    removed by counting alone: a slot that is no longer in use is written again before it is read.

    Args:
        shape: what the store is made for. It holds no token yet, and has no slots.
    """

    fetches: ClassVar[bool] = False
    """Whether decode steps read what they fetch, and not :meth:`view`; see :class:`FetchingStore`."""
    can_be_captured: ClassVar[bool] = False
    """Whether :meth:`put` and what a step reads can be captured in a CUDA graph: they take place on the device alone,
    in tensors at fixed addresses, until the next :meth:`reserve`."""
    fills_channels: ClassVar[bool] = False
    """Whether whoever writes a token's key also writes what channels hold of it, see :attr:`Channel.written`."""
    counters: ClassVar[tuple[str, ...]] = ()
    """Names of counters, to which :meth:`counted` adds."""

    def __init__(self, shape: StoreShape):
        self.shape = shape
        self.bytes = LayerBytes()
        """The bytes of the layer, which the cache shares with the store and brings up to date after :meth:`reserve` and
        :meth:`take_rows`; a store whose memory changes at other times notes that here."""

    # What every store has

    @abstractmethod
    def reserve(self, slots: int) -> None:
        """Have room for at least ``slots`` slots of every row; what is in slots stays. Slots that were never written
        must read as finite numbers, such as 0. After a growth that failed elsewhere in the cache, there may be more
        slots than that already."""

    @abstractmethod
    def write(self, first: int, k: Tensor, v: Tensor) -> None:
        """Write n tokens of every row, such as a piece of a prompt, to the reserved slots from ``first`` on.

        Args:
            k, v: ``[B, Hkv, n, D]`` and ``[B, Hkv, n, Dv]``, on the device or, from a saved cache, on the host.
        """

    @abstractmethod
    def put(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write one token of every row, as in a decode step.

        Args:
            slots: int64 ``[B, Hkv]`` on the device: the slot of each KV head, which is reserved.
            k, v: ``[B, Hkv, 1, D]`` and ``[B, Hkv, 1, Dv]``.
        """

    @abstractmethod
    def view(self, used: int, lengths: Tensor | None = None) -> KV:
        """The first ``used`` slots of every row on the device: ``[B, Hkv, used, D(v)]``, or blocks with a table.

        A store that fetches is asked while a prompt is read, and not in decode steps.

        Args:
            lengths: int ``[B]``, how many keys each row has, see :class:`~foveate.ops.KV`; None: all.
        """

    @abstractmethod
    def fetch_slots(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values of slots on the device, ``[B, Hkv, N, D(v)]``.

        Args:
            slots: int64 ``[B, Hkv, N]``; one that is not in use, such as -1, gives anything finite.
        """

    @abstractmethod
    def of_row(self, b: int, used: int) -> Store:
        """Row b as a store of batch size 1 over the same memory, which does not grow.

        Args:
            used: slots in use in the batch's fullest row.
        """

    @abstractmethod
    def take_rows(self, index: Tensor) -> bool | None:
        """Replace the batch by its rows ``index``, int64 ``[B']`` on the device; a row may come several times.

        Returns:
            True if the batch is what it was, so that nothing has changed; otherwise False or None.
        """

    # Writing, where the default serves

    def write_step(self, k: Tensor, v: Tensor, slots: Tensor, **beside: Any) -> Tensor:
        """Write n tokens of every row, one in a decode step, and what changes with the token beside its key.

        Args:
            k, v: ``[B, Hkv, n, D(v)]``.
            slots: int64 ``[B]``: the first of each row's next n slots.
            beside: for n = 1 the arguments ``freed``, ``take``, ``positions``, ``newest`` and ``emptied`` of
                :func:`foveate.ops.put_token`, with which some store writes all of it in one launch.

        Returns:
            int64 ``[B, Hkv]``: the slots that were written, the first of several.
        """
        slot = place_token(slots, k.shape[1], **beside)
        for n in range(k.shape[2]):
            self.put(slot + n if n else slot, k[:, :, n : n + 1], v[:, :, n : n + 1])
        return slot

    def fill(self, k: Tensor, v: Tensor) -> None:
        """Write the first tokens of every row of a saved cache, ``[B, Hkv, n, D(v)]``, to reserved slots."""
        self.write(0, k, v)

    # Reading, where the default serves

    def read(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Keys and values of slots ``first .. last - 1``, ``[B, Hkv, last - first, D(v)]``; not in a captured step."""
        shape = self.shape
        slots = torch.arange(first, last, device=shape.device)
        return self.fetch_slots(slots.expand(shape.batch_size, shape.geometry.num_kv_heads, -1))

    def newest_page(self, used: int, lengths: Tensor) -> KV:
        """At least the keys of the page that each row's newest token is in, at the places of :meth:`view`.

        Args:
            used: slots in use in the fullest row, or a bound of them.
            lengths: int64 ``[B]``, how many keys each row has.
        """
        return self.view(used, lengths)

    def table(self, length: int) -> BlockTable | None:
        """Which blocks hold the first ``length`` slots of each row, where all memory is blocks that rows share, and
        channels are beside these; None: keys, values and channels are by row."""
        return None

    def contents(self, used: int) -> tuple[Tensor, Tensor]:
        """The first ``used`` slots, ``[B, Hkv, used, D(v)]``, to be saved: on any device."""
        kv = self.view(used)
        return kv.k, kv.v

    # What a store may have to know

    def prepare_steps(self, counts: list[int]) -> None:  # noqa: B027  (most stores need not know)
        """Decode steps follow, of rows that use ``counts`` slots, ``[B]``; called before each step that is not captured
        and before captured ones."""

    def own_memory(self) -> None:  # noqa: B027
        """A slot in use is about to be overwritten; memory that is shared with another store must be copied before."""

    def tokens_removed(self, used: int) -> None:  # noqa: B027
        """Tokens at the end of rows were removed, or the method's state was set back: rows use ``used`` slots now."""

    # Memory

    def device_tensors(self) -> list[Tensor]:
        """The tensors whose addresses a captured step contains."""
        return []

    @property
    def resident_bytes(self) -> int:
        """Bytes that keys and values take on the device."""
        return 0

    @property
    def host_bytes(self) -> int:
        """Bytes that keys and values take elsewhere, such as in host memory."""
        return 0

    def counted(self) -> list[tuple[str, Tensor]]:
        """What was counted since the last call: for names in :attr:`counters` a number ``[B, Hkv]``."""
        return []


class FetchingStore(Store):
    """A store whose decode steps read what they fetch, for methods with :attr:`Method.fetches`.

    A decode step reads by :meth:`fetch_slots` and the methods below, which all follow from it.
    """

    fetches = True

    def fetch(self, chosen: Tensor, page_size: int, used: int, lengths: Tensor | None, again: bool) -> Fetched:
        """Bring to the device what a decode step attends to.

        Args:
            chosen: int ``[B, Hkv, K]``: slots, or pages if ``page_size`` is not 0; -1 for none. No page stands twice
                for a KV head.
            page_size: keys of a page; 0 for slots.
            used: slots in use in the fullest row, or a bound of them.
            lengths: of pages int64 ``[B * Hkv]``, how many keys the row of a KV head has; None for slots.
            again: whether the layer has fetched the pages of all of these in this step already.
        """
        if page_size:
            chosen = page_slots(chosen, page_size).flatten(-2)
            chosen = chosen.masked_fill(chosen >= lengths.view(*chosen.shape[:2], 1), -1)
        k, v = (x.flatten(0, 1)[:, None] for x in self.fetch_slots(chosen.long()))
        places = torch.arange(chosen.shape[2], device=chosen.device).where(chosen >= 0, -1)
        return Fetched(KV(k, v), places.flatten(0, 1)[:, None])

    def keys_of_pages(self, pages: Tensor) -> Tensor:
        """A copy of the keys of some pages, ``[B, Hkv, P * n, D]`` in the order of the pages.

        Args:
            pages: int32 ``[B, Hkv, P]``, -1 for none; of ``shape.page_size`` keys each.
        """
        return self.fetch_slots(page_slots(pages, self.shape.page_size).flatten(-2))[0]

    def newest_page(self, used: int, lengths: Tensor) -> KV:
        """The keys of the page that each row's newest token is in, as blocks ``[B, Hkv, n, D]``, and a table that names
        it for every page; see :meth:`Store.newest_page`."""
        size, heads = self.shape.page_size, self.shape.geometry.num_kv_heads
        newest = (lengths - 1).clamp_min(0) // size
        slots = page_slots(newest, size)
        slots = slots.masked_fill(slots >= lengths[:, None], -1)
        keys = self.fetch_slots(slots[:, None].expand(-1, heads, -1))[0]
        table = torch.arange(len(keys), dtype=torch.int32, device=keys.device)[:, None].repeat(1, -(-used // size))
        return KV(keys, None, BlockTable(table, used), lengths)


MakeStore = Callable[[StoreShape], Store]
"""A class of stores, or a :func:`functools.partial` of one with its other arguments."""


def class_of(make: Any) -> type[Store]:
    """The class of stores that ``make`` makes.

    Raises:
        ValueError: for anything but a class of stores or a :func:`functools.partial` of one.
    """
    kind = make.func if isinstance(make, functools.partial) else make
    if not isinstance(kind, type) or not issubclass(kind, Store):
        raise ValueError(
            f"store must be a class derived from foveate.state.Store, or a functools.partial, not {make!r}"
        )
    if missing := sorted(kind.__abstractmethods__):
        raise ValueError(f"store={kind.__name__} lacks the methods {', '.join(missing)} of foveate.state.Store")
    return kind
