"""What a layer counts while it runs, and the sums of a decode step that wait on the device."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from foveate.ops import PromptHeads


@dataclass
class Counters:
    """What a layer did since the last reset. Numbers come from the sizes and masks of what was really read."""

    decode_steps: int = 0
    decode_rows: int = 0
    keys_read: float | Tensor = 0.0
    keys_available: float = 0.0
    prompt_tokens: int = 0
    tokens_evicted: int | Tensor = 0
    pages_refined: float | Tensor = 0.0
    mass_read: float | Tensor = 0.0
    """Share of the attention that the keys read hold by a method's own estimate, 0 to 1, summed over steps and rows."""
    indices_reused: int = 0
    dense_steps: int = 0
    selections_capped: int | Tensor = 0
    prompt_heads: PromptHeads | None = None
    """What the last prompt was attended to with."""
    bytes_per_key: int = 0
    resident_bytes: int = 0

    def reset(self) -> None:
        """Count from zero again."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor) and not value.is_inference():
                value.zero_()
            elif field.name not in ("bytes_per_key", "resident_bytes"):
                setattr(self, field.name, field.default)

    def add(self, name: str, number: float | Tensor) -> None:
        """Count more of something: in place, where a device counts, so that a graph of steps can count too."""
        counted = getattr(self, name)
        if not isinstance(number, Tensor) and not number:
            return
        if isinstance(counted, Tensor) and not counted.is_inference():
            counted += number
        else:
            setattr(self, name, counted + number)

    def count_steps(self, steps: int, rows: int, available: float) -> None:
        """Decode steps of a batch of so many rows, in which dense attention would read so many keys in all."""
        self.decode_steps += steps
        self.decode_rows += steps * rows
        self.keys_available += available

    def on_device(self, device: torch.device) -> list[Tensor]:
        """Keep what a device counts in tensors there, which stay the same from now on, and return them."""
        kept = []
        with torch.inference_mode(False):
            for name in ("keys_read", "pages_refined", "mass_read", "tokens_evicted", "selections_capped"):
                value = getattr(self, name)
                dtype = torch.float64 if name in ("keys_read", "pages_refined", "mass_read") else torch.int64
                if not isinstance(value, Tensor):
                    value = torch.full((), value, dtype=dtype, device=device)
                elif value.is_inference() or value.device != device or value.dtype != dtype:
                    value = torch.empty((), dtype=dtype, device=device).copy_(value)
                setattr(self, name, value)
                kept.append(value)
        return kept

    def __deepcopy__(self, memo):  # one layer counts for every copy of its cache
        return self


class Tally:
    """What the layers of a step count on the device: added to the totals of all of them at once, at its end."""

    def __init__(self):
        self._counted: list[tuple[Tensor, float | Tensor]] = []

    def add(self, total: Tensor, number: float | Tensor) -> None:
        """Count more of something.

        Args:
            total: ``[]``.
            number: a number of the host; ``[]``; or ``[B, H]``: the sum over the rows of the mean over the heads.
        """
        if isinstance(number, Tensor) or number:
            self._counted.append((total, number))

    def forget(self) -> None:
        """Leave out what has been counted since the last step."""
        self._counted.clear()

    def flush(self) -> None:
        """Add it, in place."""
        alike: dict[Hashable, list[tuple[Tensor, float | Tensor]]] = {}
        turns: dict[Hashable, int] = {}  # what is added at once goes to different totals
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
    """Sums over the rows of the means over the heads, ``[..., B, H]`` to fp64 ``[...]``."""
    return numbers.sum((-2, -1), dtype=torch.float64) / numbers.shape[-1]
