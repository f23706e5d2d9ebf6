"""Keys and values of one layer in host memory, in segments that are pinned where a GPU reads them."""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref

import torch
from torch import Tensor

from foveate.ops.fetch import HostPages

SEGMENT_BYTES = 1 << 26
"""Bytes of a segment, about: memory of this size goes back to the system as soon as it is freed."""


_LEAST_SLOTS, _LEAST_BYTES = 1 << 12, 1 << 23
"""A segment has one of these at least, the smaller: the first prompt may be short."""
_PORTABLE, _OUT_OF_MEMORY = 1, 2
"""cudaHostRegisterPortable, and cudaErrorMemoryAllocation."""


class _Segment:
    """Keys and values ``[B, Hkv, n, D(v)]`` of n slots, zeros at first, in memory that is pinned for a GPU.

    PyTorch's own pinned memory is not given back to the system, and takes powers of two.

    Raises:
        RuntimeError: where there is not so much memory, or it cannot be pinned.
    """

    def __init__(
        self, batch: int, heads: int, slots: int, dims: tuple[int, int], dtype: torch.dtype, device: torch.device
    ):
        self.keys, self.values = (_zeros((batch, heads, slots, dim), dtype) for dim in dims)
        if device.type == "cuda":
            for x in (self.keys, self.values):
                _pin(x, device)
                weakref.finalize(self, _unpin, x.data_ptr(), x, device).atexit = False


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in whole pages of the system, large ones where it has them: those are pinned much faster."""
    nbytes = max(1, math.prod(shape) * dtype.itemsize)
    # by default such memory is shared with forked processes, and in small pages
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    try:
        memory = mmap.mmap(-1, nbytes, **private)
    except (OSError, OverflowError) as error:
        raise RuntimeError(
            f"offload=True: {nbytes / 1e6:.0f} MB of host memory could not be allocated: {error}"
        ) from None
    with contextlib.suppress(AttributeError, OSError):  # not on every system
        memory.madvise(mmap.MADV_HUGEPAGE)
    with torch.inference_mode(False):
        return torch.frombuffer(memory, dtype=torch.uint8)[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _pin(x: Tensor, device: torch.device) -> None:
    """Pin memory for a GPU, and for others."""
    with torch.cuda.device(device):
        error = torch.cuda.cudart().cudaHostRegister(x.data_ptr(), x.nbytes, _PORTABLE)
        if not int(error):
            return
        with contextlib.suppress(RuntimeError):  # a launch raises the error, and so clears it
            torch.ones(1, device=device)
    reason = "too little is free; read fewer tokens" if int(error) == _OUT_OF_MEMORY else "read fewer tokens"
    raise RuntimeError(
        f"offload=True: {x.nbytes / 1e6:.0f} MB of host memory could not be pinned ({error}): {reason}, or leave "
        "offload out"
    )


def _unpin(address: int, kept: Tensor, device: torch.device) -> None:
    """Give pinned memory back, once nothing on the GPU reads it; ``kept`` is that memory."""
    torch.cuda.synchronize(device)
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(address)


class HostMemory:
    """Keys and values of a batch of sequences in host memory, slot for slot as a cache has them.

    It grows by whole segments, so that nothing is copied. A copy of it, or a pickle, has segments of its own.

    Args:
        batch, heads, dims: sequences, KV heads, and the dims of keys and values.
        page_size: slots of a page, which is within one segment.
        device: that reads the memory.
    """

    def __init__(
        self,
        batch: int,
        heads: int,
        dims: tuple[int, int],
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.batch, self.heads, self.dims, self.dtype, self.device = batch, heads, dims, dtype, device
        self.page_size = page_size
        self.slots = 0
        """Slots of a segment; the first ones decide."""
        self._segments: list[_Segment] = []
        self._addresses: Tensor | None = None
        self.pages = HostPages((), (), None)
        """The segments, as kernels take them."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(x.nbytes for one in self._segments for x in (one.keys, one.values))

    def reserve(self, slots: int) -> None:
        """Make room for at least ``slots`` slots of every sequence.

        Raises:
            RuntimeError: if the host has too little memory.
        """
        if not self.slots:
            page = self.batch * self.heads * sum(self.dims) * self.dtype.itemsize * self.page_size
            least = max(-(-slots // self.page_size), min(_LEAST_SLOTS // self.page_size, _LEAST_BYTES // page))
            self.slots = self.page_size * max(1, min(SEGMENT_BYTES // page, least))
        number = -(-slots // self.slots)
        if number <= len(self._segments):
            return
        self._segments += [self._new_segment() for _ in range(number - len(self._segments))]
        self._write_addresses()

    def _new_segment(self) -> _Segment:
        return _Segment(self.batch, self.heads, self.slots, self.dims, self.dtype, self.device)

    def _write_addresses(self) -> None:
        """Tell kernels where the segments are; in the same tensor, unless it has become too small."""
        number = len(self._segments)
        with torch.inference_mode(False):
            if self._addresses is None or self._addresses.shape[1] < number:
                self._addresses = torch.zeros(2, 2 * number, dtype=torch.int64, device=self.device)
            found = [[getattr(one, name).data_ptr() for one in self._segments] for name in ("keys", "values")]
            self._addresses[:, :number].copy_(torch.tensor(found))
        keys, values = (tuple(getattr(one, name) for one in self._segments) for name in ("keys", "values"))
        self.pages = HostPages(keys, values, self._addresses)

    def _parts(self, first: int, last: int) -> list[tuple[_Segment, slice, slice]]:
        """The segments of slots ``first .. last - 1``: which of their slots, and where these are among those."""
        parts = []
        for number in range(first // self.slots, -(-last // self.slots)):
            start = number * self.slots
            begin, end = max(first, start), min(last, start + self.slots)
            parts.append((self._segments[number], slice(begin - start, end - start), slice(begin - first, end - first)))
        return parts

    def write(self, row: int, first: int, k: Tensor, v: Tensor) -> None:
        """Write tokens ``[B', Hkv, n, D(v)]`` of sequences from ``row`` on to their slots from ``first`` on.

        From a GPU this does not wait: the present stream copies.
        """
        for segment, there, here in self._parts(first, first + k.shape[2]):
            for memory, x in ((segment.keys, k), (segment.values, v)):
                for b in range(len(x)):
                    _copy(memory[row + b, :, there], x[b, :, here])

    def read(self, first: int, last: int, row: int, keys: Tensor, values: Tensor) -> None:
        """Copy slots ``first .. last - 1`` of sequences from ``row`` on to the first of ``[B', Hkv, any, D(v)]``, as
        :meth:`write` does."""
        for segment, there, here in self._parts(first, last):
            for memory, x in ((segment.keys, keys), (segment.values, values)):
                for b in range(len(x)):
                    _copy(x[b, :, here], memory[row + b, :, there])

    def page(self, row: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[Hkv, last - first, D(v)]`` of one sequence, of slots within a page."""
        ((segment, there, _),) = self._parts(first, last)
        return segment.keys[row, :, there], segment.values[row, :, there]

    def take_rows(self, chosen: list[int]) -> None:
        """Replace the batch by its rows ``chosen``."""
        self.batch, self.pages = len(chosen), HostPages((), (), None)
        for number in range(len(self._segments)):  # the segment that is copied is freed before the next
            old, new = self._segments[number], self._new_segment()
            for place, row in enumerate(chosen):
                new.keys[place], new.values[place] = old.keys[row], old.values[row]
            self._segments[number] = new
            del old
        if self._segments:
            self._write_addresses()

    def __deepcopy__(self, memo: dict) -> HostMemory:
        made = memo[id(self)] = object.__new__(HostMemory)
        made.__setstate__(self.__getstate__())  # copies once, into the segments that stay
        return made

    def __getstate__(self) -> dict:
        tensors = [(one.keys, one.values) for one in self._segments]
        return self.__dict__ | {"_segments": tensors, "_addresses": None, "pages": HostPages((), (), None)}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        given, self._segments = self._segments, []
        self.reserve(len(given) * self.slots)
        for segment, (keys, values) in zip(self._segments, given):
            segment.keys.copy_(keys)
            segment.values.copy_(values)


def _copy(to: Tensor, x: Tensor) -> None:
    """Copy ``[Hkv, n, D]`` head by head where one side is on a GPU: such a piece is contiguous, and nobody waits."""
    if to.device == x.device:
        to.copy_(x)
        return
    for mine, its in zip(to, x):
        mine.copy_(its, non_blocking=True)
