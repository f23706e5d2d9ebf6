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
