"""Where the keys and values of one layer live, and beside them whatever a method remembers of them.

Slots are packed: the real tokens of row b fill the slots ``0 .. counts[b] - 1`` without holes, whatever the padding was
and on whichever turn it came, so a page of tokens is a page of slots and a row of a batch is stored exactly as it would
be alone. Until a method evicts, the token at position p of its row is in slot p; afterwards ``positions`` says which
token a slot holds (-1: none).
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from foveate.ops import first_keys, put_token
from foveate.state.counters import Counters, Tally, over_rows
from foveate.state.description import Channel, Geometry
from foveate.state.device_rows import DeviceRows
from foveate.state.eviction import Eviction, Freed, movable
from foveate.state.row_numbers import DeviceState, RowNumbers
from foveate.state.snapshots import Snapshots
from foveate.state.storage import Storage


class SlotCache(RowNumbers, Storage, Eviction, Snapshots):
    """Keys, values and method state of one layer for a batch of sequences.

    Args:
        geometry: shapes of the layer.
        batch_size: number of sequences.
        dtype, device: of keys and values.
        channels: state that the method keeps, by name.
        evicts: whether slots are given up, so that positions have to be kept.
        counters: where to count what is read.
        block_size: slots of a block in which keys and values are kept, see :class:`Storage`; 0: they are in one piece.

    Raises:
        ValueError: for blocks, or pages, of a method that evicts.
    """

    def __init__(
        self,
        geometry: Geometry,
        batch_size: int,
        dtype: torch.dtype,
        device: torch.device,
        channels: dict[str, Channel] | None = None,
        evicts: bool = False,
        counters: Counters | None = None,
        block_size: int = 0,
    ):
        names = ("lengths", "counts", "live", "prompt", "pages", "paged", "observed")
        super().__init__({name: [0] * batch_size for name in names}, device)
        self.geometry, self.dtype = geometry, dtype
        self.specs = dict(channels or {})
        self.evicts = evicts
        self.counters = counters if counters is not None else Counters()
        self.counters.bytes_per_key = geometry.num_kv_heads * (geometry.head_dim + geometry.value_dim) * dtype.itemsize
        self.capacity = 0
        self.tensors: dict[str, Tensor] = {}
        self.freed: Freed | None = None
        self.ordered = True  # no token lies before an older one
        self.uneven = False  # KV heads of a row may hold different numbers of tokens
        self.staged = False
        self.snapshots = {}
        self.borrowed = False  # keys and values are another cache's, see branch
        self.forward: dict[Hashable, Any] = {}  # what the layers of one forward pass share, see hand_on
        self.sink_logits: Tensor | None = None  # learned sinks of the query heads, [Hq]
        self.softcap: float | None = None  # cap of the layer's attention logits
        self.to_come = 0  # columns of the prompt behind those of the present forward pass
        self._row: int | None = None
        self.tally: Tally | None = None  # where numbers on the device wait for those of other layers
        self.block_size, self.free_blocks = block_size, []
        if evicts and any(spec.per > 1 for spec in self.specs.values()):
            raise ValueError("a method that evicts cannot keep pages: their slots would move")
        if evicts and block_size:
            raise ValueError("a method that evicts keeps its slots in one piece, not in blocks")
        for name, spec in self.specs.items():
            if spec.per == 0:
                with torch.inference_mode(False):
                    self.tensors[name] = torch.full(
                        (batch_size, *spec.shape), spec.fill, dtype=spec.dtype or dtype, device=device
                    )

    @classmethod
    def of(
        cls,
        k: Tensor,
        v: Tensor,
        num_heads: int,
        forward: dict[Hashable, Any] | None = None,
        row: int | None = None,
        sink_logits: Tensor | None = None,
        softcap: float | None = None,
        to_come: int = 0,
    ) -> SlotCache:
        """A cache over given keys and values, which are not copied: for one forward pass without a cache.

        Args:
            forward: what the layers of the pass share.
            row: which row of the batch this is, when it is one of several.
            sink_logits: learned sinks of the query heads, ``[Hq]``; None: there are none.
            softcap: cap of the attention logits, see :func:`foveate.ops.attend`; None: there is none.
            to_come: columns of padding behind the row's last token.
        """
        geometry = Geometry(num_heads, k.shape[1], k.shape[3], v.shape[3])
        cache = cls(geometry, k.shape[0], k.dtype, k.device)
        cache.forward, cache._row = {} if forward is None else forward, row
        cache.sink_logits, cache.softcap, cache.to_come = sink_logits, softcap, to_come
        cache.tensors |= {"keys": k, "values": v}
        cache.capacity = k.shape[2]
        cache._advance(k.shape[2], k.shape[2])
        return cache

    # What methods read

    @property
    def used(self) -> int:
        """Slots in use, the largest row's; in a step that is replayed, all that there are."""
        return max(self.rows["counts"]) if self.step is None else self.capacity

    @property
    def positions(self) -> Tensor:
        """int32 ``[B, Hkv, used]``: which token of its row a slot holds; -1 for none."""
        if "positions" in self.tensors:
            return self.tensors["positions"][:, :, : self.used]
        slots = torch.arange(self.used, dtype=torch.int32, device=self.device)
        counts = self.row_tensor("counts")[:, None, None]
        return slots.where(slots < counts, -1).expand(-1, self.geometry.num_kv_heads, -1)

    def channel(self, name: str) -> Tensor:
        """A channel's used part: ``[B, Hkv, used, ...]`` per slot, whole otherwise."""
        tensor = self.tensors[name]
        return tensor[:, :, : self.used] if self.specs[name].per == 1 else tensor

    def holes(self) -> Tensor | None:
        """bool ``[B, Hkv or 1, used]``, True where a slot holds a token; None when all of them do."""
        mask, lengths = self.stored()
        return mask if lengths is None else first_keys(lengths, self.used)

    def stored(self) -> tuple[Tensor | None, Tensor | None]:
        """Which slots hold tokens, as the verbs take it.

        Returns:
            ``(mask, lengths)``: bool ``[B, Hkv, used]``, or how many of the first slots, int64 ``[B]``; neither when
            all of them do.
        """
        if self.step is None:
            counts = self.rows["counts"]
            if counts == self.rows["live"] and min(counts) == max(counts) and not self.uneven:
                return None, None
        if "positions" in self.tensors:
            return self.positions >= 0, None
        return None, self.row_tensor("counts")

    def held(self, mask: Tensor | None, lengths: Tensor | None) -> int | Tensor:
        """How many tokens that is, as :meth:`count_read` takes it: of what :meth:`stored` has returned."""
        if self.step is not None:  # as many in every layer
            return self.step.once("held", functools.partial(self.step["live"].sum, dtype=torch.float64))
        if mask is not None:
            return mask.sum(-1)
        return self.used if lengths is None else lengths[:, None]

    @property
    def resident_bytes(self) -> int:
        """Bytes of keys, values and state held at present."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors.values())

    def count_read(self, keys: float | Tensor, pages_refined: float | Tensor = 0, available: int | None = None) -> None:
        """Count one decode step: keys (raw or summary) read by each KV head, from the sizes or masks of the read.

        Args:
            keys, pages_refined: a number for every row and head; a tensor ``[B, Hkv or 1]``; or a tensor ``[]``, the
                sum over the rows of the mean over the KV heads.
            available: keys that dense attention would read in each row; None for all tokens so far.
        """
        counters = self.counters
        if self.step is None:  # who replays steps counts them
            available = sum(self.lengths) if available is None else available * self.batch_size
            counters.count_steps(1, self.batch_size, available)
        self.count("keys_read", keys)
        self.count("pages_refined", pages_refined)

    def count(self, name: str, number: float | Tensor) -> None:
        """Count more of something, see :class:`Counters`.

        Args:
            number: a number for every row; or a tensor, see :meth:`Tally.add`.
        """
        total, tally = getattr(self.counters, name), self.tally if self.step is None else self.step.tally
        if not isinstance(number, Tensor):
            number = float(number * self.batch_size)
        if tally is not None and isinstance(total, Tensor) and not total.is_inference():
            tally.add(total, number)
        else:
            self.counters.add(name, over_rows(number) if isinstance(number, Tensor) and number.dim() else number)

    # Between the layers of one forward pass

    def hand_on(self, name: Hashable, value: Any, instead_of: Hashable = None) -> None:
        """Leave something for a later layer, which gets it for the same rows and tokens.

        What was left for these under the name ``instead_of`` is let go.
        """
        self.forward.pop((instead_of, self._row, self.now), None)
        self.forward[name, self._row, self.now] = value

    def handed_on(self, name: Hashable) -> Any:
        """What an earlier layer has left under this name.

        Raises:
            LookupError: when none has.
        """
        key = (name, self._row, self.now)
        if key not in self.forward:
            raise LookupError(f"no earlier layer of this forward pass has left {name!r}")
        return self.forward[key]

    # Writing

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add n tokens to every row, after the last slot in use; all rows must use the same number of slots.

        Args:
            k, v: ``[B, Hkv, n, D(v)]``.
        """
        first, n = self.rows["counts"][0], k.shape[2]
        if len(set(self.rows["counts"])) > 1:
            raise ValueError("rows of different lengths are appended to one by one")
        self.reserve(first + n)
        self._write(first, k, v)
        if "positions" in self.tensors:
            start = self.rows["lengths"][0]
            self.tensors["positions"][:, :, first : first + n] = torch.arange(
                start, start + n, dtype=torch.int32, device=self.device
            )
        self._clear(slice(first, first + n))
        self._advance(n, n)

    def write_step(self, k: Tensor, v: Tensor) -> None:
        """Add one token to every row: into the slot freed last, if any, or else after the last slot in use.

        Args:
            k, v: ``[B, Hkv, 1, D(v)]``.
        """
        step = self.step
        if step is not None:
            newest = step.once("newest", lambda: (step["lengths"] - 1).to(torch.int32)) if self.evicts else None
            self._put(step.slots, self.device_state.places, k, v, newest, take=True)
            return
        counts = self.rows["counts"]
        if self.freed is None and len(set(counts)) == 1 and len(set(self.rows["lengths"])) == 1:
            self.append(k, v)
            return
        appended = [True] * self.batch_size
        freed = None
        if self.freed is not None:
            freed, appended = self.freed.slots, [not gave_up for gave_up in self.freed.rows]
            self.ordered = False
        self.reserve(max(count + added for count, added in zip(counts, appended)))
        self._put(self.row_tensor("counts"), freed, k, v, self.row_tensor("lengths").to(torch.int32))
        self.freed = None
        self._advance(1, appended)

    # Steps that are replayed

    def move_to_device(self, rows: DeviceRows, places: Tensor | None) -> None:
        """From now on steps advance the numbers of the rows on the device, until someone asks for them.

        Args:
            rows: where they have been written; layers whose rows are alike share it.
            places: int64 ``[B, Hkv]`` to keep slots in that are given up, for a method that evicts.
        """
        if places is not None:
            places.copy_(self.freed.slots) if self.freed is not None else places.fill_(-1)
        self.device_state, self.freed = DeviceState(rows, places), None

    def sync_to_host(self) -> None:
        if self.device_state is not None and self.device_state.places is not None:
            freed = self.device_state.rows.read()[1]
            self.freed = Freed(self.device_state.places.clone(), list(freed)) if any(freed) else None
            self.ordered = False
        super().sync_to_host()

    def __getstate__(self) -> dict[str, Any]:  # of a copy, which has tensors of its own
        self.sync_to_host()
        return dict(self.__dict__)

    # Rows of a batch

    def row(self, b: int) -> SlotCache:
        """Row b alone, sharing this cache's memory; :meth:`put_back` returns its numbers."""
        one = object.__new__(SlotCache)
        one.__dict__.update(self.__dict__)
        one.rows = {name: [numbers[b]] for name, numbers in self.rows.items()}
        whole = self._shared
        one.tensors = {name: x if name in whole else x[b : b + 1] for name, x in self.tensors.items()}
        one.snapshots = {}
        one._row = b
        return one

    def put_back(self, b: int, one: SlotCache) -> None:
        """Take over the numbers of a row that was worked on alone."""
        for name, numbers in one.rows.items():
            self.rows[name][b] = numbers[0]

    def take_rows(self, index: Tensor) -> None:
        """Rows of the batch anew: ``index`` int64 ``[B']`` (beam search, repeats, selection)."""
        with torch.inference_mode(False), torch.no_grad():
            index = index.clone()
            if self.block_size and "block_table" in self.tensors:
                self._take_rows_of_blocks(index.tolist())
            whole = (*self._shared, "block_table")
            self.tensors = {
                name: x if name in whole else movable(x).index_select(0, index).view(x.dtype)
                for name, x in self.tensors.items()
            }
        per_row = [*self.rows.values(), *([self.freed.rows] if self.freed is not None else [])]
        alike = all(len(set(numbers)) == 1 for numbers in per_row)
        chosen = [0] * len(index) if alike else index.tolist()  # waits for the device only where rows differ
        self.rows = {name: [numbers[b] for b in chosen] for name, numbers in self.rows.items()}
        if self.freed is not None:
            self.freed = Freed(self.freed.slots.index_select(0, index), [self.freed.rows[b] for b in chosen])
        self.counters.resident_bytes = self.resident_bytes
        self.snapshots = {}

    # Other methods

    def part(self, names: dict[str, str]) -> SlotCache:
        """The same keys and values with some of the channels under other names, for another method to fill.

        Args:
            names: the names here, by the names there.
        """
        one = object.__new__(SlotCache)
        one.__dict__.update(self.__dict__)
        one.specs = {name: self.specs[here] for name, here in names.items()}
        one.tensors = {name: self.tensors[name] for name in ("keys", "values", "block_table") if name in self.tensors}
        one.tensors |= {name: self.tensors[here] for name, here in names.items()}
        one.rows = {name: list(numbers) for name, numbers in self.rows.items()}
        return one

    def branch(
        self, channels: dict[str, Channel], evicts: bool, counters: Counters, filled: dict[str, str]
    ) -> SlotCache:
        """The same tokens for another method, over the same memory of keys and values.

        Tokens that a branch adds lie behind the shared ones, where the next branch writes over them: use one after the
        other. A branch that evicts copies first.

        Args:
            channels, evicts, counters: of the other method.
            filled: channels to copy from this cache, their names here by the names there; the others are empty.
        """
        size = 0 if evicts else self.block_size
        one = SlotCache(self.geometry, self.batch_size, self.dtype, self.device, channels, evicts, counters, size)
        one.rows = {name: list(numbers) for name, numbers in self.rows.items()}
        one.capacity, one.borrowed = self.capacity, True
        one.sink_logits, one.softcap = self.sink_logits, self.softcap
        shared = ("keys", "values", "block_table") if size == self.block_size else ()
        one.tensors |= {name: self.tensors[name] for name in shared if name in self.tensors}
        one.free_blocks = self.free_blocks if shared else []
        for name, spec in one._slot_specs().items():
            if name not in shared:
                one.tensors[name] = one._buffer(name, spec, self.capacity)
        if not shared:  # out of blocks, into one piece
            one.borrowed = False
            one._write(0, self.keys, self.values)
        for name, here in filled.items():
            one.tensors[name].copy_(self.tensors[here])
        if evicts:
            one.tensors["positions"][:, :, : self.used] = self.positions
        counters.resident_bytes = one.resident_bytes
        return one

    # Inside

    def _slot_specs(self) -> dict[str, Channel]:
        """Everything that has an entry per slot or page, keys and values included."""
        specs = {
            "keys": Channel((self.geometry.head_dim,), dtype=None),
            "values": Channel((self.geometry.value_dim,), dtype=None),
        }
        if self.evicts:
            specs["positions"] = Channel(dtype=torch.int32)
        return specs | {name: spec for name, spec in self.specs.items() if spec.per > 0}

    def _put(
        self, slots: Tensor, freed: Tensor | None, k: Tensor, v: Tensor, newest: Tensor | None, take: bool = False
    ) -> None:
        """Write one token a row, see :func:`foveate.ops.put_token`, and empty its channels."""
        own = {"positions": self.tensors["positions"], "newest": newest} if "positions" in self.tensors else {}
        emptied = [name for name, spec in self.specs.items() if spec.per == 1 and not spec.recomputed]
        first = next((name for name in emptied if not self.specs[name].shape), None)  # by the same launch
        own["emptied"] = None if first is None else movable(self.tensors[first])
        own |= {"freed": freed, "take": take, "block_table": self.block_table}
        slot = put_token(self.tensors["keys"], self.tensors["values"], k, v, slots, **own)
        for name in emptied:
            if name != first:
                index = slot.view(*slot.shape, 1, *[1] * len(self.specs[name].shape))
                shape = (*slot.shape, 1, *self.specs[name].shape)
                movable(self.tensors[name]).scatter_(2, index.expand(shape), 0)

    def _clear(self, slots: slice) -> None:
        for name, spec in self.specs.items():
            if spec.per == 1 and not spec.recomputed:
                movable(self.tensors[name])[:, :, slots] = 0
