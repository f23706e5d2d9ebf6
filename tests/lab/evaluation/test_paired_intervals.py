"""Paired differences: the exact interval covers, is never empty, and goes where the bootstrap stays."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foveate.lab.evaluation import paired
from foveate.lab.evaluation.metrics import Interval, Mean, paired_bootstrap

OUTCOMES = st.integers(1, 80).flatmap(
    lambda n: st.integers(0, n).flatmap(lambda won: st.tuples(st.just(n), st.just(won), st.integers(0, n - won)))
)


@pytest.mark.parametrize("n", [1, 4, 12, 25])
def test_the_exact_interval_covers_with_95_percent_whatever_the_shares(n):
    """Not by simulation: the probabilities of all outcomes are added up."""
    outcomes = [(won, lost) for won in range(n + 1) for lost in range(n + 1 - won)]
    found = [paired.exact(n, *one) for one in outcomes]
    low, high = (np.array([getattr(one, name) / 100 for one in found]) for name in ("low", "high"))
    counts = np.array([(won, lost, n - won - lost) for won, lost in outcomes])
    factorial = np.concatenate([[0.0], np.log(np.arange(1, n + 1)).cumsum()])
    ways = factorial[n] - factorial[counts].sum(axis=1)
    rng = np.random.default_rng(0)
    for shares in np.concatenate([rng.dirichlet([0.5] * 3, 300), rng.dirichlet([0.3, 0.3, 3.0], 300)]):
        shares = np.maximum(shares, 1e-12)
        probability, truth = np.exp(ways + counts @ np.log(shares)), shares[0] - shares[1]
        assert probability[low > truth + 1e-6].sum() <= 0.0251
        assert probability[high < truth - 1e-6].sum() <= 0.0251


@pytest.mark.parametrize(("n", "won", "lost"), [(100, 0.02, 0.05), (300, 0.0, 0.01), (1000, 0.01, 0.01)])
def test_the_exact_interval_covers_in_simulation(n, won, lost):
    drawn = np.random.default_rng(1).multinomial(n, [won, lost, 1 - won - lost], size=400)
    found = [paired.exact(n, int(ours), int(theirs)) for ours, theirs, _ in drawn]
    assert np.mean([one.low <= 100 * (won - lost) <= one.high for one in found]) >= 0.945


@settings(max_examples=60, deadline=None)
@given(OUTCOMES)
def test_the_exact_interval_holds_the_difference_is_never_empty_and_has_no_favourite(outcome):
    n, won, lost = outcome
    found = paired.exact(n, won, lost)
    assert -100 <= found.low <= found.value <= found.high <= 100
    assert found.high - found.low > 0.5 * paired.least_loss(n)
    other = paired.exact(n, lost, won)
    assert (other.low, other.value, other.high) == pytest.approx((-found.high, -found.value, -found.low))


@settings(max_examples=40, deadline=None)
@given(OUTCOMES)
def test_the_tail_is_that_of_its_outcomes(outcome):
    """By summing the outcomes one by one; and it rises with the share won, and falls with the share lost."""
    n, won, lost = outcome
    tail = paired._Tail(n, won, lost)
    ours, theirs = np.array([0.1, 0.2, 0.1, 0.0, 0.45]), np.array([0.2, 0.2, 0.1, 0.1, 0.55])
    size, z = n + 2, 1.959964
    limit = (won - lost) - z * np.sqrt(won + lost + 1 - (won - lost) ** 2 / size)
    factorial = np.concatenate([[0.0], np.log(np.arange(1, n + 1)).cumsum()])
    for p, q, got in zip(ours, theirs, tail(ours, theirs)):
        expected = 0.0
        for b in range(n + 1):
            for c in range(n + 1 - b):
                if (b - c) - z * np.sqrt(b + c + 1 - (b - c) ** 2 / size) >= limit - 1e-9:
                    log = factorial[n] - factorial[b] - factorial[c] - factorial[n - b - c]
                    for share, count in ((p, b), (q, c), (1 - p - q, n - b - c)):
                        log += count * np.log(max(share, 1e-300))
                    expected += np.exp(log)
        assert got >= expected - 1e-6, "outcomes may be added, which keeps the limit exact"
    assert (tail(ours + 0.0, theirs * 0.5) >= tail(ours, theirs) - 1e-9).all()


@pytest.mark.parametrize(("n", "least"), [(4, -60.2), (12, -26.5), (100, -3.6), (368, -0.997)])
def test_where_no_pair_differs_the_ends_are_those_of_no_loss_among_the_items(n, least):
    assert paired.exact(n, 0, 0).low == pytest.approx(least, abs=0.05)
    assert paired.exact(n, 0, 0).low == pytest.approx(-paired.least_loss(n), abs=1e-3)


def test_the_least_items_are_those_at_which_no_loss_is_within():
    for loss in (0.5, 1.0, 2.0, 5.0, 80.0):
        n = paired.least_items(loss)
        assert paired.least_loss(n) <= loss
        assert n == 1 or paired.least_loss(n - 1) > loss
    assert (paired.least_items(1.0), paired.least_items(100.0)) == (368, 1)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40), st.randoms())
@settings(max_examples=40, deadline=None)
def test_the_order_of_items_changes_nothing(pairs, random):
    def of(some):
        ours, theirs = np.array(some, dtype=np.float64).T
        return paired.paired(Mean("x"), {"x": ours}, {"x": theirs})

    moved = list(pairs)
    random.shuffle(moved)
    assert of(pairs) == of(moved)


def test_other_values_have_the_bootstrap_which_few_pairs_widen():
    theirs = np.random.default_rng(0).random(60)
    many, few = theirs * 0.9, theirs.copy()
    few[0] *= 0.5
    aggregate, theirs = Mean("f1"), {"f1": theirs}
    assert paired.paired(aggregate, {"f1": many}, theirs) == paired_bootstrap(aggregate, {"f1": many}, theirs)
    found = paired.paired(aggregate, {"f1": few}, theirs)
    assert found.low == pytest.approx(found.value - paired.least_loss(60))
    nats = Mean("f1", 1.0)
    assert paired.paired(nats, {"f1": few}, theirs) == paired_bootstrap(nats, {"f1": few}, theirs)
    beyond = {"f1": np.ones(paired.MOST_EXACT + 1)}
    assert paired.discordant(aggregate, beyond, beyond) is None
    with pytest.raises(ValueError, match="paired comparison of 1 with 60 items"):
        paired.paired(aggregate, {"f1": np.ones(1)}, theirs)


@pytest.mark.parametrize("counts", [(0, 0, 0), (3, 2, 2), (3, -1, 0)])
def test_counts_that_cannot_be_are_refused(counts):
    with pytest.raises(ValueError, match="cannot differ"):
        paired.exact(*counts)


def test_the_items_needed():
    nothing = paired.exact(12, 0, 0)
    assert paired.items_needed(nothing, 12, 1.0, 0.0) == 370
    assert paired.items_needed(Interval(-1.0, -3.0, 1.0), 100, 1.0, None) is None
    assert paired.items_needed(Interval(-0.5, -3.0, 2.0), 100, 1.0, None) == 2500
    n = paired.items_needed(paired.exact(100, 2, 2), 100, 1.0, 0.04)
    assert paired.exact(min(n, 5000), round(0.02 * n), round(0.02 * n)).low == pytest.approx(-1.0, abs=0.1)
