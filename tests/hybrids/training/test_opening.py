"""Hold and release: by the clock, and by what the model recalls."""

import pytest

from foveate.hybrids.training.opening import READINGS, STAYS, Opening, far_recall
from foveate.hybrids.training.sparsity import SparsitySettings


def shares(opening, steps, readings=None):
    """Of the rows of each step, the share that is open; `readings` are taken after steps."""
    found = []
    for step in range(steps):
        found.append(opening.share)
        opening.step()
        if readings and step in readings:
            opening.read(readings[step])
    return found


def test_by_the_clock():
    opening = Opening(SparsitySettings(budget=6, hold=0.2, release=0.4), 10)
    assert shares(opening, 10) == [1, 1, *(pytest.approx(x) for x in (0.825, 0.65, 0.475, 0.3)), *4 * [STAYS]]
    assert not opening.failed
    assert opening.missed is None
    assert shares(Opening(SparsitySettings(budget=6, hold=0.2), 10), 10) == 2 * [1] + 8 * [0]
    assert not any(shares(Opening(SparsitySettings(budget=6), 10), 10))


def by_recall(**changes):
    return Opening(SparsitySettings(**({"budget": 6, "hold": 0.8, "release": 0.1, "recall": 50} | changes)), 20)


def test_the_hold_ends_after_readings_in_a_row_and_the_release_waits_while_recall_is_low():
    opening = by_recall()
    assert READINGS == 2
    found = shares(opening, 20, {2: 60, 3: 40, 4: 50, 5: 51, 6: 10, 9: 50})
    released = [pytest.approx(x) for x in [STAYS + (1 - STAYS) * x / 3 for x in (2, 1, 1, 1, 1)]]
    assert found == [1] * 6 + released + [STAYS] * 9
    assert opening.missed is None


def test_a_model_that_never_recalls_is_told_apart_at_once():
    opening = by_recall()
    shares(opening, 15, {3: 60, 8: 49})
    assert not opening.failed
    opening.step()
    assert opening.failed
    assert "in 16 steps of sparsity.hold far recall was not above sparsity.recall (50 %)" in opening.missed


def test_what_a_whole_run_has_missed():
    opening = by_recall()
    shares(opening, 20, {2: 60, 3: 60, 4: 10})
    assert opening.missed == "the release is not over: 42% of the rows are still open"
    forgot = by_recall()
    shares(forgot, 20, {2: 60, 3: 60, 19: 30})
    assert forgot.missed == "at the end far recall is 30 %; sparsity.recall asks for 50 %"


def test_it_goes_on_from_its_state():
    readings = {2: 60, 3: 60, 4: 10, 8: 70}
    whole = shares(by_recall(), 20, readings)
    for stop in range(1, 12):
        first, second = by_recall(), by_recall()
        begun = shares(first, stop, readings)
        second.load(first.state())
        assert begun + shares(second, 20 - stop, {step - stop: value for step, value in readings.items()}) == whole


def test_the_worse_of_needles_and_pairs_counts():
    answered = {"needles": {"far": {"right": 70.0}}, "recall": {"near": {"right": 1.0}, "far": {"right": 90.0}}}
    assert far_recall(answered | {"copies": {"far": {"right": 0.0}}}) == 70.0
    assert far_recall({"recall": answered["recall"]}) == 90.0


@pytest.mark.parametrize("recall", [0, 101])
def test_a_bound_is_a_percentage(recall):
    with pytest.raises(ValueError, match=r"sparsity.recall must be in \(0, 100\], with a sparsity.hold above 0"):
        SparsitySettings(budget=6, hold=0.5, recall=recall)
