"""The verdict: what it recommends, what it leaves open, and what it never says."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foveate.lab.evaluation import paired, verdict


def row(spec, right, read, metric="string_match", **more):
    """A row whose items are right (1) or not (0)."""
    values, n = [float(one) for one in right], len(right)
    found = {"method": spec.partition(":")[0], "spec": spec, "n": n, "task": "niah", "score": 100 * sum(values) / n}
    found |= {"ceiling": 100.0, "kv_bytes_per_step": None if read is None else 1000.0 * read, "keys_read_share": read}
    return found | {"metrics": {metric: {}}, "item_values": {metric: values}} | more


def beside(rows):
    """Rows with the difference to the first, as a bootstrap that sees no difference would have it."""
    return [one | {"diff_to_dense": one["score"] - rows[0]["score"], "diff_low": 0.0, "diff_high": 0.0} for one in rows]


def items(n, *wrong):
    return [place not in wrong for place in range(n)]


def held(spec, difference, low, read, n=500):
    """A row without the values of its items."""
    found = {"method": spec, "spec": spec, "n": n, "task": "niah", "score": 90 + difference, "ceiling": 100.0}
    found |= {"diff_to_dense": difference, "diff_low": low, "diff_high": difference + 1}
    return found | {"kv_bytes_per_step": 1000.0 * read, "keys_read_share": read}


def test_the_cheapest_that_is_shown_to_be_within_is_recommended():
    dense, near = held("dense", 0.0, 0.0, 1.0), held("luka", -0.5, -0.9, 0.2)
    rows = [dense, near, held("pages", -0.8, -1.4, 0.1), held("tova", -3.0, -4.0, 0.05)]
    found = verdict.judge(rows)
    assert found.best == near
    assert found.words == (
        "Within a point of dense attention (90.0, n = 500), luka reads least: 20.0 % of the keys, -0.5 [-0.9, +0.5] "
        "points. Cheaper, but not shown to be within it: pages, -0.8 [-1.4, +0.2] points (about 4,500 items would show "
        "it)."
    )
    assert [one.row["spec"] for one in found.judged] == ["tova", "pages", "luka"]
    assert [one.shown for one in found.judged] == [False, False, True]


def test_the_value_alone_recommends_nothing():
    rows = [held("dense", 0.0, 0.0, 1.0), held("pages", -0.8, -1.4, 0.1)]
    found = verdict.judge(rows)
    assert found.best is None
    assert found.words == (
        "No method is shown to be within a point of dense attention (90.0, n = 500). pages is nearest, at -0.8 "
        "[-1.4, +0.2] points; about 4,500 items would show it if differences go on so."
    )
    lost = verdict.judge([rows[0], held("tova", -3.0, -4.0, 0.05)]).words
    assert lost.startswith("No method is within a point of dense attention (90.0, n = 500). tova is nearest, at -3.0")
    assert "would show" not in lost


def test_twelve_items_without_a_difference_show_nothing_and_are_a_tie():
    rows = beside([row("dense", items(12, 3), 1.0), row("h2o", items(12, 3), 0.2), row("pages", items(12, 3), 0.3)])
    found = verdict.judge(rows)
    assert found.best is None
    assert found.words == (
        "No method is shown to be within a point of dense attention (91.7, n = 12). h2o and pages are nearest and tie, "
        "at +0.0 [-26.5, +26.5] points; about 370 items would show it if differences go on so."
    )
    assert verdict.judge(rows, max_loss=30.0).best["spec"] == "h2o"


def test_ties_are_named_and_the_cheapest_of_them_is_recommended():
    right = items(500, 3)
    rows = beside([row("dense", right, 1.0), *(row(spec, right, read) for spec, read in (("a", 0.3), ("b", 0.2)))])
    found = verdict.judge([*rows, beside([rows[0], row("c", right, 0.2)])[1]])
    assert found.best["spec"] == "b"
    assert "b reads least: 20.0 % of the keys" in found.words
    assert "c reads as much: a tie in cost. a reads more and ties in score with b." in found.words


def test_a_method_that_reads_more_and_scores_above_is_named():
    wrong = range(0, 40)
    low, high = items(500, *wrong), items(500)
    rows = beside([row("dense", low, 1.0), row("a", low, 0.2), row("b", high, 0.3)])
    assert "b reads more and scores above a." in verdict.judge(rows).words


def test_where_all_answer_everything_it_is_said_that_this_shows_little():
    rows = beside([row("dense", items(500), 1.0), row("a", items(500), 0.2)])
    found = verdict.judge(rows)
    assert found.best["spec"] == "a"
    assert found.words.endswith("a tie, which shows nothing of harder items.")
    rows[1] = beside([rows[0], row("a", items(500, 1), 0.2)])[1]
    assert "harder" not in verdict.judge(rows).words


@pytest.mark.parametrize("read", [1.0, 1.3])
def test_what_reads_as_much_as_dense_attention_is_not_recommended(read):
    rows = beside([row("dense", items(500, 1), 1.0), row("a", items(500, 1), read)])
    found = verdict.judge(rows)
    assert found.best is None
    assert found.words.startswith("No method that is shown to be within a point of dense attention (99.8, n = 500)")


def test_nothing_is_judged_without_dense_rows_points_or_costs():
    rows = beside([row("dense", items(9), 1.0), row("a", items(9), 0.2)])
    assert verdict.judge(rows[1:]) == verdict.judge(rows[:1]) == verdict.Verdict()
    assert verdict.judge([one | {"task": "perplexity"} for one in rows]) == verdict.Verdict()
    assert verdict.judge([rows[0], rows[1] | {"kv_bytes_per_step": None}]) == verdict.Verdict()


def test_tokens_of_dense_answers_count_where_none_differs():
    same = {"metrics": {"agreement": {}}, "item_values": {"agreed": [200.0, 200.0], "tokens": [200.0, 200.0]}, "n": 2}
    dense, one = beside([row("dense", items(2), 1.0) | same, row("a", items(2), 0.2) | same])
    assert verdict.compared(one, dense, 1.0).difference.low == pytest.approx(-paired.least_loss(400))


def test_names_are_counted_where_they_are_many():
    rows = beside([row("dense", items(12, 1), 1.0), *(row(f"m{n}", items(12, 1), 0.1 * n) for n in range(1, 7))])
    words = verdict.judge(rows, named=lambda one: one["spec"].upper()).words
    assert "M1, M2 and 4 more are nearest and tie" in words


ANSWERS = st.integers(1, 30).flatmap(
    lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=2, max_size=4)
)
REPEATS = st.sampled_from([1, 20])  # many items, at which methods are shown to be within a loss, too


def compared(answers, repeats):
    rows = [
        row("dense" if place == 0 else f"m{place}", one * repeats, 1.0 / 2**place) for place, one in enumerate(answers)
    ]
    return beside(rows)


@settings(max_examples=60, deadline=None)
@given(ANSWERS, REPEATS, st.floats(0.1, 100))
def test_nothing_is_recommended_where_dense_attention_answers_nothing(answers, repeats, loss):
    rows = compared([[False] * len(answers[0]), *answers[1:]], repeats)
    found = verdict.judge(rows, loss)
    assert found.best is None
    assert found.judged == ()
    assert found.words.startswith("Dense attention answers none of")
    assert found.words.count(".") == 1, "one sentence"


@settings(max_examples=60, deadline=None)
@given(ANSWERS, REPEATS, st.floats(0.1, 60), st.floats(0.1, 60))
def test_a_larger_loss_drops_no_method_and_costs_no_more(answers, repeats, one, other):
    rows = compared(answers, repeats)
    less, more = (verdict.judge(rows, loss) for loss in sorted((one, other)))
    if rows[0]["score"] <= max(one, other):
        assert more.best is None, "methods that answer nothing would pass"
        return
    assert {it.row["spec"] for it in less.judged if it.shown} <= {it.row["spec"] for it in more.judged if it.shown}
    cost = [math.inf if it.best is None else it.best["kv_bytes_per_step"] for it in (less, more)]
    assert cost[1] <= cost[0]


@settings(max_examples=60, deadline=None)
@given(ANSWERS, REPEATS, st.floats(0.1, 60), st.integers())
def test_the_order_of_items_and_of_rows_changes_nothing(answers, repeats, loss, seed):
    order = list(range(len(answers[0])))
    random.Random(seed).shuffle(order)
    rows = compared(answers, repeats)
    moved = compared([[one[place] for place in order] for one in answers], repeats)
    random.Random(seed).shuffle(moved)
    found, other = verdict.judge(rows, loss), verdict.judge(moved, loss)
    assert found.words == other.words
    assert (found.best or {}).get("spec") == (other.best or {}).get("spec")


@settings(max_examples=60, deadline=None)
@given(ANSWERS, REPEATS, st.floats(0.1, 60))
def test_what_is_recommended_has_its_whole_interval_within_the_loss(answers, repeats, loss):
    found = verdict.judge(compared(answers, repeats), loss)
    for one in found.judged:
        assert one.shown == (one.difference.low >= -loss - 1e-9)
        assert one.needed is None or not one.shown
    if found.best is not None:
        (best,) = (one for one in found.judged if one.row is found.best)
        assert best.shown
        assert best.row["n"] >= paired.least_items(loss) or best.difference.value > 0
