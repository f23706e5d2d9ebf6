"""What stays: all at once and one step at a time, which must agree."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foveate import ops
from foveate.ops import KV
from tests.problems import Waits

INF = float("inf")
SCORES = st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0, 3.0]), min_size=2, max_size=30)


def kept_by_sorting(scores: list[float], number: int, protected: list[bool]) -> list[int]:
    """The protected slots, the first first, and then the best others, ties to the smaller slot."""
    order = sorted(range(len(scores)), key=lambda i: (not protected[i], -scores[i] if not protected[i] else 0.0, i))
    return sorted(i for i in order[:number] if protected[i] or scores[i] != -INF)


def row(values, dtype=None):
    return torch.tensor(values, dtype=dtype)[None, None]


VALUES = [-INF, torch.finfo(torch.float32).min, -1.0, 0.0, 0.5, 2.0, torch.finfo(torch.float32).max, INF]


@given(st.lists(st.sampled_from(VALUES), min_size=1, max_size=30), st.integers(0, 32), st.data())
def test_keep_best_keeps_the_protected_and_the_best(scores, number, data):
    protected = data.draw(st.lists(st.booleans(), min_size=len(scores), max_size=len(scores)))
    with Waits() as waits:
        kept = ops.keep_best(row(scores), number, row(protected))
        del waits.names[:2]  # of row
        assert not waits.names
    expected = kept_by_sorting(scores, number, protected)
    assert kept.dtype == torch.int64
    assert kept.tolist() == [[expected + [-1] * (min(number, len(scores)) - len(expected))]]


def test_keep_best_keeps_the_protected_beside_infinite_scores():
    assert ops.keep_best(row([INF, 0.0, 1.0]), 1, row([False, False, True])).tolist() == [[[2]]]
    assert ops.keep_best(row([INF, INF, 1.0]), 2, row([False, False, True])).tolist() == [[[0, 2]]]


def test_keep_best_works_on_every_head_and_broadcasts_protection():
    scores = torch.tensor([[[5.0, 1, 4, 0, 0], [1, 5, 4, 0, 0]], [[0, 0, 0, 9, 9], [1, 2, 3, 0, 9]]])
    protected = torch.tensor([False, False, False, False, True])
    kept = ops.keep_best(scores, 3, protected)
    assert kept.tolist() == [[[0, 2, 4], [1, 2, 4]], [[0, 3, 4], [1, 2, 4]]]


def test_rows_may_protect_different_numbers_of_slots():
    protected = torch.tensor([[[0, 0, 0, 0], [0, 0, 0, 1], [1, 0, 1, 1]]]).bool()
    kept = ops.keep_best(torch.tensor([[[1.0, 3, 2, 0]] * 3]), 2, protected)
    assert kept.tolist() == [[[1, 2], [1, 3], [0, 2]]]


def test_keep_best_of_nothing_is_empty():
    assert ops.keep_best(torch.zeros(2, 3, 4), 0, torch.zeros(4, dtype=torch.bool)).shape == (2, 3, 0)


def test_keep_best_of_more_than_there_is_keeps_all():
    assert ops.keep_best(torch.zeros(1, 1, 4), 9, torch.zeros(4, dtype=torch.bool)).tolist() == [[[0, 1, 2, 3]]]


@given(SCORES, st.data())
def test_weakest_is_the_smallest_and_the_latest(scores, data):
    eligible = data.draw(st.lists(st.booleans(), min_size=len(scores), max_size=len(scores)).filter(any))
    positions = data.draw(st.permutations(range(len(scores))))
    expected = min((i for i, e in enumerate(eligible) if e), key=lambda i: (scores[i], -positions[i]))
    assert ops.retain.weakest(row(scores), row(eligible), row(positions, torch.int32)).tolist() == [[expected]]


def test_weakest_among_infinite_scores_is_an_eligible_one():
    scores, positions = row([INF, 0.0, INF, INF]), row([4, 5, 6, 9], torch.int32)
    assert ops.retain.weakest(scores, row([True, False, True, False]), positions).tolist() == [[2]]


def test_weakest_of_every_head():
    scores = torch.tensor([[[3.0, 1, 2], [1, 2, 3]], [[2, 2, 2], [5, 0, 0]]])
    eligible = torch.tensor([[[True, False, True], [True] * 3], [[True] * 3, [True, True, False]]])
    positions = torch.tensor([[[0, 1, 2]] * 2, [[7, 3, 5]] * 2], dtype=torch.int32)
    assert ops.retain.weakest(scores, eligible, positions).tolist() == [[2, 0], [0, 1]]


def test_what_is_given_up_has_no_position_any_more():
    positions = torch.tensor([[[0, 4, 2, -1]] * 2, [[3, 1, -1, 5]] * 2], dtype=torch.int32)
    scores = torch.tensor([[[3.0, 1, 1, 0]] * 2, [[2, 2, 0, float("nan")]] * 2])
    scores[0, 1, 0] = -7
    kept = positions.clone()
    assert ops.retain.give_up(kept, scores=scores).tolist() == [[1, 0], [3, 3]]  # ties: the later position
    assert kept.tolist() == [[[0, -1, 2, -1], [-1, 4, 2, -1]], [[3, 1, -1, -1]] * 2]
    kept = positions.clone()
    assert ops.retain.give_up(kept, scores=scores, before=torch.tensor([3, 5])).tolist() == [[2, 0], [0, 0]]
    kept = positions.clone()
    found = ops.retain.give_up(kept, scores=scores, rows=torch.tensor([False, True]), before=torch.tensor([0, 2]))
    assert found.tolist() == [[-1, -1], [1, 1]]
    assert torch.equal(kept[0], positions[0])
    kept = positions.clone()
    assert ops.retain.give_up(kept, at=torch.tensor([4, 3])).tolist() == [[1, 1], [0, 0]]
    assert kept.tolist() == [[[0, -1, 2, -1]] * 2, [[-1, 1, -1, 5]] * 2]


def test_a_token_goes_where_one_was_given_up_or_behind_the_others():
    keys, values = torch.zeros(2, 2, 5, 3), torch.zeros(2, 2, 5, 1)
    positions, freed = torch.full((2, 2, 5), -1, dtype=torch.int32), torch.tensor([[1, -1], [0, 2]])
    k, v = torch.full((2, 2, 1, 3), 7.0), torch.full((2, 2, 1, 1), 8.0)
    numbers = torch.ones(2, 2, 5)
    how = {"positions": positions, "newest": torch.tensor([40, 50], dtype=torch.int32), "emptied": numbers}
    found = ops.put_token(KV(keys, values), k, v, torch.tensor([3, 4]), freed=freed, **how)
    assert found.tolist() == [[1, 3], [0, 2]]
    assert freed.tolist() == [[1, -1], [0, 2]]
    there = torch.zeros(2, 2, 5, dtype=torch.bool).scatter_(2, found[..., None], True)
    assert torch.equal(keys, 7.0 * there[..., None].expand(keys.shape))
    assert torch.equal(values, 8.0 * there[..., None])
    assert positions[there].tolist() == [40, 40, 50, 50]
    assert bool((positions[~there] == -1).all())
    assert torch.equal(numbers, (~there).float())
    found = ops.put_token(KV(keys, values), k, v, torch.tensor([3, 4]), freed=freed, take=True)
    assert freed.tolist() == [[-1, -1], [-1, -1]]
    assert ops.put_token(KV(keys, values), k, v, torch.tensor([3, 4]), freed=freed).tolist() == [[3, 3], [4, 4]]


@given(SCORES, st.data())
def test_giving_up_the_weakest_again_and_again_leaves_the_best(scores, data):
    """Whatever the slots, the survivors are those that keep_best would have chosen in the order of positions."""
    n = len(scores)
    protected = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    k = data.draw(st.integers(0, n - sum(protected)))
    slots = data.draw(st.permutations(range(n)))  # slots[p]: the slot of the token at position p
    by_slot = sorted(range(n), key=lambda p: slots[p])
    alive = row([not protected[p] for p in by_slot])
    shuffled, positions = row([scores[p] for p in by_slot]), row(by_slot, torch.int32)
    for _ in range(n - sum(protected) - k):
        alive[0, 0, ops.retain.weakest(shuffled, alive, positions).item()] = False
    survivors = sorted(p for p in range(n) if alive[0, 0, slots[p]] or protected[p])
    assert survivors == ops.keep_best(row(scores), k + sum(protected), row(protected))[0, 0].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inputs_are_left_alone(dtype):
    scores, flags = torch.rand(1, 2, 6, dtype=dtype), torch.rand(1, 2, 6) > 0.5
    before = scores.clone(), flags.clone()
    ops.retain.weakest(scores, flags, torch.arange(6, dtype=torch.int32).expand(1, 2, 6))
    ops.keep_best(scores, 4, torch.tensor([False, True, False, False, True, False]))
    assert torch.equal(scores, before[0])
    assert torch.equal(flags, before[1])
