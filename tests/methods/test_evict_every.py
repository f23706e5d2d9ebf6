"""Eviction while a prompt is read: the same as of a conversation whose turns follow each other without an answer."""

import pytest
import torch
from matrix import PROMPT, Driver, Tokens, assert_same_state, close

from foveate import methods

EVERY = 19
SPECS = [
    "uniform:top_k=0.2,window=8",
    "h2o:top_k=12,window=4",
    "tova:top_k=0.3,min_k=6",
    "snapkv:top_k=0.2,window=4,kernel_size=3",
    "adakv:top_k=9,window=4,kernel_size=3,pooling=max",
    "rocketkv:keep=0.4,top_k=9,page_size=3,window=4,kernel_size=3",
    "lte:score=key_norm,top_k=0.3,window=6,sinks=2",
]


@pytest.mark.parametrize("spec", SPECS)
def test_it_is_that_of_turns(spec):
    tokens, method = Tokens.random(2, PROMPT + 5), methods.parse(spec)
    turns, at_once = Driver(method), Driver(methods.make(method, evict_every=EVERY))
    outs = []
    for first in range(0, PROMPT, EVERY):
        turns.layer.phase.prompt_end = end = min(first + EVERY, PROMPT)
        outs.append(turns.feed(tokens[first:end]))
    close(at_once.feed(tokens[:PROMPT]), torch.cat(outs, 2))
    assert_same_state(at_once.store, turns.store)
    close(at_once.feed_steps(tokens[PROMPT:]), turns.feed_steps(tokens[PROMPT:]))


@pytest.mark.parametrize("spec", SPECS)
def test_a_prompt_that_is_no_longer_is_dense_as_ever(spec):
    tokens, method = Tokens.random(1, EVERY + 5), methods.parse(spec)
    usual, told = Driver(method, EVERY), Driver(methods.make(method, evict_every=EVERY), EVERY)
    assert torch.equal(told.feed(tokens[:EVERY]), usual.feed(tokens[:EVERY]))
    assert torch.equal(told.feed_steps(tokens[EVERY:]), usual.feed_steps(tokens[EVERY:]))
    assert told.store.used < EVERY + 5 or method.name == "rocketkv"


@pytest.mark.parametrize("spec", SPECS)
def test_rows_of_one_length_that_have_read_different_parts_of_it(spec):
    """In turns of 9 and 5 tokens before a second one of 6 and 10, to which more comes for both."""
    method = methods.make(methods.parse(spec), evict_every=EVERY)
    tokens, more = Tokens.random(2, 15), Tokens.random(2, 33, seed=1)
    mask = torch.ones(2, 19, dtype=torch.bool)
    mask[1, :4] = mask[0, 9:13] = False
    batch = Tokens.random(2, 19, seed=2)
    for name in ("q", "k", "v"):
        given, new = getattr(batch, name), getattr(tokens, name)
        given[0, :, :9], given[0, :, 13:] = new[0, :, :9], new[0, :, 9:]
        given[1, :, 4:] = new[1]
    together = Driver(method, 9)
    together.feed(batch[:9], mask[:, :9])
    together.layer.phase.prompt_end = 19 + 33
    together.feed(batch[9:], mask[:, :19])
    assert together.store.rows["observed"] == [6, 10]
    out = together.feed(more)
    for b, first in enumerate((9, 5)):
        alone = Driver(method, first)
        alone.feed(tokens.rows([b])[:first])
        alone.layer.phase.prompt_end = 15 + 33
        close(out[b : b + 1], alone.feed(tokens.rows([b])[first:].cat(more.rows([b])))[:, :, -33:])
        assert together.store.rows["live"][b] == alone.store.rows["live"][0]


def test_a_chunk_of_padding_alone_gives_nothing():
    driver, mask = Driver(methods.parse(SPECS[1]), 40), torch.ones(1, 40, dtype=torch.bool)
    mask[:, :10] = False
    assert not driver.feed(Tokens.random(1, 10), mask[:, :10]).any()
    assert driver.feed(Tokens.random(1, 30), mask).any()


@pytest.mark.parametrize("spec", SPECS)
def test_a_negative_number_is_refused(spec):
    method = methods.parse(spec)
    with pytest.raises(ValueError, match="evict_every must be an integer of at least 0, not -1"):
        methods.make(method, evict_every=-1)
