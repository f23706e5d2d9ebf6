"""Where pages end: random lengths, and turns of the attention."""

import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foveate import ops
from foveate.ops.compress import segments

NAN, INF = float("nan"), float("inf")


def lengths(start, ends):
    return [after - before for before, after in itertools.pairwise([start, *ends])]


# Random lengths

means, deviations, seeds = st.integers(1, 40), st.sampled_from([0.01, 1.0, 5.0, 100.0]), st.integers(0, 5)


@given(means, deviations, seeds, st.integers(0, 9), st.integers(0, 7), st.integers(-5, 200))
def test_random_pages_fill_the_slots_from_the_first_on(mean, deviation, seed, first_page, start, span):
    ends = ops.gaussian_ends(first_page, start, start + span, mean, deviation, seed)
    assert all(segments.shortest(mean) <= length <= segments.longest(mean) for length in lengths(start, ends))
    assert all(end <= start + span for end in ends)
    open_page = start + span - (ends or [start])[-1]
    assert open_page < segments.longest(mean)  # or it would have been made
    further = ops.gaussian_ends(first_page, start, start + max(span, 0) + 2 * mean, mean, deviation, seed)
    assert further[: len(ends)] == ends
    assert further[len(ends)] > start + span


@given(means, deviations, seeds, st.lists(st.integers(0, 50), max_size=6))
def test_random_pages_do_not_depend_on_when_they_are_made(mean, deviation, seed, steps):
    stop, ends = 3, []
    for step in steps:
        stop += step
        ends += ops.gaussian_ends(len(ends), (ends or [3])[-1], stop, mean, deviation, seed)
    assert ends == ops.gaussian_ends(0, 3, stop, mean, deviation, seed)


def test_random_lengths_are_drawn_from_the_gaussian():
    drawn = lengths(0, ops.gaussian_ends(0, 0, 64 * 4000, 64, 10.0, 0))
    assert len(drawn) == pytest.approx(4000, abs=20)
    assert statistics.mean(drawn) == pytest.approx(64, abs=0.7)
    assert statistics.stdev(drawn) == pytest.approx(10, abs=0.5)
    within = sum(abs(length - 64) <= 10 for length in drawn) / len(drawn)
    assert within == pytest.approx(0.706, abs=0.03)  # of N(64, 10), with the half tokens that rounding adds
    assert drawn != lengths(0, ops.gaussian_ends(0, 0, 64 * 4000, 64, 10.0, 1))


def test_random_lengths_are_clipped_to_a_quarter_and_twice_the_mean():
    drawn = lengths(0, ops.gaussian_ends(0, 0, 20_000, 16, 100.0, 0))
    assert (min(drawn), max(drawn)) == (segments.shortest(16), segments.longest(16)) == (4, 32)
    assert (segments.shortest(1), segments.longest(1)) == (1, 2)
    assert (segments.shortest(7), segments.longest(7)) == (1, 14)


# Turns of the attention


def ends_by_hand(divergence, start, threshold, least, most):
    """Page after page: the first place from ``least`` tokens on that is a turn, but no later than ``most``."""
    ends, begin = [], 0
    while True:
        turns = [at for at in range(begin + least, begin + most) if at < len(divergence) and divergence[at] > threshold]
        end = turns[0] if turns else begin + most
        if end > len(divergence):
            return ends
        ends.append(start + end)
        begin = end


turning = st.lists(st.sampled_from([0.0, 0.5, 0.6, 3.0, INF]), max_size=60)
bounds = st.tuples(st.integers(1, 6), st.integers(1, 12)).map(lambda pair: (pair[0], pair[0] + pair[1] - 1))


@given(turning, st.integers(0, 9), bounds)
def test_pages_end_before_turns(divergence, start, bounds):
    ends = ops.divergence_ends(divergence, start, 0.5, *bounds)
    assert ends == ends_by_hand(divergence, start, 0.5, *bounds)
    assert all(bounds[0] <= length <= bounds[1] for length in lengths(start, ends))


@given(turning, bounds, st.lists(st.integers(0, 60), max_size=5))
def test_pages_between_turns_do_not_depend_on_when_they_are_made(divergence, bounds, stops):
    ends = []
    for stop in [*sorted(stops), len(divergence)]:
        begin = (ends or [0])[-1]
        ends += ops.divergence_ends(divergence[begin:stop], begin, 0.5, *bounds)
    assert ends == ops.divergence_ends(divergence, 0, 0.5, *bounds)


@pytest.mark.parametrize(
    ("divergence", "least", "most", "ends"),
    [
        ([], 1, 4, []),
        ([9.0], 1, 4, []),  # the page is open
        ([9.0, 9.0], 1, 4, [11]),
        ([0.0, 0.0, 9.0], 3, 4, []),  # too early for a turn
        ([0.0, 0.0, 9.0, 9.0], 3, 6, [13]),
        ([0.0, 0.0, 0.5, 0.0], 1, 6, []),  # a turn is above the threshold
        ([0.0, 0.0, 0.50001, 0.0], 1, 6, [12]),
        ([0.0] * 4, 1, 4, [14]),  # full, though nothing has come after it
        ([0.0] * 9, 1, 4, [14, 18]),
        ([9.0] * 3, 1, 1, [11, 12, 13]),
        ([0.0, NAN, 0.0, NAN], 1, 9, []),  # no turn
    ],
)
def test_ends_of_particular_turns(divergence, least, most, ends):
    assert ops.divergence_ends(divergence, 10, 0.5, least, most) == ends
