"""Rotary positions (Su et al. 2021)."""

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Rotates the two halves of every head by the token's position.

    Args:
        dim: dimensions of a head, even.
        base: the longest wavelength is about ``2 pi * base`` tokens.
    """

    def __init__(self, dim: int, base: float = 10000.0):
        super().__init__()
        if dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, not {dim}")
        self.dim, self.base = dim, base

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, fp32 ``[B, L, D]``, of positions ``[B, L]``."""
        steps = torch.arange(0, self.dim, 2, device=positions.device, dtype=torch.float32)
        frequencies = self.base ** (-steps / self.dim)
        angles = positions[..., None].float() * frequencies
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Heads ``[B, H, L, D]`` rotated by :meth:`Rotary.angles`."""
    cos, sin = (angle[:, None] for angle in angles)
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    a, b = exact.chunk(2, -1)
    half = torch.cat([-b, a], -1)
    return (exact * cos + half * sin).to(x.dtype)
