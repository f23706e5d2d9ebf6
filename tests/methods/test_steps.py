"""Decode steps that are recorded once and replayed give what steps give that the host runs one by one."""

import pytest
import torch
from matrix import LENGTHS, PROMPT, VARIANTS, Driver, Tokens, assert_same_state, close, padded

from foveate.integrations.transformers import steps as steps_module
from tests.recorded import Replayed

RECORDED = [(name, method) for name, method in VARIANTS if not method.graph_obstacle]
each_recorded = pytest.mark.parametrize("method", [m for _, m in RECORDED], ids=[name for name, _ in RECORDED])


def assert_same_counts(a, b):
    for name in ("decode_steps", "decode_rows", "indices_reused", "prompt_tokens", "keys_available"):
        assert getattr(a, name) == getattr(b, name), name
    for name in ("keys_read", "pages_refined", "tokens_evicted", "selections_capped"):
        assert float(getattr(a, name)) == pytest.approx(float(getattr(b, name))), name


@each_recorded
@pytest.mark.parametrize("lengths", [LENGTHS[:1], LENGTHS], ids=["one", "ragged"])
def test_replays_equal_ordinary_steps(method, lengths, monkeypatch):
    """Also over growth of the cache, after which the step is recorded anew."""
    monkeypatch.setattr(steps_module, "ROOM", 1)
    prompts = [Tokens.random(1, length, seed=length) for length in lengths]
    batch, mask = padded(prompts, PROMPT)
    tokens = Tokens.random(len(lengths), 90, seed=1)
    plain, driver = Driver(method), Driver(method)
    for one in (plain, driver):
        one.feed(batch, mask)
    replayed = Replayed(driver)
    close(replayed.feed_steps(tokens), plain.feed_steps(tokens))
    assert replayed.use.replayed > (50 if method.name.startswith("luka") else 80)
    assert replayed.use.captured <= 3
    assert_same_counts(plain.layer.counters, driver.layer.counters)
    assert_same_state(plain.store, driver.store)


@each_recorded
def test_what_the_host_does_in_between_is_seen(method):
    """Ordinary steps, rows in another order, and a second prompt between replays."""
    tokens = Tokens.random(3, PROMPT + 40)
    plain, driver = Driver(method), Driver(method)
    for one in (plain, driver):
        one.feed(tokens[:PROMPT])
    replayed, at = Replayed(driver), PROMPT
    for act in (
        lambda one: one.feed(tokens[plain.layer.seen :][:1]),
        lambda one: one.layer.reorder_cache(torch.tensor([2, 0, 0])),
        lambda one: one.layer.counters.reset(),
        lambda one: None,
    ):
        close(replayed.feed_steps(tokens[at : at + 5]), plain.feed_steps(tokens[at : at + 5]))
        act(driver), act(plain)
        at = plain.layer.seen
    close(replayed.feed_steps(tokens[at : at + 5]), plain.feed_steps(tokens[at : at + 5]))
    assert_same_counts(plain.layer.counters, driver.layer.counters)
    assert_same_state(plain.store, driver.store)
