"""The difference between two methods on the same items, with a 95 % interval that is exact where items are right or
wrong.

The bootstrap resamples the pairs that were seen. If no pair differs, each resample has a difference of zero, and its
interval is [0, 0] at any number of items. The exact interval shows what this number of items can prove.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from foveate.lab.evaluation.metrics import Aggregate, Interval, Mean, Values, paired_bootstrap

MOST_EXACT = 1000
"""Items up to which intervals are exact. With more the bootstrap is close, and where no pair differs a limit is below
0.4 points."""
_FEW = 10  # pairs that differ, below which a bootstrap is widened
_TAIL = 0.025  # probability beyond each end of an interval
_Z = 1.959964  # standard deviations of a normal distribution beyond which that probability lies
_SMALLEST = 1e-300  # stands for probability zero, which has no logarithm


def paired(aggregate: Aggregate, ours: Values, theirs: Values, seed: int = 0) -> Interval:
    """The difference `ours - theirs` of a metric on the same items, in the same order, with its 95 % interval.

    The interval is exact (:func:`exact`) for the mean of up to `MOST_EXACT` items whose values are 0 or 1. Otherwise it
    is the paired bootstrap's, :func:`widened` where few pairs differ.

    Args:
        ours: item values, each `[n]`.
        theirs: the same items' values of the other side.
        seed: of the bootstrap.

    Returns:
        The difference and its ends, in the metric's unit.

    Raises:
        ValueError: if the sides differ in their number of items.
    """
    counts = discordant(aggregate, ours, theirs)
    if counts is not None:
        return exact(*counts)
    return widened(paired_bootstrap(aggregate, ours, theirs, seed), aggregate, ours, theirs)


def discordant(aggregate: Aggregate, ours: Values, theirs: Values) -> tuple[int, int, int] | None:
    """How many pairs there are, and in how many of them either side alone is right; None where :func:`exact` does not
    apply."""
    sides = _of_shares(aggregate, ours, theirs)
    if sides is None or sides.shape[1] > MOST_EXACT or not np.isin(sides, (0.0, 1.0)).all():
        return None
    left, right = sides
    return left.size, int((left > right).sum()), int((left < right).sum())


def widened(difference: Interval, aggregate: Aggregate, ours: Values, theirs: Values) -> Interval:
    """A bootstrap's interval, but where fewer than ten pairs differ no narrower than by what none of the items shows.

    Resampled pairs cannot hold a loss that no item shows. A loss of a whole item that has a share of
    :func:`least_loss` among all items stays unseen with a probability of 2.5 %. Metrics other than means of values
    between 0 and 1 are left as they are.
    """
    sides = _of_shares(aggregate, ours, theirs)
    if sides is None or (sides[0] != sides[1]).sum() >= _FEW:
        return difference
    unseen = least_loss(sides.shape[1])
    low, high = difference.value - unseen, difference.value + unseen
    return Interval(difference.value, max(-100.0, min(low, difference.low)), min(100.0, max(high, difference.high)))


def spread(aggregate: Aggregate, ours: Values, theirs: Values) -> float | None:
    """The mean squared difference of pairs, 0 to 1; None for metrics other than means of values between 0 and 1."""
    sides = _of_shares(aggregate, ours, theirs)
    return None if sides is None else float(((sides[0] - sides[1]) ** 2).mean())


def _of_shares(aggregate: Aggregate, ours: Values, theirs: Values) -> np.ndarray | None:
    """The item values of a mean, in percent, of values between 0 and 1: both sides, `[2, n]`; None of other metrics."""
    if not isinstance(aggregate, Mean) or aggregate.scale != 100.0:
        return None
    left, right = ours[aggregate.key], theirs[aggregate.key]
    if len(left) != len(right) or not len(left):
        return None
    sides = np.stack([left, right])
    return sides if sides.min() >= 0 and sides.max() <= 1 else None


def exact(n: int, won: int, lost: int) -> Interval:
    """The exact 95 % interval of a difference between two shares of the same items, in points (-100 to 100).

    Its ends are exact one-sided limits, each at 97.5 %, by the method of Lloyd and Moldovan (Statistics in Medicine
    26:3369, 2007). Outcomes are ordered by the adjusted Wald limit of Agresti and Min (Statistics in Medicine 24:729,
    2005). The lower end is the smallest difference at which, for some share of differing pairs, the outcomes at least
    as high in that order have a probability above 2.5 %. If no pair differs, the lower end is Clopper and Pearson's for
    no loss among `n` items: -26.5 points at 12, -3.6 at 100 and -1 at 368.

    Args:
        n: items.
        won: items that the first side alone has right.
        lost: items that the second side alone has right.

    Raises:
        ValueError: for counts below zero, or more pairs that differ than items.
    """
    if min(won, lost) < 0 or not 0 < n >= won + lost:
        raise ValueError(f"{won} and {lost} of {n} pairs cannot differ")
    value = 100 * (won - lost) / n
    return Interval(value, min(value, 100 * _lower(n, won, lost)), max(value, -100 * _lower(n, lost, won)))


def least_items(loss: float) -> int:
    """Items that show a loss of at most `loss` points (above 0) where no pair differs; with fewer nothing shows it."""
    return 1 if loss >= 100 else math.ceil(math.log(_TAIL) / math.log1p(-loss / 100) - 1e-9)


def least_loss(n: int) -> float:
    """The smallest loss, in points, that `n` items can show: where no pair differs."""
    return 100 * (1 - _TAIL ** (1 / n))


def items_needed(difference: Interval, n: int, loss: float, squares: float | None) -> int | None:
    """Roughly how many items would show a loss of at most `loss` points, if differences go on as measured.

    Args:
        difference: as measured on `n` items, in points.
        squares: of :func:`spread`; None for other metrics, whose intervals become narrower as the root of `n` grows.

    Returns:
        A number with two digits, rounded up; None where the measured loss is `loss` or more.
    """
    room = (difference.value + loss) / 100
    if room <= 0:
        return None
    if squares is None:
        wanted = n * ((difference.value - difference.low) / (100 * room)) ** 2
    else:  # the score limit: the variance of pairs is that under the loss
        wanted = _Z**2 * (squares + room) / room**2 if squares else 0.0
    wanted = max(wanted, least_items(loss))
    unit = 10 ** max(0, math.floor(math.log10(wanted)) - 1)
    return math.ceil(wanted / unit - 1e-9) * unit


@functools.lru_cache(maxsize=4096)
def _lower(n: int, won: int, lost: int) -> float:
    """The lower limit of the share won less the share lost, -1 to 1: the smallest difference with a tail above 2.5 %.

    It is looked for over the share of pairs that differ, and where nothing is won, which is a corner of that search.
    """
    tail, low, high = _Tail(n, won, lost), 0.0, 1.0
    angle = math.asin(math.sqrt((won + lost) / n))
    near = np.clip(angle + np.linspace(-2, 3, 16) / math.sqrt(n), 0, math.pi / 2)
    angles = np.unique(np.concatenate([np.linspace(0, math.pi / 2, 29), near]))
    found = _smallest(tail, np.sin(angles) ** 2, 10)
    best = np.argsort(found, kind="stable")[:3]
    finer = [np.linspace(angles[max(one - 1, 0)], angles[min(one + 1, len(angles) - 1)], 7) for one in best]
    finer = np.unique(np.concatenate([angles[best], *finer]))
    smallest, nothing = float(_smallest(tail, np.sin(finer) ** 2, 22).min()), np.zeros(1)
    if tail(nothing, nothing)[0] <= _TAIL:
        return smallest
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(nothing, nothing + middle)[0] > _TAIL else (low, middle)
    return min(-high, smallest)


def _smallest(tail: _Tail, differ: np.ndarray, steps: int) -> np.ndarray:
    """The smallest difference for each share that differs `[G]`, by bisection of the share won among these pairs; 1
    where there is none."""
    weights = tail.weights(differ)
    low, high = np.zeros_like(differ), np.ones_like(differ)
    possible = tail.weighted(weights, high) > _TAIL
    for _ in range(steps):
        middle = (low + high) / 2
        above = tail.weighted(weights, middle) > _TAIL
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return np.where(possible, (2 * low - 1) * differ, 1.0)


class _Tail:
    """The probability of all outcomes at least as high as an outcome that was seen, by the shares won and lost.

    Among `m` pairs that differ, at least `least[m]` must be won. `least` rises by 0 or 1 with `m`. The probability
    therefore rises with the share won and falls with the share lost, and follows from the probability for one pair
    fewer.
    """

    def __init__(self, n: int, won: int, lost: int):
        pairs, size = np.arange(n + 1), n + 2
        limit = (won - lost) - _Z * math.sqrt(won + lost + 1 - (won - lost) ** 2 / size)
        curve = 1 + _Z**2 / size
        inside = np.maximum(limit**2 - curve * (limit**2 - _Z**2 * (pairs + 1)), 0)
        least = np.ceil((pairs + np.maximum((limit + np.sqrt(inside)) / curve, limit)) / 2 - 1e-9)
        least = np.clip(least, 0, pairs + 1).astype(np.int64)
        least[won + lost] = min(least[won + lost], won)
        least = np.minimum.accumulate(least - pairs) + pairs  # no step above 1
        least = np.minimum.accumulate(least[::-1])[::-1]  # no step below 0
        log_factorial = np.concatenate([[0.0], np.log(np.arange(1, n + 1)).cumsum()])
        self._pairs, self._n, self._first = pairs, n, float(least[0] == 0)
        self._log_ways = log_factorial[n] - log_factorial - log_factorial[::-1]
        self._rises = np.diff(least) == 1  # [n]: from m to m + 1 pairs
        self._edge = np.where(self._rises, least[:-1], least[:-1] - 1)  # wins whose probability is added or taken away
        self._possible = (self._edge >= 0) & (self._edge <= pairs[:-1])
        edge = np.clip(self._edge, 0, pairs[:-1])
        self._edge_ways = log_factorial[:-1] - log_factorial[edge] - log_factorial[pairs[:-1] - edge]

    def __call__(self, won: np.ndarray, lost: np.ndarray) -> np.ndarray:
        """Probabilities `[G]` for shares won and lost, each `[G]`."""
        differ = won + lost
        share = np.divide(won, differ, out=np.full_like(differ, 0.5), where=differ > 0)
        return self.weighted(self.weights(differ), share)

    def weights(self, differ: np.ndarray) -> np.ndarray:
        """The probability of each number of pairs that differ, `[G, n + 1]`, by their share `[G]`."""
        log_differ = np.log(np.maximum(differ, _SMALLEST))[:, None]
        log_same = np.log(np.maximum(1 - differ, _SMALLEST))[:, None]
        return np.exp(self._log_ways + self._pairs * log_differ + (self._n - self._pairs) * log_same)

    def weighted(self, weights: np.ndarray, share: np.ndarray) -> np.ndarray:
        """Probabilities `[G]` for :meth:`weights` and the share won of the pairs that differ, `[G]`."""
        share = share[:, None]
        log_share, log_other = np.log(np.maximum(share, _SMALLEST)), np.log(np.maximum(1 - share, _SMALLEST))
        at_edge = np.exp(self._edge_ways + self._edge * log_share + (self._pairs[:-1] - self._edge) * log_other)
        change = np.where(self._rises, share - 1, share) * at_edge * self._possible
        of_pairs = np.concatenate([np.zeros_like(share), change.cumsum(axis=1)], axis=1) + self._first
        return (weights * of_pairs).sum(axis=1)
