"""Where pages end: rules that cut a sequence into pages of different lengths (LuKA, "Dynamic Segmentation")."""

import random


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
