"""Counters of an attention layer, and :class:`Tally`, which adds the counts of many layers in few launches."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from foveate.ops import PromptHeads

_DTYPES = {"keys_read": torch.float64, "tokens_evicted": torch.float64}
"""Counters of every method that a captured step adds to, and their dtypes on the device."""


@dataclass
class BytesInUse:
    """The bytes that the layers of one cache hold together, now and at most so far."""

    bytes: int = 0
    peak: int = 0

    def change(self, by: int) -> None:
        """Add ``by`` bytes; negative when memory is released."""
        self.bytes += by
        self.peak = max(self.peak, self.bytes)


@dataclass
class Counters:
    """Counts of a layer's work since the last reset, from the sizes and masks of the keys that it actually read."""

    decode_steps: int = 0
    decode_rows: int = 0
    """Decode steps times rows."""
    keys_read: float | Tensor = 0.0
    """Keys read in decode, raw or summary, and the bytes scored to choose them, in keys: the mean over KV heads, summed
    over steps and rows."""
    keys_available: float = 0.0
    """Keys that dense attention would have read in the same steps and rows."""
    prompt_tokens: int = 0
    """Tokens of all prompts and rows, padding left out."""
    sequences: int = 0
    """Rows whose prompts were begun; a conversation's later turns are of the same sequence."""
    tokens_evicted: float | Tensor = 0
    """Tokens evicted: the mean over KV heads, summed over rows."""
    dense_steps: int = 0
    """Decode steps that were dense because the context was short."""
    prompt_heads: PromptHeads | None = None
    """Device, dtype and head dims of the last prompt's attention, by which the dense attention library is chosen."""
    bytes_per_key: int = 0
    """Bytes of a token's key and value over all KV heads."""
    resident_bytes: int = 0
    """Bytes that the layer's cache holds at present."""
    host_bytes: int = 0
    """Bytes of keys and values that it keeps in host memory."""
    held: BytesInUse = field(default_factory=BytesInUse, compare=False)
    """What all layers of that cache hold."""
    own: dict[str, float | Tensor] = field(default_factory=dict)
    """The method's own counters, by the names that it declares (``Method.counters``)."""

    def declare(self, names: Iterable[str]) -> Counters:
        """Add a method's own counters, at 0 unless they are there; returns self."""
        self.own = dict.fromkeys(names, 0.0) | self.own
        return self

    def take_over(self, made_with: Counters) -> Counters:
        """Count for a cache from now on, in the place of the counters that it was made with; returns self."""
        for name in ("bytes_per_key", "resident_bytes", "host_bytes", "held"):
            setattr(self, name, getattr(made_with, name))
        return self.declare(made_with.own)

    def reset(self) -> None:
        """Count from zero again."""
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, Tensor) and not value.is_inference():
                value.zero_()
            elif one.name not in ("bytes_per_key", "resident_bytes", "host_bytes", "held", "own"):
                setattr(self, one.name, one.default)
        for name, value in self.own.items():
            if isinstance(value, Tensor) and not value.is_inference():
                value.zero_()
            else:
                self.own[name] = 0.0

    def __getitem__(self, name: str) -> float | Tensor:
        """The counter of this name.

        Raises:
            KeyError: for a name that the method has not declared.
        """
        return vars(self)[name] if name in vars(self) else self.own[name]

    def add(self, name: str, number: float | Tensor) -> None:
        """Add to the counter of this name: in place if it is a tensor, so that a CUDA graph can count."""
        there = vars(self) if name in vars(self) else self.own
        counted = there[name]
        if not isinstance(number, Tensor) and not number:
            return
        if isinstance(counted, Tensor) and not counted.is_inference():
            counted += number
        else:
            there[name] = counted + number

    def count(self, name: str, number: float | Tensor, rows: int, tally: Tally | None) -> None:
        """Add to the counter of this name, at once or, if it is on the device, by the tally of a captured step.

        Args:
            number: a Python number for each of ``rows`` rows; or a tensor, see :meth:`Tally.add`.
        """
        if not isinstance(number, Tensor):
            number = float(number * rows)
        if tally is not None:
            total = self[name]
            if isinstance(total, Tensor) and not total.is_inference():
                tally.add(total, number)
                return
        self.add(name, over_rows(number) if isinstance(number, Tensor) and number.dim() else number)

    def count_step(self, rows: int, available: float) -> None:
        """Count a decode step of ``rows`` rows, in which dense attention would read ``available`` keys in all."""
        self.decode_steps += 1
        self.decode_rows += rows
        self.keys_available += available

    def on_device(self, device: torch.device) -> list[Tensor]:
        """Turn the counters that a captured step adds to into tensors on the device and return them.

        Their addresses stay the same from now on.
        """
        kept = []
        with torch.inference_mode(False):
            for name in (*_DTYPES, *self.own):
                value, dtype = self[name], _DTYPES.get(name, torch.float64)
                if not isinstance(value, Tensor):
                    value = torch.full((), value, dtype=dtype, device=device)
                elif value.is_inference() or value.device != device or value.dtype != dtype:
                    value = torch.empty((), dtype=dtype, device=device).copy_(value)
                (vars(self) if name in vars(self) else self.own)[name] = value
                kept.append(value)
        return kept

    def __deepcopy__(self, memo):  # copies of a cache count into the same counters
        return self


class LayerBytes:
    """The bytes that one layer holds on the device: its cache's channels, and the keys and values of its store.

    The layer's counters count these bytes, and :class:`BytesInUse` counts the bytes of all layers together.
    """

    def __init__(self):
        self.held = BytesInUse()
        """The bytes that all layers of the cache hold."""
        self.counters: Counters | None = None
        """The layer's counters; None before anything was counted."""
        self.channels, self.store = 0, 0

    def count_in(self, held: BytesInUse, channels: int, store: int) -> None:
        """Count what the layer holds, now and later, with the layers that share ``held``."""
        self.held, self.channels, self.store = held, channels, store
        held.change(channels + store)

    def note(self, store: int, channels: int | None = None) -> None:
        """Note the bytes of the store and of the channels now; None: of the channels as they were."""
        channels = self.channels if channels is None else channels
        self.held.change(channels + store - self.channels - self.store)
        self.channels, self.store = channels, store
        if self.counters is not None:
            self.counters.resident_bytes, self.counters.held = channels + store, self.held


class Tally:
    """Numbers that the layers of a step have counted, added to their totals at the end of the step in few launches."""

    def __init__(self):
        self._counted: list[tuple[Tensor, float | Tensor]] = []

    def add(self, total: Tensor, number: float | Tensor) -> None:
        """Note a number to be added to a total.

        Args:
            total: ``[]`` on the device.
            number: a Python number, a tensor ``[]``, or a tensor ``[B, H]``, which :func:`over_rows` reduces.
        """
        if isinstance(number, Tensor) or number:
            self._counted.append((total, number))

    def forget(self) -> None:
        """Discard what has been noted since the last :meth:`flush`."""
        self._counted.clear()

    def flush(self) -> None:
        """Add what has been noted to the totals, in place: one launch for each group of like shapes and dtypes."""
        alike: dict[Hashable, list[tuple[Tensor, float | Tensor]]] = {}
        turns: dict[Hashable, int] = {}  # one launch adds to each total once at most
        for total, number in self._counted:
            kind = (number.dtype, number.shape) if isinstance(number, Tensor) else None
            turns[id(total), kind] = turn = turns.get((id(total), kind), 0) + 1
            alike.setdefault((total.dtype, kind, turn), []).append((total, number))
        for counted in alike.values():
            totals, numbers = zip(*counted)
            if isinstance(numbers[0], Tensor):
                if numbers[0].dim():
                    numbers = over_rows(torch.stack(numbers)).unbind()
                numbers = [number.to(totals[0].dtype) for number in numbers]
            torch._foreach_add_(totals, numbers)
        self.forget()


def over_rows(numbers: Tensor) -> Tensor:
    """Mean over the heads, summed over the rows: ``[..., B, H]`` to fp64 ``[...]``."""
    return numbers.sum((-2, -1), dtype=torch.float64) / numbers.shape[-1]
