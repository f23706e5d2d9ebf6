"""How much of a cache is on the device when its keys and values are in host memory, and whether that suffices."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from foveate.methods import Method
from foveate.runtime.capture import ROOM
from foveate.state import Channel, Geometry
from foveate.state.host_pages import HostPages
from foveate.state.store import capacity_for
from foveate.state.transfers import Transfers

MARGIN = 0.1
"""Share of a device's memory that stays free for activations and fragments, if the user gives no budget."""
_GROUP = ("max", "current", "stat")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def parse_budget(budget: Any) -> int | float | None:
    """Parse a user's ``gpu_budget`` into bytes (int), a share of the pages (float), or None.

    Raises:
        ValueError: for an invalid budget.
    """
    found = budget
    if isinstance(budget, str):
        number = budget.strip().upper().rstrip("KMGIB ")
        unit = budget.strip().upper()[len(number) :].strip()
        try:
            found = int(float(number) * _UNITS[unit])
        except (ValueError, KeyError, OverflowError):
            found = 0
    whole = isinstance(found, int) and not isinstance(found, bool) and found >= 1
    if budget is None or whole or (isinstance(found, float) and 0 < found <= 1):
        return found
    raise ValueError(
        f"gpu_budget must be a size such as '8GB', a number of bytes, or the share of pages to keep on the GPU, above "
        f"0 and at most 1.0, not {budget!r}"
    )


class DoesNotFitError(ValueError):
    """The budget of device memory, or the free host memory, does not suffice."""


class LayerShape(NamedTuple):
    """The facts of a layer on which its memory depends."""

    method: Method
    geometry: Geometry
    dtype: torch.dtype

    @property
    def offloaded(self) -> bool:
        """Whether the layer's keys and values are in host memory; otherwise it reads all of them in each step."""
        return self.method.fetches is not None

    def kept(self, rows: int, slots: int) -> int:
        """Bytes of the keys and values of ``slots`` slots in each of ``rows`` rows."""
        shape = self.geometry
        return rows * slots * shape.num_kv_heads * (shape.head_dim + shape.value_dim) * self.dtype.itemsize

    def summaries(self, rows: int, slots: int) -> int:
        """Bytes of the method's state for ``slots`` slots in each of ``rows`` rows."""
        channels = self.method.channels(self.geometry).values()
        return sum(self._channel(one, rows, slots) for one in channels if isinstance(one, Channel))

    def _channel(self, one: Channel, rows: int, slots: int) -> int:
        entries = rows * (-(-slots // one.per) * self.geometry.num_kv_heads if one.per else 1)
        return entries * math.prod(one.shape) * (one.dtype or self.dtype).itemsize

    def pages(self, rows: int, number: int) -> int:
        """Bytes of ``number`` hot pages for each KV head of ``rows`` rows."""
        return self.kept(rows, number * self.method.fetches.page_size)

    def least(self, slots: int) -> int:
        """The most pages of a KV head that a step may choose when a row has ``slots`` slots."""
        fetches = self.method.fetches
        return min(fetches.most(slots), -(-slots // fetches.page_size))


class Needs(NamedTuple):
    """Bytes that a cache takes."""

    fixed: int
    """On the device throughout: summaries, and the keys and values of layers that read all keys."""
    prompt: int
    """On the device while a prompt is read: the keys and values of two layers."""
    least: int
    """On the device in decode steps: the pages that one step may choose."""
    host: int
    """In host memory."""


def needs(layers: Sequence[LayerShape], rows: int, slots: int) -> Needs:
    """The bytes that a cache takes, with ``slots`` slots in each of ``rows`` rows."""
    offloaded = [one for one in layers if one.offloaded]
    fixed = sum(one.summaries(rows, slots) + (0 if one.offloaded else one.kept(rows, slots)) for one in layers)
    largest = sorted(one.kept(rows, slots) for one in offloaded)[-2:]
    least = sum(one.pages(rows, one.least(slots)) for one in offloaded)
    return Needs(fixed, sum(largest), least, sum(one.kept(rows, slots) for one in offloaded))


class Offload:
    """The budgets and transfers that the layers of a cache share when its keys and values are in host memory.

    Args:
        budget: bytes on the device, or the share of pages kept on it; None: the device's free memory minus a margin (on
            a CPU, all pages).
        layers: the layers that have a method, by index.
        device: the device that computes.
    """

    def __init__(self, budget: int | float | None, layers: Mapping[int, LayerShape], device: torch.device):
        self.budget, self.device, self.layers = budget, device, list(layers.values())
        self.transfers = Transfers(device)
        self.rows, self.slots = 0, 0
        """The rows, and the slots of a row, that were announced."""
        self._bytes: int | None = None
        """The automatic budget in bytes, from the device's free memory; None before it is first needed."""

    def reserve_memory(self, rows: int, tokens: int, held: int = 0, in_host: int = 0) -> None:
        """Announce that the cache will hold ``tokens`` tokens of ``rows`` rows.

        Args:
            held: bytes that the cache holds on the device already.
            in_host: bytes that it holds in host memory already.

        Raises:
            DoesNotFitError: if the budget of device memory, or the free host memory, does not suffice.
        """
        slots = capacity_for(tokens + ROOM)
        if (rows, slots) <= (self.rows, self.slots) and slots <= self.slots:
            return
        slots = max(slots, self.slots)
        what = needs(self.layers, rows, slots)
        named = f"{tokens:,} tokens" + (f" of {rows} sequences" if rows > 1 else "")
        self.check_host(named, what.host, in_host)
        if isinstance(self._budget(held), int):
            least = what.fixed + max(what.prompt, what.least)
            if least > self._budget(held):
                raise DoesNotFitError(
                    f"gpu_budget is {self._named()}, and {named} need {_size(least)} on the GPU: "
                    f"{_size(what.fixed)} for summaries, and {_size(what.prompt)} for two layers of the prompt, then "
                    f"{_size(what.least)} for the pages of one step; give more, or choose fewer pages (top_k)"
                )
        else:
            offloaded = [one for one in self.layers if one.offloaded]
            if any(self._hot(one.method.fetches.page_size, rows, slots) < one.least(slots) for one in offloaded):
                raise DoesNotFitError(self._too_few(slots))
        self.rows, self.slots = rows, slots
        self.transfers.room = slots

    def forget(self) -> None:
        """Forget what was announced: the cache is empty again."""
        self.rows, self.slots, self.transfers.room = 0, 0, 0

    def check_host(self, named: str, needed: int, in_host: int = 0) -> None:
        """Refuse keys and values for which too little host memory is free.

        Args:
            named: a name of the tokens for the message.
            needed: bytes of their keys and values.
            in_host: bytes that the cache holds in host memory already.

        Raises:
            DoesNotFitError: if too little host memory is free.
        """
        free = _free_host_memory()
        if needed > in_host + free:
            raise DoesNotFitError(
                f"offload=True: keys and values of {named} take {_size(needed)} of host memory, and {_size(free)} "
                "is free; read fewer tokens"
            )

    def hot_pages(self, store: HostPages, capacity: int) -> int:
        """See :class:`foveate.state.host_pages.HotPageBudget`."""
        found, size = self._hot(store.page_size, store.batch_size, max(self.slots, capacity)), store.page_size
        alike = (one for one in self.layers if one.offloaded and one.method.fetches.page_size == size)
        if found < max(one.least(capacity) for one in alike):
            raise DoesNotFitError(self._too_few(capacity))
        return found

    def _hot(self, page_size: int, rows: int, slots: int) -> int:
        """Hot pages of each KV head that a layer may keep when its cache has ``slots`` slots."""
        pages, budget = -(-slots // page_size), self._budget(0)
        if isinstance(budget, float):
            found = math.ceil(budget * pages)
        else:
            left = budget - needs(self.layers, rows, slots).fixed
            offloaded = sum(shape.kept(rows, 1) for shape in self.layers if shape.offloaded)
            found = max(0, left) // (offloaded * page_size)  # the same share of each layer
        return min(found, pages)

    def _too_few(self, slots: int) -> str:
        sizes = [(one.least(slots), -(-slots // one.method.fetches.page_size)) for one in self.layers if one.offloaded]
        least, pages = max(sizes, key=lambda one: one[0] / one[1])
        return (
            f"gpu_budget is {self._named()}, and a step over {slots:,} tokens may choose {least:,} of {pages:,} pages: "
            f"give a share of at least {math.ceil(100 * least / pages) / 100:.2f}, or choose fewer pages (top_k)"
        )

    def _budget(self, held: int) -> int | float:
        if self.budget is not None:
            return self.budget
        if self.device.type != "cuda":
            return 1.0
        if self._bytes is None:
            self._bytes = max(0, free_memory(self.device) + held)
        return self._bytes

    def _named(self) -> str:
        if isinstance(self.budget, float):
            return f"{self.budget:g} of the pages"
        return _size(self._budget(0)) + ("" if self.budget is not None else " (what is free, minus a margin)")


def free_memory(device: torch.device) -> int:
    """Bytes that this process may still allocate on a GPU, minus the share :data:`MARGIN` of its whole allowance."""
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    return min(free + reserved, allowed) - allocated - int(MARGIN * allowed)


def _free_host_memory() -> int:
    """Bytes of host memory that this process may still take."""
    found = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")]
        group = [Path("/sys/fs/cgroup", f"memory.{name}").read_text(encoding="ascii") for name in _GROUP]
        stat = dict(line.split() for line in group[2].splitlines())
        cached = int(stat["inactive_file"]) + int(stat["active_file"])  # files, whose memory is given back
        found.append(int(group[0]) - int(group[1]) + cached)
    except (OSError, ValueError, LookupError):  # not Linux, or no limit
        pass
    return max(0, min(found))


def _size(number: int) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"
