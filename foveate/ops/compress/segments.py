"""Where pages end: rules that cut a sequence into pages of different lengths (LuKA, "Dynamic Segmentation")."""

import random
from collections.abc import Sequence


def gaussian_ends(first_page: int, start: int, stop: int, mean: int, deviation: float, seed: int) -> list[int]:
    """Ends of pages whose lengths are drawn from N(mean, deviation), rounded and clipped to ``[mean / 4, 2 * mean]``.

    A page's length is a function of its number and the seed alone.

    Args:
        first_page: number of the first page to cut.
        start, stop: slots to cut up; a page that would end after ``stop`` is not made.

    Returns:
        The exclusive ends, ascending.
    """
    ends = []
    while True:
        length = round(random.Random(f"{seed}/{first_page + len(ends)}").gauss(mean, deviation))
        start += min(max(length, shortest(mean)), longest(mean))
        if start > stop:
            return ends
        ends.append(start)


def shortest(mean: int) -> int:
    """Fewest tokens of a page of random length."""
    return max(1, mean // 4)


def longest(mean: int) -> int:
    """Most tokens of a page of variable length."""
    return 2 * mean


def divergence_ends(divergence: Sequence[float], start: int, threshold: float, least: int, most: int) -> list[int]:
    """Ends of pages where the attention pattern turns to something else.

    A page ends before the first token whose divergence is above the threshold, once it has ``least`` tokens; at the
    latest after ``most``.

    Args:
        divergence: of each token from slot ``start`` on, nats.

    Returns:
        The exclusive ends, ascending; an open page at the end is not made.
    """
    ends, length = [], 0
    for index, turn in enumerate(divergence):
        if length >= most or (length >= least and turn > threshold):
            ends.append(start + index)
            length = 0
        length += 1
    return ends + ([start + len(divergence)] if length == most else [])
