"""Decode steps that are recorded once and replayed give what steps give that the host runs one by one."""

import pytest
import torch
from matrix import LENGTHS, PROMPT, VARIANTS, Driver, Tokens, assert_same_state, close, deal, each, each_in_turn, padded

from foveate import methods
from foveate.lab.recorded import record
from foveate.runtime import replay
from tests.recorded import Replayed

pytestmark = pytest.mark.usefixtures("little_room")
RECORDED = [(name, method) for name, method in VARIANTS if not methods.replay_obstacle(method)]


def assert_same_counts(a, b):
    for name in ("decode_steps", "decode_rows", "prompt_tokens", "keys_available", "dense_steps"):
        assert getattr(a, name) == getattr(b, name), name
    assert a.own.keys() == b.own.keys()
    for name in ("keys_read", "tokens_evicted", *a.own):
        assert float(a[name]) == pytest.approx(float(b[name])), name


@each_in_turn("lengths", [LENGTHS[:1], LENGTHS], deal(0, variants=RECORDED))
def test_replays_equal_ordinary_steps(method, lengths, monkeypatch):
    """Also over growth of the cache, after which the step is recorded anew."""
    monkeypatch.setattr(replay, "ROOM", 1)
    prompts = [Tokens.random(1, length, seed=length) for length in lengths]
    batch, mask = padded(prompts, PROMPT)
    tokens = Tokens.random(len(lengths), 22, seed=1)
    plain, driver = Driver(method), Driver(method)
    for one in (plain, driver):
        one.feed(batch, mask)
    replayed = Replayed(driver)
    close(replayed.feed_steps(tokens), plain.feed_steps(tokens))
    assert replayed.use.replayed > 12
    assert 1 < replayed.use.captured <= 3 or method.evicts
    assert_same_counts(plain.layer.counters, driver.layer.counters)
    assert_same_state(plain.store, driver.store)


KEEPING = [(name, method) for name, method in RECORDED if not method.evicts.in_decode]


@each([one for one in KEEPING if one[1].evicts])
def test_a_prompt_after_replays_evicts_and_counts(method):
    """Counters are the layer's own; a captured step has put them on the device."""
    plain, driver = Driver(method), Driver(method)
    first, other = Tokens.random(1, PROMPT + 6, seed=1), Tokens.random(1, PROMPT, seed=2)
    steps = Replayed(driver)
    for one, feed in ((plain, plain.feed_steps), (driver, steps.feed_steps)):
        one.feed(first[:PROMPT])
        feed(first[PROMPT:])
        again = Driver(method)
        again.layer.counters = one.layer.counters
        again.feed(other)
    assert float(plain.layer.counters.tokens_evicted) > 0
    assert_same_counts(plain.layer.counters, driver.layer.counters)


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"page_size": 11},
        {"page_size": 20, "prior": 0.0, "score": "spread"},
        {"page_size": 2, "tail": 1, "sinks": 0},
        {"tail": 1, "sinks": 5, "page_size": [8, 32]},
        {"page_size": [2, 4, 12], "compressor": "attention", "bias": "entropy"},
    ],
    ids=str,
)
def test_pages_made_between_replays(settings, monkeypatch):
    """Of every row as many as are due, by the device's numbers, over growth of the cache and to its very end."""
    monkeypatch.setattr(replay, "ROOM", 1)
    method = methods.make("luka", **{"page_size": 4, "sinks": 2, "tail": 9, "top_k": 2} | settings)
    assert method.replay.maintains
    prompts = [Tokens.random(1, length, seed=length) for length in (61, 50, 7)]
    batch, mask = padded(prompts, PROMPT)
    tokens = Tokens.random(3, 150, seed=1)
    plain, driver = Driver(method), Driver(method)
    for one in (plain, driver):
        one.feed(batch, mask)
    recorded = []
    replayed = Replayed(driver, lambda run: recorded.append(run) or record(run))
    close(replayed.feed_steps(tokens), plain.feed_steps(tokens))
    steps = sum("_maintain" not in run.__qualname__ for run in recorded)
    assert steps == replayed.use.captured < len(recorded) <= 2 * steps
    assert replayed.use.replayed > 140
    assert_same_counts(plain.layer.counters, driver.layer.counters)
    assert_same_state(plain.store, driver.store)


def test_pages_are_made_where_that_cannot_be_recorded():
    def refuse(run):
        recording = record(run)
        if "_maintain" in run.__qualname__:
            raise RuntimeError("no")
        return recording

    method = methods.make("luka", page_size=4, tail=9, top_k=2)
    tokens = Tokens.random(2, PROMPT + 40)
    plain, driver = Driver(method), Driver(method)
    for one in (plain, driver):
        one.feed(tokens[:PROMPT])
    with pytest.warns(UserWarning, match=r"maintenance after decode steps could not be captured \(no\)"):
        found = Replayed(driver, refuse).feed_steps(tokens[PROMPT:])
    close(found, plain.feed_steps(tokens[PROMPT:]))
    assert_same_state(plain.store, driver.store)


@each(deal(1, variants=RECORDED))
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


def test_a_recording_is_of_its_options():
    driver, tokens = Driver(methods.Dense()), Tokens.random(1, PROMPT + 6)
    driver.feed(tokens[:PROMPT])
    replayed, outs = Replayed(driver), []
    run = lambda factor, **given: replayed.run(**given).out * factor  # noqa: E731
    plain = Driver(methods.Dense())
    plain.feed(tokens[:PROMPT])
    replayed.kind = Tokens
    for at, factor in enumerate((1, 1, 1, 3, 3, 3), PROMPT):
        outs.append(replayed.steps(replayed.layers, run, vars(tokens[at : at + 1]), {"factor": factor}).clone())
        close(outs[-1], plain.feed_steps(tokens[at : at + 1]) * factor)
    assert replayed.use.captured == 2
