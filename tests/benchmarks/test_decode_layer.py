"""Level `layer` of the decode bench, as it is replayed on a GPU: here the same turns are taken without a graph."""

import pytest
import torch

from benchmarks import cold_cache_timing as cold
from benchmarks import decode, decode_layer, layer_kinds
from foveate.methods import parse
from foveate.runtime import capture
from foveate.state import Counters, Evicts
from foveate.state.borrowed import branch_of

SMALL = {"batches": (2,), "heads": 8, "kv_heads": 2, "head_dim": 16, "layers": 12, "level": "kernel"}
SMALL |= {"dtype": "float32", "seed": 0, "device": "cpu"}
SPECS = (
    "dense",
    "kascade_paper:decode_only=true,anchors=[1],top_k=0.2,min_k=16",
    "quest:page_size=8,top_k=0.3",
    "luka:page_size=8,tail=16,top_k=2,prior=0.5",
    "luka:page_size=[4,8],tail=16,top_k=0.3",
    "h2o:top_k=64,window=8",
    "tova:top_k=64",
    "streaming:window=64",
    "snapkv:top_k=64,window=8",
)
KINDS = [(spec, kind.name) for spec in SPECS for kind in layer_kinds.kinds(parse(spec), 12)]


def layers(spec, name):
    """The layer of this kind and the one before it, as freshly made each time; and what the layer attended to."""
    plan = decode.Plan((spec,), (200,), **SMALL)
    (kind,) = (kind for kind in layer_kinds.kinds(parse(spec), 12) if kind.name == name)
    generator = torch.Generator().manual_seed(0)
    caches = [decode._drawn(plan, 2, 200, generator) for _ in range(2)]
    queries = torch.randn(2, 8, 64, 16, generator=generator)
    layer, chooser = decode._layers(plan, kind, caches, queries)
    other = decode._layers(plan, kind, caches, queries)[0] if chooser is None else chooser
    outs = []
    watched = layer._replace(decode=lambda cache: outs.append(layer.decode(cache).clone()))
    return watched, other, kind.policy, decode._period(kind.policy), outs


def take(replayed):
    with capture.capturing([replayed.rows]):
        for turn in replayed.turns():
            if turn.before is not None:
                turn.before()
            turn.step()


def live(replayed):
    """How many slots hold a token, where some are given up."""
    positions = (one.cache.tensors.get("positions") for one in (replayed.layer, replayed.other))
    return [None if of is None else int((of >= 0).sum()) for of in positions]


@pytest.mark.parametrize(("spec", "name"), KINDS)
def test_tokens_are_those_of_ordinary_steps(spec, name):
    layer, other, policy, period, outs = layers(spec, name)
    replayed = decode_layer.Replayed(layer, other, policy, period)
    take(replayed)
    ordinary, before, _, _, expected = layers(spec, name)
    k, v = decode_layer.newest(ordinary.cache)
    for _ in range(1 + max(1, period)):
        for one in (before, ordinary):
            one.cache.forward.clear()
        before.token(k, v)
        ordinary.token(k, v)
    assert len(outs) == len(expected)
    for out, wanted in zip(outs, expected):
        torch.testing.assert_close(out, wanted)
    moved, filled = replayed.rows.numbers.clone(), live(replayed)
    replayed.again()
    assert (moved - replayed.rows.numbers)[0].tolist() == [max(1, period)] * 2
    for _ in range(3):
        replayed.again()
        take(replayed)
    assert torch.equal(replayed.rows.numbers, moved)
    assert live(replayed) == filled
    if not policy.evicts and "prior" not in spec and spec != "luka:page_size=[4,8],tail=16,top_k=0.3":
        torch.testing.assert_close(outs[-1], expected[-1])  # nothing goes by the attention of the tokens before


@pytest.mark.parametrize("spec", ["dense", "luka:page_size=8,tail=16,top_k=2"])
def test_what_is_timed(spec, monkeypatch):
    """A token; or with its share of what is done now and then. Everything is done once before it is recorded."""
    layer, other, policy, period, outs = layers(spec, parse(spec).name)
    replayed, started = decode_layer.Replayed(layer, other, policy, period), len(outs)
    graphs = []

    def recorded(turns, start, number):
        graphs.append((sum(turn.step is not cold._nothing for turn in turns), start == replayed.again))
        return lambda: 1.0

    monkeypatch.setattr(cold, "_recorded", recorded)
    monkeypatch.setattr(cold, "_median", lambda measure: 32.0)
    before = layer.cache.counters.decode_steps
    assert replayed.ms() == 32.0 / max(1, period)
    tokens = max(1, period)
    assert len(outs) - started == layer.cache.counters.decode_steps - before == tokens
    steps = tokens + 2 if period else 1
    assert graphs == [(steps, True), (steps, True), (0, True)]
    monkeypatch.setattr(cold, "_recorded", lambda *args: None)
    assert replayed.ms() is None


def test_maintenance_is_timed_by_itself_and_leaves_the_row_numbers_on_the_host(monkeypatch):
    """It runs twice before it is timed; what layers share is done the first time of a round."""
    layer, _, policy, _, _ = layers("luka:page_size=8,tail=16,top_k=2", "luka")
    runs, capturing = [], []
    maintain = type(policy.replay).maintain_captured
    monkeypatch.setattr(
        type(policy.replay), "maintain_captured", lambda self, cache: runs.append(cache) or maintain(self, cache)
    )
    monkeypatch.setattr(
        decode.breakdown,
        "total",
        lambda run: capturing.append(layer.cache.device_state.rows.capturing) or run() or 8.0 - len(runs),
    )
    before = {name: list(numbers) for name, numbers in layer.cache.rows.items()}
    assert decode._between_steps(policy, layer.cache) == (4.0, 1.0)
    assert capturing == [True] * 4
    assert layer.cache.device_state is None
    assert layer.cache.rows == before


def test_what_a_layer_reads_is_counted_by_token():
    """Of all tokens that are taken before anything is recorded: here of 201 to 202."""
    layer, other, policy, period, _ = layers("dense", "dense")
    replayed = decode_layer.Replayed(layer, other, policy, period)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cold, "added", lambda turns, start: 1.0)
        replayed.ms()
    assert decode._bytes_read(layer) == 2 * 201.5 * layer.cache.counters.bytes_per_key


def test_a_library_stores_its_token_in_one_place():
    plan = decode.Plan(("dense",), (200,), **SMALL)
    cache = branch_of(decode._drawn(plan, 2, 200, torch.Generator().manual_seed(0)), {}, Evicts.NEVER, Counters(), {})
    lengths = []
    step = decode_layer.TimedLayer(cache, lambda cache: lengths.append(cache.keys.shape[2])).newest_again()
    k, v = decode_layer.newest(cache)
    cache.keys[:, :, -1:].zero_()
    cache.values[:, :, -1:].zero_()
    for _ in range(3):
        step()
    assert lengths == [201] * 3
    assert torch.equal(cache.keys[:, :, -1:], k)
    assert torch.equal(cache.values[:, :, -1:], v)


def test_steps_that_are_not_recorded_are_timed_one_by_one(monkeypatch):
    """On a GPU those that could not be recorded, with layers made anew; rare steps count on average."""
    how, timed = [], []
    monkeypatch.setattr(decode_layer.Replayed, "ms", lambda replayed: how.append("replayed"))
    monkeypatch.setattr(decode, "_bytes_read", lambda layer: 7.0)

    def one_by_one(layer, chooser, period):
        how.append("one by one")
        timed.append(layer)
        return 2.0, 18.0

    monkeypatch.setattr(decode_layer, "one_by_one", one_by_one)
    for spec in ("dense", "luka:page_size=16,tail=16,score=spread"):
        plan, queries = decode.Plan((spec,), (200,), **SMALL), torch.randn(2, 8, 64, 16)
        (kind,) = layer_kinds.kinds(parse(spec), 12)
        caches = [decode._drawn(plan, 2, 200, torch.Generator().manual_seed(0))]
        layer, chooser = decode._layers(plan, kind, caches, queries)
        how.clear()
        on_a_gpu = decode.Plan(**vars(plan) | {"device": "cuda"})
        found = decode._tokens(on_a_gpu, kind, caches, queries, layer, chooser)
        assert how == ["replayed", "one by one"]
        assert timed[-1] is not layer
        assert found == ((3.0 if "luka" in spec else 2.0, False), 7.0)
