"""The rotation of a layer's queries and keys by the positions of their tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rotary:
    """The rotary positions of one layer (Su et al. 2021), as its model applies them.

    Pair i of the first R dimensions of a head turns by ``position * inv_freq[i]`` radians, and its length is multiplied
    by ``factor``. The other dimensions stay as they are. All results are fp32.

    Args:
        inv_freq: fp32 ``[R / 2]``; ``[0]`` for a layer without positions.
        factor: the scale of YaRN and LongRoPE.
        neighbours: True if a pair is two neighbouring dimensions (Cohere, GLM), False if it is the dimensions i and
            i + R / 2.
        later: for a model that switches frequencies at some position (LongRoPE): this position, and the frequencies
            from it on, fp32 ``[R / 2]``. Only :meth:`mean` uses them, because ``inv_freq`` holds the frequencies of the
            present prompt.
    """

    inv_freq: Tensor
    factor: float = 1.0
    neighbours: bool = False
    later: tuple[int, Tensor] | None = None

    def apply(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate queries or keys.

        Args:
            x: ``[..., D]``.
            positions: int, broadcastable to ``x.shape[:-1]``.
        """
        angles = self._angles(positions, x)
        return self._turned(x.float(), angles.cos() * self.factor, angles.sin() * self.factor)

    def remove(self, x: Tensor, positions: Tensor) -> Tensor:
        """Undo the rotation of queries or keys: the inverse of :meth:`apply`, with the same arguments."""
        angles = self._angles(positions, x)
        return self._turned(x.float(), angles.cos() / self.factor, -angles.sin() / self.factor)

    def mean(self, x: Tensor, first: int, number: int) -> Tensor:
        """Vectors ``x [..., D]`` multiplied by the mean R of the rotations at the ``number`` positions from ``first``
        on.

        For a covariance C, ``mean(mean(C).mT)`` is ``R C R^T``.
        """
        positions = torch.arange(first, first + number, device=x.device)
        angles = self._angles(positions, x)
        if self.later is not None:
            start, frequencies = self.later
            beyond = positions[:, None].float() * frequencies.to(x.device)
            angles = torch.where(positions[:, None] >= start, beyond, angles)
        return self._turned(x.float(), angles.cos().mean(0) * self.factor, angles.sin().mean(0) * self.factor)

    def _angles(self, positions: Tensor, x: Tensor) -> Tensor:
        return positions[..., None].float() * self.inv_freq.to(x.device, torch.float32)

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = cos.shape[-1]
        width = 2 * half
        pair = (slice(0, width, 2), slice(1, width, 2)) if self.neighbours else (slice(half), slice(half, width))
        a, b = (x[..., one] for one in pair)
        turned = (a * cos - b * sin, b * cos + a * sin)
        turned = torch.stack(turned, -1).flatten(-2) if self.neighbours else torch.cat(turned, -1)
        return torch.cat([turned, x[..., width:].expand(*turned.shape[:-1], -1)], -1)
