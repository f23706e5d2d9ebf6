"""Combinations of parameters of which every few meet."""

import itertools

import pytest

from tests.combinations import covering, every_pair, in_turn


@pytest.mark.parametrize("sizes", [(3,), (2, 2), (3, 7, 5), (3, 6, 2, 4, 4)])
@pytest.mark.parametrize("strength", [2, 3])
def test_all_values_of_any_few_parameters_meet(sizes, strength):
    found = covering(sizes, strength)
    for some in itertools.combinations(range(len(sizes)), min(strength, len(sizes))):
        met = {tuple(one[place] for place in some) for one in found}
        assert met == set(itertools.product(*(range(sizes[place]) for place in some)))
    everything = len(list(itertools.product(*map(range, sizes))))
    assert len(set(found)) == len(found) <= everything
    assert len(sizes) <= strength or len(found) < 0.7 * everything


def test_a_test_is_parametrised_by_names_and_by_tuples_of_names():
    mark = every_pair((("dim", "value_dim"), [(64, 64), (192, 128)]), ("page", [1, 16]))
    names, cases = mark.args
    assert names == ["dim", "value_dim", "page"]
    assert cases == [(64, 64, 1), (64, 64, 16), (192, 128, 1), (192, 128, 16)]
    assert mark.kwargs["ids"] == ["64-64-1", "64-64-16", "192-128-1", "192-128-16"]


def test_cases_may_be_added():
    mark = every_pair(
        ("dim", [64, 128]), ("masked", [False, True]), ("paged", [False, True]), besides=[(128, True, True)]
    )
    cases = mark.args[1]
    assert cases[:-1] == every_pair(("dim", [64, 128]), ("masked", [False, True]), ("paged", [False, True])).args[1]
    assert len(cases) == 5
    assert mark.kwargs["ids"][-1] == "128-True-True"


def test_values_meet_in_turn():
    names, cases = in_turn(("method", "abcde"), ("padded", [False, True]), ("family", ["x", "y"])).args
    assert names == ["method", "padded", "family"]
    assert [method for method, *_ in cases] == list("abcde")
    assert {(padded, family) for _, padded, family in cases} == set(itertools.product([False, True], "xy"))
