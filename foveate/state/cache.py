"""The KV cache of one attention layer, together with the state that a method keeps for its tokens.

A slot holds one token of a row: its key and value in every KV head. Padding is not stored: the real tokens of row b
fill the slots ``0 .. counts[b] - 1``, so a page of n tokens is n consecutive slots, and a row of a padded batch is
stored as it would be alone. Until a method evicts, slot p holds the token at position p of its row. Afterwards
``positions`` holds the position of the token in each slot (-1: none), for each KV head.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from foveate.ops import KV, BlockTable, Logits, Rotary
from foveate.state import channels as channel_memory
from foveate.state.contiguous import Contiguous
from foveate.state.counters import BytesInUse, Counters, LayerBytes, Tally
from foveate.state.description import Channel, Evicts, Geometry, RowNumber
from foveate.state.device_rows import DeviceRows
from foveate.state.eviction import Eviction, Freed
from foveate.state.ranks import Ranks
from foveate.state.row_numbers import DeviceState, RowNumbers
from foveate.state.snapshots import Snapshots
from foveate.state.store import Fetched, MakeStore, Store, StoreShape, capacity_for


class SlotCache(RowNumbers, Eviction, Snapshots):
    """Keys, values and method state of one layer for a batch of sequences.

    :attr:`store` has the keys and values; the cache has the numbers of rows, channels and counters, and decides which
    slots tokens go to.

    Args:
        geometry: shapes of the layer.
        batch_size: number of sequences.
        dtype, device: of keys and values.
        channels: state that the method keeps, by name, its own row numbers included.
        evicts: when the method evicts; if ever, positions are kept for each slot.
        counters: where to count what is read; None: new ones.
        store: makes the store of keys and values, see :class:`~foveate.state.store.Store`.
        page_size: keys of the pages in which the method's steps read what they choose; None: they read all keys.

    Raises:
        ValueError: for a method that evicts in decode with channels per page.
    """

    def __init__(
        self,
        geometry: Geometry,
        batch_size: int,
        dtype: torch.dtype,
        device: torch.device,
        channels: Mapping[str, Channel | RowNumber] | None = None,
        evicts: Evicts = Evicts.NEVER,
        counters: Counters | None = None,
        store: MakeStore = Contiguous,
        page_size: int | None = None,
    ):
        channels = channels or {}
        self.own_numbers = tuple(name for name, spec in channels.items() if isinstance(spec, RowNumber))
        names = ("lengths", "counts", "live", "prompt", "observed", *self.own_numbers)
        super().__init__({name: [0] * batch_size for name in names}, device)
        self.geometry, self.dtype = geometry, dtype
        self.specs = {name: spec for name, spec in channels.items() if isinstance(spec, Channel)}
        self.evicts = evicts
        self.counters = counters if counters is not None else Counters()
        self.counters.bytes_per_key = geometry.num_kv_heads * (geometry.head_dim + geometry.value_dim) * dtype.itemsize
        self.capacity, self.bytes = 0, LayerBytes()
        """Slots allocated for each row, and what the layer holds on the device."""
        self._make_store, self._page_size = store, page_size
        self.store = self._new_store()
        self.counters.declare(self.store.counters)
        self.tensors = channel_memory.per_sequence(self.specs, self.store.shape)
        """The channels by name and, where the cache has them, ``positions``."""
        self.freed: Freed | None = None
        self.ordered = True  # tokens are stored in the order of their positions
        self.uneven = False  # KV heads of a row may hold different numbers of tokens
        self.record_past = False  # tokens may be undone: see eviction.py and snapshots.py
        self.snapshots = {}
        self.forward: dict[Hashable, Any] = {}  # shared by the layers of one forward pass
        self.ranks: Ranks | None = None  # with which other ranks the layer's heads are shared; None: all are here
        self.sink_logits: Tensor | None = None  # learned sinks of the query heads, [Hq]
        self.softcap: float | None = None  # cap of the layer's attention logits
        self.rotary: Rotary | None = None  # how queries and keys are rotated, for methods with needs_rotary
        self._row: int | None = None  # which row of a batch this is, see row
        self.out: Tensor | None = None  # where a step's output goes, see enter
        self.tally: Tally | None = None  # collects counts outside of captured steps, for benchmarks
        if self.evicts.in_decode and any(spec.per > 1 for spec in self.specs.values()):
            raise ValueError("a method that evicts in decode cannot have channels per page: a page's tokens would move")

    # What methods read

    @property
    def used(self) -> int:
        """Slots in use in the fullest row; in a captured step the capacity."""
        step = self.device_state and self._step
        return max(self._rows["counts"]) if step is None else self.capacity

    @property
    def positions(self) -> Tensor:
        """int32 ``[B, Hkv, used]``: the position in its row of the token that a slot holds; -1 for none."""
        if "positions" in self.tensors:
            return self.tensors["positions"][:, :, : self.used]
        slots = torch.arange(self.used, dtype=torch.int32, device=self.device)
        counts = self.plan["counts"][:, None, None]
        return slots.where(slots < counts, -1).expand(-1, self.geometry.num_kv_heads, -1)

    def channel(self, name: str) -> Tensor:
        """A view of a channel: ``[B, Hkv, used, ...]`` if it is per slot; otherwise all entries."""
        tensor = self.tensors[name]
        return tensor[:, :, : self.used] if self.specs[name].per == 1 else tensor

    def entries(self, name: str, number: int) -> tuple[Tensor, BlockTable | None]:
        """A channel's first ``number`` entries of each row, ``[B, Hkv, number, ...]``, and None; of an engine's blocks
        the channel in all blocks, and a table of these entries."""
        table = self.store.table(number)
        return (self.tensors[name][:, :, :number] if table is None else self.tensors[name]), table

    def mean_over_ranks(self, scores: Tensor) -> Tensor:
        """Turn scores ``[B, 1, N]``, means over the heads of this rank, into means over all heads of the layer."""
        return scores if self.ranks is None else self.ranks.mean(scores)

    def of_all_heads(self, x: Tensor) -> Tensor:
        """Gather ``x [B, H, N]``, of the heads of this rank, for all heads of the layer."""
        return x if self.ranks is None else self.ranks.gather(x)

    def logits(self, scaling: float) -> Logits:
        """How the layer's logits are made."""
        return Logits(scaling, self.sink_logits, self.softcap)

    @property
    def full(self) -> bool:
        """Whether every slot in use is known to hold a token, on the host; False in a captured step."""
        if self.uneven or (self.device_state and self._step) is not None:
            return False
        counts = self._rows["counts"]
        return counts == self._rows["live"] and min(counts) == max(counts)

    def stored(self) -> tuple[Tensor | None, Tensor | None]:
        """Which slots hold tokens, as arguments of the verbs in :mod:`foveate.ops`.

        Returns:
            ``(mask, lengths)``; at least one of the two is None. ``mask``: bool ``[B, Hkv, used]``; ``lengths``: int64
            ``[B]``, when each row's tokens fill its first slots. Both None: every slot in use holds a token.
        """
        if self.full:
            return None, None
        if self.evicts.in_decode or self.uneven:
            return self.positions >= 0, None
        return None, self.plan["counts"]

    def _held(self) -> int | Tensor:
        """Tokens held, as an argument of :meth:`count_read`."""
        step = self.device_state and self._step
        if step is not None and not self.uneven:  # the same number in every layer
            return step.held()
        mask, lengths = self.stored()
        if mask is not None:
            return mask.sum(-1)
        return self.used if lengths is None else lengths[:, None]

    def count_read(self, keys: float | Tensor | None = None, available: int | None = None) -> None:
        """Count one decode step and the keys that it read, from the sizes or masks of the selection.

        Args:
            keys: keys read by a KV head, raw or summary: a number for every row and head; a tensor ``[B, Hkv or 1]``;
                or a tensor ``[]``, already summed over the rows as the mean over the KV heads. None: all that it holds.
            available: keys that dense attention would read in each row; None: all tokens so far.
        """
        if (self.device_state and self._step) is None:  # ReplayedSteps counts captured steps
            lengths = self._rows["lengths"]
            available = sum(lengths) if available is None else available * len(lengths)
            self.counters.count_step(len(lengths), available)
        self.count("keys_read", self._held() if keys is None else keys)

    def count(self, name: str, number: float | Tensor) -> None:
        """Add to a counter.

        Args:
            name: of a counter, see :class:`Counters`.
            number: a Python number for every row; or a tensor, see :meth:`Tally.add`.
        """
        step = self.device_state and self._step
        self.counters.count(name, number, self.batch_size, self.tally if step is None else step.tally)

    # Keys and values

    def view(self, lengths: Tensor | None = None) -> KV:
        """Keys and values for the verbs of :mod:`foveate.ops`: ``[B, Hkv, used, D(v)]``, or blocks with a table.

        Args:
            lengths: see :class:`~foveate.ops.KV`.
        """
        return self.store.view(self.used, lengths)

    @property
    def keys(self) -> Tensor:
        """``[B, Hkv, used, D]``; of an engine's blocks a copy."""
        return self._in_one_piece(lambda kv: kv.k)

    @property
    def values(self) -> Tensor:
        """``[B, Hkv, used, Dv]``; of an engine's blocks a copy."""
        return self._in_one_piece(lambda kv: kv.v)

    def _in_one_piece(self, of: Callable[[KV], Tensor]) -> Tensor:
        kv, table = self.view(), self.store.table(self.used)
        return of(kv) if table is None else table.gather(table.table, of(kv))[0]

    def newest_page(self, lengths: Tensor) -> KV:
        """At least the keys of the page that each row's newest token is in, see :meth:`Store.newest_page`."""
        return self.store.newest_page(self.used, lengths)

    def view_of_pages(self, pages: Tensor, held: Callable[[Any], Any]) -> tuple[KV, Tensor]:
        """Keys for a decode step that scores only some pages, and the numbers of these pages among the keys.

        Args:
            pages: int32 ``[B, Hkv or 1, P]``, -1 for none.
            held: gives the number of keys in these pages from a row's length, see :meth:`StepPlan.per_row`.
        """
        if not self.store.fetches:
            return self.view(self.plan["lengths"]), pages
        keys = self._counted(self.store.keys_of_pages(pages.expand(-1, self.geometry.num_kv_heads, -1)))
        places = torch.arange(pages.shape[2], dtype=pages.dtype, device=pages.device)
        return KV(keys, lengths=self.plan.per_row(held)), places.where(pages >= 0, -1)

    def read_slots(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Keys and values of slots ``first .. last - 1``, ``[B, Hkv, last - first, D(v)]``; not in a captured step."""
        return self.store.read(first, last)

    def fetch_slots(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values of slots, int64 ``[B, Hkv, N]``: ``[B, Hkv, N, D(v)]``; anything for -1."""
        return self._counted(self.store.fetch_slots(slots))

    def fetch(self, chosen: Tensor, page_size: int = 0, again: bool = False) -> Fetched:
        """What a step attends to, of a store that fetches; see :meth:`FetchingStore.fetch`."""
        lengths = None
        if page_size:
            lengths = self.plan.per_row(torch.repeat_interleave, self.geometry.num_kv_heads, of="counts")
        return self._counted(self.store.fetch(chosen, page_size, self.used, lengths, again))

    def _counted(self, found: Any) -> Any:
        """What was fetched, after the store's counts of it were added to the counters."""
        for name, number in self.store.counted():
            self.count(name, number)
        return found

    # Memory

    @property
    def resident_bytes(self) -> int:
        """Bytes on the device of keys, values and channels."""
        return channel_memory.nbytes(self.tensors) + self.store.resident_bytes

    def count_in(self, held: BytesInUse) -> None:
        """Count what the layer holds, now and later, with the other layers of its cache; once for each cache."""
        self.counters.held = held
        self.bytes.count_in(held, channel_memory.nbytes(self.tensors), self.store.resident_bytes)

    def _count_bytes(self) -> None:
        """Note what the layer holds. Copies that a layer makes while it grows or evicts are not counted."""
        self.bytes.counters, self.counters.host_bytes = self.counters, self.store.host_bytes
        self.bytes.note(self.store.resident_bytes, channel_memory.nbytes(self.tensors))

    def reserve(self, slots: int) -> None:
        """Grow every row to a capacity of at least this many slots; copies the tensors that grow.

        Raises:
            RuntimeError: for a single row of a batch, which shares the batch's tensors.
        """
        if slots <= self.capacity:
            return
        if self._row is not None:
            raise RuntimeError("a row of a batch cannot grow alone: reserve room in the batch first")
        capacity = capacity_for(slots)
        with torch.inference_mode(False), torch.no_grad():
            self.store.reserve(capacity)
        channel_memory.grow(self.tensors, self._slot_specs(), self.store.shape, capacity)
        self.capacity = capacity
        self._count_bytes()

    def _new_store(self) -> Store:
        """An empty store."""
        made = self._make_store(StoreShape(self.geometry, self.batch_size, self.dtype, self.device, self._page_size))
        made.bytes = self.bytes
        return made

    # Between the layers of one forward pass

    def shared_key(self, name: Hashable) -> Hashable:
        """A key of :attr:`forward`, under which a layer leaves a value for later ones of this pass, which read it for
        the same rows and tokens."""
        return name, self._row, self.rows["lengths"][0] if self._step is None else None

    # Writing

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add n tokens to every row, after the last slot in use.

        Args:
            k, v: ``[B, Hkv, n, D(v)]``.

        Raises:
            ValueError: when rows use different numbers of slots.
        """
        rows, n = self.rows, k.shape[2]
        first = rows["counts"][0]
        if len(set(rows["counts"])) > 1:
            raise ValueError("rows use different numbers of slots: append to each of them with row")
        self.reserve(first + n)
        self.store.write(first, k, v)
        if "positions" in self.tensors:
            start = rows["lengths"][0]
            positions = torch.arange(start, start + n, dtype=torch.int32, device=self.device)
            self.tensors["positions"][:, :, first : first + n] = positions
        for name, spec in self.specs.items():
            if spec.per == 1 and not spec.recomputed:
                self.tensors[name][:, :, first : first + n].zero_()
        self._advance(n, n)

    def write_step(self, k: Tensor, v: Tensor) -> None:
        """Add one token to every row: in the slot evicted last, if any, or else after the last slot in use.

        Args:
            k, v: ``[B, Hkv, 1, D(v)]``.
        """
        step = self.device_state and self._step
        if step is not None:
            newest = step.plan.cached("newest", lambda: (step["lengths"] - 1).to(torch.int32)) if self.evicts else None
            self._put(step.slots, self.device_state.freed_slots, k, v, newest, take=True)
            return
        counts, appended, freed = self._rows["counts"], [True] * self.batch_size, None
        alike = len(set(counts)) == 1 and len(set(self._rows["lengths"])) == 1
        if self.freed is not None:
            freed, appended = self.freed.slots, [not gave_up for gave_up in self.freed.rows]
            self.ordered = False
        self.reserve(max(count + added for count, added in zip(counts, appended)))
        self.store.prepare_steps(counts)
        if alike and self.freed is None and not self.store.fetches:
            self.append(k, v)
            return
        self._put(self.plan["counts"], freed, k, v, self.plan["lengths"].to(torch.int32) if self.evicts else None)
        self.freed = None
        self._advance(1, appended)

    def write_verified(self, k: Tensor, v: Tensor) -> None:
        """Count one token more in every row, and write the keys and values of its last n tokens over what is there; the
        n - 1 tokens before the new one are counted already. Only for methods that never evict and keep no state.

        Args:
            k, v: ``[B, Hkv, n, D(v)]``.
        """
        if (self.device_state and self._step) is None:
            self.reserve(max(self._rows["counts"]) + 1)
            self.store.prepare_steps(self._rows["counts"])
            self._advance(1, 1)
        self.store.write_step(k, v, self.plan.per_row(operator.sub, k.shape[2], of="counts"))

    # Captured steps

    def move_to_device(self, rows: DeviceRows, freed_slots: Tensor | None) -> list[Tensor]:
        """Let steps advance the row numbers on the device, until they are read on the host.

        Args:
            rows: the row numbers, already written; layers whose rows have the same numbers share it.
            freed_slots: buffer int64 ``[B, Hkv]`` for evicted slots that the next token reuses; None: no eviction.

        Returns:
            The tensors whose addresses a captured step contains.
        """
        if self.evicts.in_decode:
            self.store.own_memory()
        self.store.prepare_steps(self.rows["counts"])
        if freed_slots is not None:
            freed_slots.copy_(self.freed.slots) if self.freed is not None else freed_slots.fill_(-1)
        self.device_state, self.freed = DeviceState(rows, freed_slots), None
        return [*self.tensors.values(), *self.store.device_tensors()]

    def _sync_to_host(self) -> None:
        if self.device_state is not None and self.device_state.freed_slots is not None:
            freed = self.device_state.rows.read()[1]
            self.freed = Freed(self.device_state.freed_slots.clone(), list(freed)) if any(freed) else None
            self.ordered = False
        super()._sync_to_host()

    def __getstate__(self) -> dict[str, Any]:  # for copies, which do not share numbers on the device
        self._sync_to_host()
        return self.__dict__ | {"_planned": None}

    # Rows of a batch

    @contextmanager
    def row(self, b: int) -> Iterator[SlotCache]:
        """Row b as a cache of batch size 1 over the same memory, whose row numbers the batch takes over at the end."""
        one = self._view_of_row(b)
        yield one
        for name, numbers in one.rows.items():
            self.rows[name] = [*self.rows[name][:b], *numbers, *self.rows[name][b + 1 :]]

    def _view_of_row(self, b: int) -> SlotCache:
        one = object.__new__(type(self))
        one.__dict__.update(self.__dict__)
        one.rows = {name: [numbers[b]] for name, numbers in self.rows.items()}
        one.tensors = {name: x[b : b + 1] for name, x in self.tensors.items()}
        one.store, one.snapshots = self.store.of_row(b, self.used), {}
        one._row = b
        return one

    def take_rows(self, index: Tensor) -> None:
        """Replace the batch by its rows ``index``, int64 ``[B']`` (beam search, repeats, selection)."""
        with torch.inference_mode(False), torch.no_grad():
            index = index.clone()
            if self.store.take_rows(index):
                self.snapshots = {}
                return
            self.store.shape = self.store.shape._replace(batch_size=len(index))
            self.tensors = {name: x.index_select(0, index) for name, x in self.tensors.items()}
        per_row = [*self.rows.values(), *([self.freed.rows] if self.freed is not None else [])]
        alike = all(len(set(numbers)) == 1 for numbers in per_row)
        chosen = [0] * len(index) if alike else index.tolist()  # waits for the device only where rows differ
        self.rows = {name: [numbers[b] for b in chosen] for name, numbers in self.rows.items()}
        if self.freed is not None:
            self.freed = Freed(self.freed.slots.index_select(0, index), [self.freed.rows[b] for b in chosen])
        self._count_bytes()
        self.snapshots = {}

    # Inside

    def _slot_specs(self) -> dict[str, Channel]:
        """Tensors with an entry per slot or page, beside keys and values."""
        specs = {"positions": channel_memory.POSITIONS} if self.evicts else {}
        return specs | {name: spec for name, spec in self.specs.items() if spec.per > 0}

    def _put(
        self, slots: Tensor, freed: Tensor | None, k: Tensor, v: Tensor, newest: Tensor | None, take: bool = False
    ) -> None:
        """Write one token of each row, see :meth:`Store.write_step`, and zero the slot's channels."""
        own = {"positions": self.tensors["positions"], "newest": newest} if "positions" in self.tensors else {}
        emptied = [name for name, spec in self.specs.items() if spec.per == 1 and not spec.recomputed]
        first = next((name for name in emptied if not self.specs[name].shape), None)  # zeroed by the same launch
        own["emptied"] = None if first is None else self.tensors[first]
        own |= {"freed": freed, "take": take}
        slot = self.store.write_step(k, v, slots, **own)
        channel_memory.clear((self.tensors[name] for name in emptied if name != first), slot)
