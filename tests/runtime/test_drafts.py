"""Lossless decoding's parts: what a draft reads again, the verifying pass, and which drafts are accepted."""

from __future__ import annotations

import pytest
import torch

from foveate import methods, ops
from foveate.ops import Choice
from foveate.runtime.drafts import (
    LONGEST,
    Drafting,
    DraftLength,
    accept_greedy,
    accept_sampled,
    attend_newest,
    obstacle,
)
from foveate.state import Geometry, SlotCache

DIM, HEADS, KV_HEADS = 16, 6, 2


def sets(rows):
    return [[set(head) - {-1} for head in row] for row in rows.tolist()]


@pytest.mark.parametrize("packed", [False, True])
def test_a_draft_reads_its_choice_again_and_its_own_tokens(packed):
    keys = torch.tensor([[[0, 4, 7, 2]], [[1, 3, 9, 9]]], dtype=torch.int32)
    read = torch.tensor([[4], [2]])
    keys = keys if packed else keys.masked_fill(~ops.first_keys(read, 4), -1)
    found = Choice(keys=keys, read=read, packed=packed).with_newest(torch.tensor([11, 6]), 2)
    assert sets(found.keys) == [[{0, 4, 7, 2, 9, 10}], [{1, 3, 4, 5}]]
    assert found.read.tolist() == [[6], [4]]
    assert not found.packed
    assert found.keys.dtype == keys.dtype


@pytest.mark.parametrize(
    ("slots", "number", "expected"),
    [(9, 1, {0, 2}), (8, 1, {0}), (9, 2, {0, 2}), (12, 4, {0, 2}), (13, 6, {0, 2, 3}), (13, 1, {0, 3})],
)
def test_a_draft_reads_the_pages_that_it_has_begun(slots, number, expected):
    """Of four tokens each. The page of the token before the draft's second is read anyway."""
    pages = torch.tensor([[[0, -1]]], dtype=torch.int32)
    choice = Choice(pages=pages, page_size=4, counts=torch.tensor([1]), read=torch.tensor([[4]]))
    found = choice.with_newest(torch.tensor([slots]), number)
    assert sets(found.pages) == [[expected]]
    assert found.counts is None
    assert found.read.tolist() == [[4 + number]]


def test_pages_beyond_the_count_of_a_row_are_not_read_again():
    pages = torch.tensor([[[0, 1]], [[0, 1]]], dtype=torch.int32)
    choice = Choice(pages=pages, page_size=4, counts=torch.tensor([2, 1]), read=torch.tensor([[8], [4]]))
    assert sets(choice.with_newest(torch.tensor([8, 8]), 1).pages) == [[{0, 1}], [{0}]]


@pytest.mark.parametrize("dense", [False, True])
def test_layers_and_their_readers_read_the_tokens_of_the_draft(dense):
    """A layer that reads all keys hands such a choice on, too."""
    choice = Choice(keys=torch.tensor([[[3, 1]]], dtype=torch.int32), read=torch.tensor([[2]]))
    drafting = Drafting()
    drafting.keep(Choice(readers=choice) if dense else choice._replace(readers=choice))
    drafting.after = 2
    again = drafting.again({"counts": torch.tensor([9])})
    assert again.reads_all == dense
    for one in (again.readers,) if dense else (again, again.readers):
        assert sets(one.keys) == [[{1, 3, 7, 8}]]


def test_a_choice_of_neither_keys_nor_pages_cannot_be_read_again():
    with pytest.raises(ValueError, match="this layer's has neither"):
        Drafting().keep(Choice(attended=ops.Attended(torch.zeros(1, 1, 1, 1))))


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


@pytest.mark.parametrize("lengths", [[5, 5], [9, 5], [4, 12]])
@pytest.mark.parametrize("extra", [{}, {"softcap": 2.0}, {"sinks": True}])
def test_queries_of_a_verifying_pass_read_all_keys_before_them(lengths, extra):
    n, generator = 4, torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(shape, generator=generator)

    longest = max(lengths)
    q, k, v = (drawn(2, heads, longest, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    store = SlotCache(Geometry(HEADS, KV_HEADS, DIM, DIM), 2, torch.float32, torch.device("cpu"))
    store.reserve(longest)
    for b, length in enumerate(lengths):
        with store.row(b) as row:
            row.append(k[b : b + 1, :, :length], v[b : b + 1, :, :length])
    store.softcap, store.sink_logits = extra.get("softcap"), drawn(HEADS) if extra.get("sinks") else None
    newest = [torch.stack([x[b, :, length - n : length] for b, length in enumerate(lengths)]) for x in (q, k, v)]
    found = attend_newest(store, *newest, DIM**-0.5).out
    for b, length in enumerate(lengths):
        for i in range(n):
            end = length - n + i + 1
            how = {"lengths": torch.tensor([end]), "logits": store.logits(DIM**-0.5)}
            one = ops.attend(newest[0][b : b + 1, :, i : i + 1], k[b : b + 1], v[b : b + 1], **how)
            torch.testing.assert_close(found[b, :, i : i + 1], one.out[0])


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


def test_drafts_get_longer_where_they_are_accepted_and_shorter_where_not():
    length = DraftLength()
    first = length.next()
    for _ in range(30):
        length.learn(length.next(), length.next())
    assert first < length.next() == LONGEST
    for _ in range(30):
        length.learn(0, 1)
    assert length.next() == 1
    assert DraftLength(5).next() == 5
