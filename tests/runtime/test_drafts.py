"""Lossless decoding's parts: what a draft reads again, the verifying pass, and which drafts are accepted."""

from __future__ import annotations

import collections
from typing import ClassVar

import pytest
import torch

from foveate import methods, ops
from foveate.methods import ReadsChosen
from foveate.ops import KV, Choice
from foveate.runtime.capture import move_to_device, step
from foveate.runtime.drafts import (
    LENGTHS,
    Drafting,
    DraftLength,
    accept_greedy,
    accept_sampled,
    obstacle,
    verified,
)
from foveate.state import Geometry, SlotCache
from foveate.state.step_plan import StepPlan

DIM, HEADS, KV_HEADS = 16, 6, 2


def again(choice, slots, number, most):
    """The choice of the first token of a draft, and the last ``number`` slots of each row."""
    slots, number = torch.tensor(slots), torch.tensor(number)
    kept = choice.for_draft(slots - number)
    return kept.with_newest(kept.newest(slots, number, most), number)


def sets(rows):
    return [[set(head) - {-1} for head in row] for row in rows.tolist()]


@pytest.mark.parametrize("packed", [False, True])
def test_a_draft_reads_its_choice_again_and_its_own_tokens(packed):
    keys = torch.tensor([[[0, 4, 7, 2]], [[1, 3, 9, 9]]], dtype=torch.int32)
    read = torch.tensor([[4], [2]])
    keys = keys if packed else keys.masked_fill(~ops.first_keys(read, 4), -1)
    found = again(Choice(keys=keys, read=read, packed=packed), [11, 6], [2, 1], 3)
    assert sets(found.keys) == [[{0, 4, 7, 2, 9, 10}], [{1, 3, 5}]]
    assert found.read.tolist() == [[6], [3]]
    assert not found.packed
    assert found.keys.dtype == keys.dtype


@pytest.mark.parametrize(
    ("slots", "number", "expected"),
    [(9, 1, {0, 2}), (8, 1, {0}), (9, 2, {0, 2}), (12, 4, {0, 2}), (13, 6, {0, 2, 3}), (13, 1, {0, 3})],
)
def test_a_draft_reads_the_pages_that_it_has_begun(slots, number, expected):
    """Of four tokens each, that of its first token included, whether that token reads it or not."""
    first = slots - number - 1
    for own in (-1, first // 4):
        pages = torch.tensor([[[0, own]]], dtype=torch.int32)
        read = torch.tensor([[4 if own < 0 else 4 + first % 4 + 1]])
        choice = Choice(pages=pages, page_size=4, counts=torch.tensor([2]), read=read)
        found = again(choice, [slots], [number], 7)
        assert sets(found.pages) == [[expected | {first // 4}]]
        assert found.pages[found.pages >= 0].unique().numel() == int((found.pages >= 0).sum())
        assert found.counts is None
        assert found.read.tolist() == [[4 + first % 4 + 1 + number]]


def test_pages_beyond_the_count_of_a_row_are_not_read_again():
    pages = torch.tensor([[[0, 1]], [[0, 1]]], dtype=torch.int32)
    choice = Choice(pages=pages, page_size=4, counts=torch.tensor([2, 1]), read=torch.tensor([[8], [4]]))
    assert sets(again(choice, [7, 7], [1, 1], 1).pages) == [[{0, 1}], [{0, 1}]]
    choice = choice._replace(pages=torch.tensor([[[1, 0]], [[1, 0]]], dtype=torch.int32))
    assert sets(again(choice, [7, 7], [1, 1], 1).pages) == [[{0, 1}], [{1}]]


@pytest.mark.parametrize("dense", [False, True])
def test_layers_and_their_readers_read_the_tokens_of_the_draft(dense):
    """A layer that reads all keys hands such a choice on, too."""
    choice = Choice(keys=torch.tensor([[[3, 1]]], dtype=torch.int32), read=torch.tensor([[2]]))
    drafting = Drafting()
    plan = StepPlan(dict.fromkeys(("lengths", "counts", "live"), (7,)), torch.device("cpu"))
    drafting.keep(Choice(readers=choice) if dense else choice._replace(readers=choice), plan)
    later = StepPlan(dict.fromkeys(("lengths", "counts", "live"), (9,)), torch.device("cpu"))
    found = drafting.again(later)
    assert found.reads_all == dense
    for one in (found.readers,) if dense else (found, found.readers):
        assert sets(one.keys) == [[{1, 3, 7, 8}]]


def test_a_choice_of_neither_keys_nor_pages_cannot_be_read_again():
    with pytest.raises(ValueError, match="this layer's has neither"):
        Drafting().keep(Choice(attended=ops.Attended(torch.zeros(1, 1, 1, 1))), None)


def test_which_methods_draft():
    reasons = {
        name: obstacle(methods.parse(name).for_layer(1, 6))
        for name in ("kascade", "pages", "quest", "locks", "twilight", "omnikv", "lessismore", "dense", "h2o", "luka")
    }
    evicts, state = "it evicts tokens, which a verifying pass would need", "it keeps a state of its tokens that "
    assert reasons.pop("h2o") == evicts
    assert reasons.pop("luka").startswith(state)
    assert not any(reasons.values())
    assert obstacle(methods.parse("snapkv")) == evicts
    assert obstacle(methods.parse("sparq")).startswith(state)


class KeyPlusOne(ReadsChosen):
    """Keeps one more than the first number of each key, to see of which tokens it was told."""

    name: ClassVar[str] = "key_plus_one"

    def copies(self, keys):
        return {"copy": keys[..., :1] + 1}

    def choose(self, cache, q, scaling):
        raise NotImplementedError


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("lengths", [[5, 5], [9, 5]])
def test_a_verifying_pass_writes_over_its_drafts(lengths, captured):
    """And counts one token more; what methods keep of each token is made anew."""
    generator, method, n = torch.Generator().manual_seed(0), KeyPlusOne(), 4
    geometry = Geometry(HEADS, KV_HEADS, DIM, DIM)
    store = SlotCache(geometry, 2, torch.float32, torch.device("cpu"), method.channels(geometry))
    store.reserve(16)
    for b, length in enumerate(lengths):
        with store.row(b) as row:
            row.append(*torch.randn(2, 1, KV_HEADS, length, DIM, generator=generator))
    before, own = store.keys.clone(), store.channel("copy")
    own.copy_(-before[..., :1])
    q = torch.randn(2, HEADS, n, DIM, generator=generator)
    k, v = torch.randn(2, 2, KV_HEADS, n, DIM, generator=generator)
    groups = [move_to_device([store])] if captured else []
    with step(groups):
        found = verified(method, store, q, k, v, 0.3)
    for rows in groups:
        rows.steps += 1
    assert store.lengths == [length + 1 for length in lengths]
    for b, length in enumerate(lengths):
        first = length + 1 - n
        assert torch.equal(store.keys[b, :, :first], before[b, :, :first])
        assert torch.equal(store.keys[b, :, first : length + 1], k[b])
        assert torch.equal(store.values[b, :, first : length + 1], v[b])
        assert torch.equal(store.channel("copy")[b, :, :first], -before[b, :, :first, :1])
        assert torch.equal(store.channel("copy")[b, :, first : length + 1], k[b, ..., :1] + 1)
        one = [x[b : b + 1, :, : length + 1] for x in (store.keys, store.values)]
        alone = ops.attend_newest(q[b : b + 1], KV(*one), logits=ops.Logits(0.3))
        torch.testing.assert_close(found[b : b + 1], alone.out)


def test_greedy_drafts_are_accepted_up_to_the_first_that_differs():
    best = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8]])
    scores = torch.nn.functional.one_hot(best, 10).float()
    drafts = torch.tensor([[3, 1, 4], [5, 8, 2], [0, 3, 5]])
    accepted, following = accept_greedy(drafts, scores)
    assert accepted.tolist() == [3, 1, 0]
    assert following.tolist() == [1, 9, 5]
    accepted, following = accept_greedy(drafts[:, :0], scores[:, :1])
    assert (accepted.tolist(), following.tolist()) == ([0, 0, 0], [3, 5, 5])


@pytest.mark.parametrize("apart", [0.0, 0.5, 3.0])
def test_sampled_tokens_are_distributed_as_the_verifying_pass_says(apart):
    """Pearson's test of the first two tokens of many drafts, at 1e-4."""
    torch.manual_seed(0)
    rows, vocabulary, k = 60_000, 5, 2
    scores = torch.randn(1, k + 1, vocabulary)
    drawn_from = (scores[:, :k] + apart * torch.randn(1, k, vocabulary)).softmax(-1).expand(rows, -1, -1)
    drafts = torch.stack([torch.multinomial(drawn_from[:, i], 1)[:, 0] for i in range(k)], 1)
    accepted, following = accept_sampled(drafts, drawn_from, scores.expand(rows, -1, -1))
    if not apart:
        assert bool((accepted == k).all())
    written = torch.cat([drafts, following[:, None]], 1).scatter(1, accepted[:, None], following[:, None])
    for place in range(k + 1):
        there = written[accepted >= place, place]
        expected = scores[0, place].softmax(-1) * len(there)
        chi = ((torch.bincount(there, minlength=vocabulary) - expected) ** 2 / expected).sum()
        assert len(there) > 5000
        assert chi < 23.5, place  # four degrees of freedom


def lengths_of(cycles, share, seconds, most=100, fixed=None, steady=lambda cycle: True):
    """The lengths of drafts of which a share is accepted, in cycles that take ``seconds(length, cycle)``."""
    now, found = [0.0], []
    length = DraftLength(fixed, clock=lambda: now[0])
    for cycle in range(cycles):
        number = length.next(most)
        now[0] += seconds(number, cycle)
        length.learn(
            1000 * sum(share**i for i in range(1, number + 1)),
            1000 * sum(share**i for i in range(number)),
            steady(cycle),
        )
        found.append(number)
    return found


@pytest.mark.parametrize(
    ("share", "token", "expected"),
    [(0.95, 0.1, 15), (0.9, 0.4, 5), (0.4, 0.1, 2), (0.6, 0.7, 0), (0.9, 0.95, 0), (0.2, 0.5, 0)],
)
def test_drafts_are_as_long_as_pays(share, token, expected):
    """By time, where a pass over all keys takes 1 and a token of a draft a part of that."""
    found = lengths_of(200, share, lambda number, cycle: 1 + token * number)
    assert found[:6] == [5, 5, 5, 0, 0, 0]
    assert collections.Counter(found[50:]).most_common(1)[0][0] == expected
    if not expected:
        assert 1 <= sum(map(bool, found[50:])) <= 4, "one is tried now and then"


@pytest.mark.parametrize("growth", [10**9, 150])
def test_a_pass_without_a_draft_is_timed_again(growth):
    """As a context grows, drafts that did not pay begin to, and the other way round; cycles that capture their passes
    take longer and do not count."""

    def steady(cycle):
        return cycle % growth > 1

    def both(before, after):
        def seconds(number, cycle):
            usual = (before if cycle < 100 else after) + 0.95 * number
            return usual if steady(cycle) else 2.5 * usual

        return lengths_of(1500, 0.9, seconds, steady=steady)

    for found, expected in ((both(1, 4), [0, 1]), (both(4, 1), [1, 0])):
        assert [round(sum(map(bool, some)) / len(some)) for some in (found[60:100], found[-300:])] == expected


def test_a_draft_ends_where_the_answer_does():
    assert lengths_of(9, 0.9, lambda number, cycle: 1.0, most=3) == [3, 3, 3, 0, 0, 0, 3, 3, 3]
    assert lengths_of(2, 0.9, lambda number, cycle: 1.0, fixed=7) == [7, 7]
    assert lengths_of(2, 0.9, lambda number, cycle: 1.0, fixed=7, most=6) == [5, 5]
    assert lengths_of(2, 0.9, lambda number, cycle: 1.0, most=0) == [0, 0]
    length = DraftLength(16)
    length.learn(1, 1, True) if length.next(16) else None
    assert [length.next(most) for most in (15, 2)] == [15, 2]


def test_a_slow_pass_without_a_draft_does_not_make_drafts_free():
    """One of its three timings is three times as long, or all are longer than those of drafts."""
    for slow in ((3, 1, 1), (3, 3, 3)):
        found = lengths_of(30, 0.5, lambda number, cycle, slow=slow: 1.0 if number else slow[cycle % 3])
        assert set(found) <= {0, *LENGTHS}
