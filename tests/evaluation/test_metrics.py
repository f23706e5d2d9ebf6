import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foveate.evaluation import metrics

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


def test_interval_of_a_share_is_that_of_the_binomial():
    values = {"right": np.repeat([1.0, 0.0], [120, 80])}
    interval = metrics.bootstrap(metrics.mean("right"), values, seed=1, resamples=10_000)
    error = 100 * np.sqrt(0.6 * 0.4 / 200)
    assert interval.value == pytest.approx(60)
    assert interval.low == pytest.approx(60 - 1.96 * error, abs=0.6)
    assert interval.high == pytest.approx(60 + 1.96 * error, abs=0.6)
    assert interval == metrics.bootstrap(metrics.mean("right"), values, seed=1, resamples=10_000)


def test_paired_interval_uses_the_same_items_on_both_sides():
    rng = np.random.default_rng(0)
    theirs = {"x": rng.random(400)}
    ours = {"x": theirs["x"] - 0.1}
    paired = metrics.paired_bootstrap(metrics.mean("x"), ours, theirs)
    assert (paired.low, paired.value, paired.high) == pytest.approx((-10, -10, -10))
    shuffled = {"x": rng.permutation(ours["x"])}
    unpaired = metrics.paired_bootstrap(metrics.mean("x"), shuffled, theirs)
    assert unpaired.value == pytest.approx(-10)
    assert unpaired.high - unpaired.low > 5
    with pytest.raises(ValueError, match="paired comparison of 400 with 3 items"):
        metrics.paired_bootstrap(metrics.mean("x"), ours, {"x": np.ones(3)})


def test_resampling_in_blocks_covers_all_resamples(monkeypatch):
    values = {"x": np.arange(50.0)}
    whole = metrics.bootstrap(metrics.mean("x"), values, resamples=3000)
    monkeypatch.setattr(metrics, "_BLOCK", 333)
    blocks = metrics.bootstrap(metrics.mean("x"), values, resamples=3000)
    assert blocks == whole


def test_values_need_one_length():
    with pytest.raises(ValueError, match="positive length"):
        metrics.bootstrap(metrics.mean("x"), {"x": np.ones(0)})
    assert metrics.columns([{"a": 1, "b": 2}, {"a": 3, "b": 4}])["b"].tolist() == [2, 4]
