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
    turns, at_once = Driver(method), Driver(method.changed(evict_every=EVERY))
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
    usual, told = Driver(method, EVERY), Driver(method.changed(evict_every=EVERY), EVERY)
    assert torch.equal(told.feed(tokens[:EVERY]), usual.feed(tokens[:EVERY]))
    assert torch.equal(told.feed_steps(tokens[EVERY:]), usual.feed_steps(tokens[EVERY:]))
    assert told.store.used < EVERY + 5 or method.name == "rocketkv"


@pytest.mark.parametrize("spec", SPECS)
def test_a_setting_that_is_not_used_is_not_recorded(spec):
    method = methods.parse(spec)
    assert "evict_every" not in method.settings()
    assert method.changed(evict_every=EVERY).settings()["evict_every"] == EVERY
    with pytest.raises(ValueError, match="evict_every must be an integer of at least 0, not -1"):
        method.changed(evict_every=-1)
