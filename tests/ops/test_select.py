"""Top-k: a total order, bounded memory, the same set however the scores were cut."""

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foveate import ops
from tests.helpers import LargestTensor

INF = float("inf")
NAN = float("nan")


def expected_topk(scores: list[float], k: int) -> list[int]:
    """Sort by score, then by index; -inf is no candidate; ascending, then -1."""
    order = sorted((i for i, score in enumerate(scores) if score != -INF), key=lambda i: (-scores[i], i))
    chosen = sorted(order[:k])
    return chosen + [-1] * (min(k, len(scores)) - len(chosen))


TIED = st.lists(st.sampled_from([-INF, -2.0, -0.0, 0.0, 1.0, 1.5, INF]), min_size=1, max_size=60)


@given(TIED, st.integers(1, 70), st.integers(1, 70))
def test_topk_of_many_ties_in_any_chunks(scores, k, chunk):
    assert ops.topk(torch.tensor(scores), k, chunk=chunk).tolist() == expected_topk(scores, k)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=60), st.integers(1, 70), st.integers(1, 70))
def test_topk_of_any_numbers(scores, k, chunk):
    assert ops.topk(torch.tensor(scores), k, chunk=chunk).tolist() == expected_topk(scores, k)


@given(TIED, st.integers(1, 20), st.lists(st.integers(1, 25), max_size=8))
def test_streaming_over_uneven_blocks(scores, k, sizes):
    best = ops.select.StreamingTopK(k)
    bounds = sorted({0, len(scores)} | {cut for cut in itertools.accumulate(sizes) if cut < len(scores)})
    for first, last in itertools.pairwise(bounds):
        best.update(torch.tensor(scores[first:last]), first)
        indices, values = best.result()
        assert indices.tolist() == expected_topk(scores[:last], k)
        assert values.tolist() == [scores[i] if i >= 0 else -INF for i in indices.tolist()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
def test_topk_of_every_row_of_a_batch(dtype, transposed):
    scores = (torch.randn(2, 3, 41, generator=torch.manual_seed(0)) * 3).round().to(dtype)
    scores[0, 1, 5:] = -INF
    if transposed:
        scores = scores.transpose(1, 2).contiguous().transpose(1, 2)
    chosen = ops.topk(scores, 9, chunk=7)
    assert chosen.shape == (2, 3, 9)
    assert chosen.dtype == torch.int64
    for b, h in itertools.product(range(2), range(3)):
        assert chosen[b, h].tolist() == expected_topk(scores[b, h].tolist(), 9)


N = 500


@pytest.mark.parametrize("chunk", [1, 37, N, 1 << 16])
@pytest.mark.parametrize("k", [1, 13, N - 1, N, N + 1])
@pytest.mark.parametrize(
    ("scores", "wanted"),
    [
        (torch.zeros(N), lambda k: range(k)),
        (torch.full((N,), INF), lambda k: range(k)),
        (torch.arange(N).float(), lambda k: range(N - k, N)),
        (-torch.arange(N).float(), lambda k: range(k)),
        (torch.full((N,), -INF), lambda k: [-1] * k),
        (torch.where(torch.arange(N) % 50 == 7, 1.0, -INF), lambda k: [*range(7, N, 50)][:k] + [-1] * (k - 10)),
        (torch.where(torch.arange(N) % 2 == 1, INF, -1e38), lambda k: sorted([*range(1, N, 2), *range(0, N, 2)][:k])),
        (1 + torch.arange(N).remainder(2) * 1e-7, lambda k: sorted([*range(1, N, 2), *range(0, N, 2)][:k])),
    ],
    ids=["tied", "all_inf", "rising", "falling", "all_minus_inf", "few", "half_inf", "one_ulp_apart"],
)
def test_adversarial_scores(scores, wanted, k, chunk):
    assert ops.topk(scores, k, chunk=chunk).tolist() == list(wanted(min(k, N)))


@pytest.mark.parametrize("place", [0, 41, N - 1])
def test_nan_raises_wherever_it_is(place):
    scores = torch.zeros(2, N)
    scores[1, place] = NAN
    with pytest.raises(ValueError, match="NaN"):
        ops.topk(scores, 3, chunk=50)
    with pytest.raises(ValueError, match="NaN"):
        ops.topk(scores, N + 5)
    without_ties = torch.arange(N).float()
    without_ties[place] = NAN
    with pytest.raises(ValueError, match="NaN"):
        ops.topk(without_ties, 3)


@pytest.mark.parametrize(("k", "number"), [(2, 8), (5, 8), (2, 500)])
@pytest.mark.parametrize("place", [0, 5])
def test_nan_counts_as_infinite_among_rows_of_different_numbers(k, number, place):
    scores = torch.arange(number).float().repeat(2, 1, 1)
    scores[1, 0, place] = NAN
    expected = ops.topk_rows(scores.masked_fill(scores.isnan(), float("inf")), torch.tensor([1, k]), k)
    assert torch.equal(ops.topk_rows(scores, torch.tensor([1, k]), k), expected)
    assert place in expected[1]


def test_blocks_must_ascend():
    best = ops.select.StreamingTopK(1)
    best.update(torch.tensor([1.0]), 5)
    for first in (0, 5):
        with pytest.raises(ValueError, match=f"first_index must be at least 6, the end of the last block, not {first}"):
            best.update(torch.tensor([1.0]), first)
    best.update(torch.tensor([1.0]), 9)
    assert best.result()[0].tolist() == [5]
    with pytest.raises(ValueError, match="first_index must be at least 0"):
        ops.select.StreamingTopK(1).update(torch.tensor([1.0]), -1)


@pytest.mark.parametrize("k", [0, -3])
def test_k_below_one_raises(k):
    with pytest.raises(ValueError, match=f"k must be an integer of at least 1, not {k}"):
        ops.topk(torch.zeros(4), k)


def test_nothing_given_raises():
    with pytest.raises(ValueError, match="no scores were given"):
        ops.select.StreamingTopK(3).result()


@given(st.lists(TIED.map(lambda row: (row + [0.0] * 60)[:13]), min_size=1, max_size=4), st.data())
def test_topk_rows_gives_each_row_its_own_number(rows, data):
    most = data.draw(st.sampled_from([4, 15]))
    counts = data.draw(st.lists(st.integers(0, most), min_size=len(rows), max_size=len(rows)))
    scores = torch.tensor([[row, row[::-1]] for row in rows])
    k = max(1, *counts)
    chosen = ops.topk_rows(scores, torch.tensor(counts), k)
    assert chosen.dtype == torch.int64
    assert chosen.shape == (len(rows), 2, min(k, 13))
    for b, count in enumerate(counts):
        for h in range(2):
            wanted = expected_topk(scores[b, h].tolist(), count)
            assert chosen[b, h].tolist() == wanted + [-1] * (min(k, 13) - len(wanted))


def test_topk_rows_leaves_out_what_must_not_be_chosen_and_rows_that_choose_nothing():
    scores = torch.full((3, 1, 13), float("-inf"))
    scores[:, :, 5], scores[:, :, 9] = 1.0, 1.0
    chosen = ops.topk_rows(scores, torch.tensor([4, 1, 0]), 4)
    assert chosen[:, 0].tolist() == [[5, 9, -1, -1], [5, -1, -1, -1], [-1] * 4]


def test_repeats_are_equal_and_the_input_is_left_alone():
    scores = torch.randn(3, 1000, generator=torch.manual_seed(1)).round(decimals=1)
    before = scores.clone()
    first = ops.topk(scores, 100, chunk=64)
    assert all(torch.equal(first, ops.topk(scores, 100, chunk=64)) for _ in range(3))
    assert torch.equal(scores, before)


def test_memory_does_not_grow_with_the_number_of_scores():
    k, chunk, scores = 64, 4096, torch.rand(1 << 20, generator=torch.manual_seed(2))
    with LargestTensor() as largest:
        ops.topk(scores, k, chunk=chunk)
    assert largest.bytes <= 8 * (k + chunk), largest.what


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_keys_at_places_within_pages(dtype):
    pages = torch.tensor([[[3, 5, -1], [0, 2, 9]]], dtype=torch.int32)
    places = torch.tensor([[[0, 3, 4, 7, -1], [-1, 1, 6, 8, 11]]], dtype=dtype)
    found = ops.keys_at_places(places, pages, 4)
    assert found.dtype == dtype
    assert found.tolist() == [[[12, 15, 20, 23, -1], [-1, 1, 10, 36, 39]]]


@pytest.mark.parametrize("group", [1, 3, 5])
@pytest.mark.parametrize("page_size", [1, 3, 7])
def test_keys_of_pages_are_those_that_a_head_of_the_group_reads(page_size, group):
    """Each once, and of a last page that is not full those that are there."""
    lengths, generator = [1, page_size, 4 * page_size, 4 * page_size + 1, 9 * page_size - 1], random.Random(group)
    lists = torch.full((len(lengths), 2 * group, 10), -1, dtype=torch.int32)
    wanted = torch.zeros(len(lengths), 2, dtype=torch.int64)
    for row, length in enumerate(lengths):
        keys = [set(), set()]
        for head in range(2 * group):
            number = -(-length // page_size)
            read = sorted(generator.sample(range(number), generator.randint(0, number)))
            lists[row, head, : len(read)] = torch.tensor(read, dtype=torch.int32)
            keys[head // group] |= {key for key in range(length) if key // page_size in read}
        wanted[row] = torch.tensor(list(map(len, keys)))
    assert torch.equal(ops.select.keys_of_pages(lists, 2, page_size, torch.tensor(lengths)), wanted)


ROWS = {"scores": torch.zeros(2, 1, 200), "counts": torch.tensor([1, 2]), "k": 3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": -1}, "k must be an integer of at least 0, not -1"),
        ({"k": 2.0}, "k must be an integer of at least 0, not 2.0"),
        ({"k": 1}, "counts must be at most k, which is 1, not 2"),
        ({"scores": torch.zeros(2, 200)}, r"scores must be a floating-point \[B, Hkv, n\]"),
        ({"scores": torch.zeros(2, 1, 200, dtype=torch.long)}, "scores must be a floating-point"),
        ({"counts": torch.tensor([1])}, r"counts must be integers \[2\]"),
        ({"counts": torch.tensor([1, 1, 1])}, r"counts must be integers \[2\]"),
        ({"counts": torch.tensor([1.0, 1.0])}, r"counts must be integers \[2\]"),
        ({"lengths": torch.tensor([5])}, r"lengths must be integers \[2\]"),
        ({"dtype": torch.int8}, "dtype must be of integers that hold 200, not torch.int8"),
        ({"dtype": torch.uint8}, "dtype must be of integers"),
        ({"dtype": torch.float32}, "dtype must be of integers"),
    ],
)
def test_topk_rows_refuses_what_it_would_answer_wrongly(change, message):
    ops.topk_rows(**ROWS)
    with pytest.raises(ValueError, match=message):
        ops.topk_rows(**ROWS | change)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("n", [0, 1, 126, 127])
def test_topk_rows_gives_the_same_in_every_dtype(dtype, n):
    scores = torch.randn(2, 3, n, generator=torch.Generator().manual_seed(n))
    expected = ops.topk_rows(scores, torch.tensor([0, 4]), 5)
    found = ops.topk_rows(scores, torch.tensor([0, 4]), 5, dtype=dtype)
    assert found.dtype == dtype
    assert torch.equal(found.long(), expected)
