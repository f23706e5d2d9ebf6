"""A layer's prompt waits for no device: what must be read is read once, at the end of the pass of all layers."""

import pytest
import torch
from matrix import PROMPT, VARIANTS, Driver, Tokens, each

import foveate
from foveate import ops
from foveate.runtime import Layer
from tests.helpers import generate, tiny_model, tokens
from tests.problems import Waits

EVICTING = [(name, method) for name, method in VARIANTS if method.evicts]


@pytest.fixture(autouse=True)
def window(monkeypatch):
    """The reference of windowed attention reads the windows, and its kernel does not: dense attention stands in."""

    def attend_window(q, kv, *, logits, lower, sinks, offset):
        return ops.attend_causal(q, kv, logits=logits, offset=offset)

    monkeypatch.setattr(ops, "attend_window", attend_window)


@each(EVICTING)
def test_a_prompt_waits_for_nothing(method):
    """But where KV heads differ, for how many tokens they keep: once for each eviction."""
    driver, some = Driver(method), Tokens.random(2, PROMPT)
    with Waits() as waits:
        driver.feed(some)
    assert max(driver.store.rows["counts"]) < PROMPT
    if not method.evicts.unevenly:
        assert not waits.names
    else:  # numbers that differ are sent to a GPU without a wait
        assert {*waits.names} <= {"tolist", "lift_fresh"}
        assert 1 <= waits.names.count("tolist") <= -(-PROMPT // (method.prompt_evicts_every or PROMPT))


@pytest.mark.parametrize("spec", ["snapkv:top_k=20,window=8", "streaming:window=13", "uniform:top_k=20,window=8"])
def test_a_pass_reads_once_for_all_layers(spec, monkeypatch):
    """The mode stands for a GPU, whose numbers are not read in the layers."""
    attend, within = Layer.attend, []
    waits = Waits()

    def watched(*given):
        before = len(waits.names)
        out = attend(*given)
        within.extend(waits.names[before:])
        return out

    monkeypatch.setattr(Layer, "attend", watched)
    model = tiny_model()
    with foveate.attached(model, spec), waits:
        generate(model, tokens(60), 1)
    assert not within
    assert waits.names.count("tolist") == 1


@torch.inference_mode()
def test_a_pass_without_a_cache_reads_once_for_all_evictions():
    model = tiny_model()
    with foveate.attached(model, "h2o:top_k=20,window=8,evict_every=17"), Waits() as waits:
        model(tokens(60), use_cache=False)
    assert waits.names.count("tolist") == 1
