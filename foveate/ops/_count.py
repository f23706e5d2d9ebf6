"""Counting what is read, on the device that reads it."""

from torch import Tensor


def tally(*counted: Tensor) -> None:
    """Add to a total, in place, the sum over the rows of the mean over the heads of its numbers.

    Args:
        counted: a total, fp64 ``[]``, and its numbers, ``[B, H]``; or those of two totals, one behind the other.
    """
    for total, numbers in zip(counted[::2], counted[1::2], strict=True):
        total += numbers.double().mean(1).sum()
