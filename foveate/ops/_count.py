"""Counting what is read, on the device that reads it."""

from torch import Tensor


def tally(total: Tensor, numbers: Tensor) -> None:
    """Add to ``total``, in place, the sum over the rows of the mean over the heads.

    Args:
        total: fp64 ``[]``.
        numbers: ``[B, H]``.
    """
    total += numbers.double().mean(1).sum()
