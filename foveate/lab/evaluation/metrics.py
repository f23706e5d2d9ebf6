"""Answer metrics and their 95 % intervals: exact for shares of items, else by the bootstrap over items.

Answers are graded per item; a metric of a run is a function of the items' values (`Aggregate`).
"""

from __future__ import annotations

import functools
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_BLOCK = 4_000_000  # resampled values held at once
_TAIL = 0.025  # probability beyond each end of an interval

Values = Mapping[str, np.ndarray]
Aggregate = Callable[[Values], np.ndarray]
"""Takes item values, each `[..., n]`, and returns the metric `[...]`, reduced over the items."""


@dataclass(frozen=True)
class Mean:
    """The mean of one item value, times `scale` (100: a share in percent)."""

    key: str
    scale: float = 100.0

    def __call__(self, values: Values) -> np.ndarray:
        return self.scale * values[self.key].mean(axis=-1)


def normalize(text: str) -> str:
    """SQuAD's answer normalisation: lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """SQuAD 2.0's strict exact match, 0 or 1; an unanswerable question (no answers) asks for an empty prediction."""
    given = normalize(prediction)
    return float(any(given == normalize(answer) for answer in answers or [""]))


def f1(prediction: str, answers: Sequence[str]) -> float:
    """SQuAD 2.0's token F1 in 0..1, the best over the answers; 1 only for an empty prediction if there are none."""
    return max(token_f1(normalize(prediction).split(), normalize(answer).split()) for answer in answers or [""])


def token_f1(given: Sequence[str], gold: Sequence[str]) -> float:
    """The F1 of some tokens, 0..1; 1 if both are empty, and 0 if one is."""
    if not given or not gold:
        return float(given == gold)
    common = sum((Counter(given) & Counter(gold)).values())
    return 2 * common / (len(given) + len(gold))


def contains_match(prediction: str, answers: Sequence[str]) -> float:
    """The lenient match of LuKA's evaluation, 0 or 1: equal, or one contains the other, after normalisation.

    As published: unanswerable questions score 0 whatever is said, and a prediction that normalises to nothing scores 1
    on every answerable one (the empty string is contained in the answer).
    """
    given = normalize(prediction)
    return float(any(gold in given or given in gold for gold in map(normalize, answers)))


def string_match(prediction: str, answers: Sequence[str]) -> float:
    """RULER's string_match_all, 0..1: the share of the answers contained in the prediction, ignoring case."""
    said = prediction.lower()
    return sum(answer.lower() in said for answer in answers) / len(answers)


def string_match_part(prediction: str, answers: Sequence[str]) -> float:
    """RULER's string_match_part, 0 or 1: one of the answers is contained in the prediction, ignoring case."""
    return float(string_match(prediction, answers) > 0)


@dataclass(frozen=True)
class Interval:
    """A metric and its 95 % bounds, in the metric's own unit."""

    value: float
    low: float
    high: float


def estimate(aggregate: Aggregate, values: Values, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """A metric with its 95 % interval over the items, the last axis of `values`, each `[n]`.

    Exact (Clopper and Pearson's) for a share of items with value 1 where the others have 0; else by the percentile
    bootstrap, which resamples items with replacement.
    """
    n, of_items = _count(values), values.get(aggregate.key) if isinstance(aggregate, Mean) else None
    if of_items is not None and aggregate.scale == 100.0 and np.isin(of_items, (0.0, 1.0)).all():
        hits = int(of_items.sum())
        return Interval(float(aggregate(values)), 100 * _least_share(hits, n), 100 * (1 - _least_share(n - hits, n)))
    draws = _resampled(lambda index: aggregate(_take(values, index)), n, seed, resamples)
    return _interval(float(aggregate(values)), draws)


def paired_bootstrap(
    aggregate: Aggregate, ours: Values, theirs: Values, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """The difference `ours - theirs` of a metric on the same items, in the same order, with its 95 % interval.

    Each resample draws the same items for both sides. Raises ValueError if the sides differ in their number of items.
    """
    n = _count(ours)
    if n != _count(theirs):
        raise ValueError(f"paired comparison of {n} with {_count(theirs)} items")

    def difference(index: np.ndarray) -> np.ndarray:
        return aggregate(_take(ours, index)) - aggregate(_take(theirs, index))

    return _interval(float(aggregate(ours) - aggregate(theirs)), _resampled(difference, n, seed, resamples))


def columns(rows: Iterable[Mapping[str, float]]) -> dict[str, np.ndarray]:
    """Item values as arrays `[n]`, one per key, from one mapping per item."""
    rows = list(rows)
    return {key: np.array([row[key] for row in rows], dtype=np.float64) for key in (rows[0] if rows else ())}


def _count(values: Values) -> int:
    sizes = {array.shape[-1] for array in values.values()}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(f"item values need one common, positive length, got {sorted(sizes)}")
    return sizes.pop()


@functools.cache
def _least_share(hits: int, n: int) -> float:
    """The share of right items at which `hits` or more of `n` items are right with a probability of 2.5 %: Clopper and
    Pearson's lower bound, found by bisection."""
    if hits == 0:
        return 0.0
    log_factorial = np.concatenate([[0.0], np.log(np.arange(1, n + 1)).cumsum()])
    counts = np.arange(hits, n + 1)
    log_ways = log_factorial[n] - log_factorial[counts] - log_factorial[n - counts]
    low, high = 0.0, hits / n
    while low < (share := (low + high) / 2) < high:
        log_odds = counts * np.log(share) + (n - counts) * np.log1p(-share)
        low, high = (low, share) if np.exp(log_ways + log_odds).sum() > _TAIL else (share, high)
    return low


def _take(values: Values, index: np.ndarray) -> dict[str, np.ndarray]:
    return {key: array[index] for key, array in values.items()}


def _resampled(statistic: Callable[[np.ndarray], np.ndarray], n: int, seed: int, resamples: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    block = max(1, _BLOCK // n)
    parts = [
        statistic(rng.integers(0, n, size=(min(block, resamples - done), n))) for done in range(0, resamples, block)
    ]
    return np.concatenate(parts)


def _interval(value: float, draws: np.ndarray) -> Interval:
    low, high = np.percentile(draws, [100 * _TAIL, 100 * (1 - _TAIL)])
    return Interval(value, float(low), float(high))
