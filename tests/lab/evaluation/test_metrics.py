import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foveate.lab.evaluation import metrics

TEXT = st.text(alphabet="abc the.!, ", max_size=20)


def test_normalize():
    assert metrics.normalize("The  quick, brown fox's an apple!") == "quick brown foxs apple"
    assert metrics.normalize("the-end of a.n apple") == "theend of apple"  # punctuation goes first


@pytest.mark.parametrize(
    ("said", "answers", "paper", "strict", "f1"),
    [
        ("The Eiffel Tower.", ["Eiffel Tower"], 1, 1, 1),
        ("It is the Eiffel Tower", ["Eiffel Tower"], 1, 0, 2 * 2 / (4 + 2)),
        ("Eiffel", ["Eiffel Tower"], 1, 0, 2 * 1 / (1 + 2)),  # the prediction is contained in the answer
        ("Paris", ["Eiffel Tower"], 0, 0, 0),
        ("Paris", ["Eiffel Tower", "paris"], 1, 1, 1),
        ("the", ["Eiffel Tower"], 1, 0, 0),  # normalises to nothing: 1 as published
        ("", [], 0, 1, 1),  # unanswerable: 0 as published, right by SQuAD 2.0 if nothing is said
        ("Paris", [], 0, 0, 0),
    ],
)
def test_answers(said, answers, paper, strict, f1):
    assert metrics.contains_match(said, answers) == paper
    assert metrics.exact_match(said, answers) == strict
    assert metrics.f1(said, answers) == pytest.approx(f1)


@given(TEXT, st.lists(TEXT, max_size=3))
def test_metrics_agree_with_each_other(said, answers):
    strict, f1 = metrics.exact_match(said, answers), metrics.f1(said, answers)
    assert 0 <= strict <= f1 <= 1
    if answers and strict:
        assert metrics.contains_match(said, answers) == 1


def test_string_match_is_the_share_of_answers_said():
    assert metrics.string_match("it is 1234567.", ["1234567"]) == 1
    assert metrics.string_match("ABC", ["abc", "d"]) == 0.5


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    [(8, 8, 63.06, 100), (0, 8, 0, 36.94), (1, 1, 2.5, 100), (120, 200, 52.85, 66.85), (995, 1000, 98.84, 99.84)],
)
def test_the_interval_of_a_share_is_exact(hits, n, low, high):
    values = {"right": np.repeat([1.0, 0.0], [hits, n - hits])}
    found = metrics.estimate(metrics.Mean("right"), values)
    assert (found.value, found.low, found.high) == pytest.approx((100 * hits / n, low, high), abs=0.005)


@given(st.integers(1, 60), st.data())
def test_so_many_hits_or_more_are_as_rare_as_the_interval_says(n, data):
    hits = data.draw(st.integers(1, n))
    share = metrics.estimate(metrics.Mean("x"), {"x": np.repeat([1.0, 0.0], [hits, n - hits])}).low / 100
    tail = sum(math.comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(hits, n + 1))
    assert tail == pytest.approx(0.025)


def test_graded_values_have_the_interval_of_the_bootstrap():
    values = {"x": np.random.default_rng(3).random(400)}
    found = metrics.estimate(metrics.Mean("x"), values, seed=1, resamples=10_000)
    error = 100 * values["x"].std() / np.sqrt(400)
    assert (found.low, found.high) == pytest.approx((found.value - 1.96 * error, found.value + 1.96 * error), abs=0.2)
    assert found == metrics.estimate(metrics.Mean("x"), values, seed=1, resamples=10_000)
    ones = metrics.estimate(metrics.Mean("x", scale=1.0), {"x": np.ones(8)})
    assert (ones.low, ones.high) == (1, 1), "a number, such as of tokens, is no share of items"


def test_paired_interval_uses_the_same_items_on_both_sides():
    rng = np.random.default_rng(0)
    theirs = {"x": rng.random(400)}
    ours = {"x": theirs["x"] - 0.1}
    paired = metrics.paired_bootstrap(metrics.Mean("x"), ours, theirs)
    assert (paired.low, paired.value, paired.high) == pytest.approx((-10, -10, -10))
    shuffled = {"x": rng.permutation(ours["x"])}
    unpaired = metrics.paired_bootstrap(metrics.Mean("x"), shuffled, theirs)
    assert unpaired.value == pytest.approx(-10)
    assert unpaired.high - unpaired.low > 5
    with pytest.raises(ValueError, match="paired comparison of 400 with 3 items"):
        metrics.paired_bootstrap(metrics.Mean("x"), ours, {"x": np.ones(3)})


def test_resampling_in_blocks_covers_all_resamples(monkeypatch):
    values = {"x": np.arange(50.0)}
    whole = metrics.estimate(metrics.Mean("x"), values, resamples=3000)
    monkeypatch.setattr(metrics, "_BLOCK", 333)
    blocks = metrics.estimate(metrics.Mean("x"), values, resamples=3000)
    assert blocks == whole


def test_values_need_one_length():
    with pytest.raises(ValueError, match="positive length"):
        metrics.estimate(metrics.Mean("x"), {"x": np.ones(0)})
    assert metrics.columns([{"a": 1, "b": 2}, {"a": 3, "b": 4}])["b"].tolist() == [2, 4]
