"""Dense attention in the place of decode steps whose contexts are short."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from matrix import PROMPT, VARIANTS, Driver, Tokens, close, deal, each

import foveate
from foveate import methods
from foveate.calibration import say_once
from foveate.lab.recorded import record
from foveate.runtime import EngineSteps, layer, policy, replay
from foveate.state import Geometry
from tests.helpers import generate, tiny_model, tokens
from tests.recorded import Replayed

EVER = 1 << 40
ABLE = [(name, method) for name, method in VARIANTS if method.sparse_from_tokens is not None]
DENSE = [(name, method) for name, method in ABLE if not method.evicts]
PAIRS = [(name, method) for name, method in ABLE if method.evicts]


def tracks_recent(method):
    if getattr(method, "every", 1) > 1:  # and scores at other tokens than without dense steps
        return True
    return getattr(method, "tracks_recent", False) or getattr(method, "weighs_mass", False)


def test_no_method_that_evicts_reads_everything():
    """A composition reads everything that its first method keeps, if a user asks for it."""
    for name, method in VARIANTS:
        pair = len(method.parts) == 2 and not method.evicts.in_decode
        assert not method.evicts or method.sparse_from_tokens == (0 if pair else None), name
    for name in ("kascade", "oracle_topk", "quest", "pages", "omnikv", "lessismore", "luka", "luka_paper"):
        assert methods.make(name).sparse_from_tokens is not None, name
    few = methods.make("luka", page_size=16, top_k=3, score="spread")
    kascade, pages, quest, luka = (methods.make(name) for name in ("kascade", "pages", "quest", "luka"))
    assert few.sparse_from_tokens == kascade.sparse_from_tokens < pages.sparse_from_tokens == quest.sparse_from_tokens
    assert methods.make(luka, page_size=16).sparse_from_tokens == kascade.sparse_from_tokens
    assert pages.sparse_from_tokens < luka.sparse_from_tokens
    for more in (
        methods.make(few, top_k=9),
        methods.make(few, top_k=0.5),
        methods.make(few, pool="layer"),
        methods.make(few, bias="none"),
    ):
        assert luka.sparse_from_tokens == more.sparse_from_tokens


@each(DENSE)
def test_short_contexts_are_read_whole(method):
    given = Tokens.random(2, PROMPT + 12)
    short, dense = Driver(method, PROMPT), Driver(methods.make("dense"), PROMPT)
    short.layer.dense_below = EVER
    for one in (short, dense):
        one.feed(given[:PROMPT])
    close(short.feed_steps(given[PROMPT:]), dense.feed_steps(given[PROMPT:]))
    counters = short.layer.counters
    assert counters.dense_steps == counters.decode_steps == 12
    assert float(counters.keys_read) == counters.keys_available
    dense_steps = {"mass_read": counters.decode_rows, "pages_refined": 0, "indices_reused": 0}
    assert counters.own == {name: dense_steps[name] for name in method.counters}


@each(PAIRS)
def test_short_contexts_of_a_composition_are_read_as_its_first_method_reads_them(method):
    given = Tokens.random(2, PROMPT + 12)
    short, alone = Driver(method, PROMPT), Driver(method.evicting, PROMPT)
    short.layer.dense_below = EVER
    for one in (short, alone):
        one.feed(given[:PROMPT])
    close(short.feed_steps(given[PROMPT:]), alone.feed_steps(given[PROMPT:]))
    counters = short.layer.counters
    assert counters.dense_steps == 12
    assert float(counters.keys_read) == float(alone.layer.counters.keys_read)


@each(deal(0, variants=[*DENSE, *PAIRS]))
def test_longer_ones_find_what_they_need(method):
    """Outputs after dense steps are those that they would be, but for what was not looked back on."""
    given = Tokens.random(2, PROMPT + 22)
    short, plain = Driver(method, PROMPT), Driver(method, PROMPT)
    for one in (short, plain):
        one.feed(given[:PROMPT])
        one.layer.dense_below = EVER if one is short else 0
        one.feed_steps(given[PROMPT:][:13])
        one.layer.dense_below = 0
    found, expected = (one.feed_steps(given[PROMPT + 13 :]) for one in (short, plain))
    assert short.layer.counters.dense_steps == 13
    assert plain.layer.counters.dense_steps == 0
    assert short.store.rows == plain.store.rows
    if tracks_recent(method):
        assert found.isfinite().all()
    else:
        close(found, expected)


@each([one for one in deal(1, variants=DENSE) if not methods.replay_obstacle(one[1])])
@pytest.mark.usefixtures("little_room")
def test_replayed_steps_turn_sparse_as_the_cache_grows(method, monkeypatch):
    monkeypatch.setattr(replay, "ROOM", 1)
    given = Tokens.random(2, PROMPT + 32)
    driver, dense, sparse = (Driver(one, PROMPT) for one in (method, methods.make("dense"), method))
    for one in (driver, dense, sparse):
        one.feed(given[:PROMPT])
    fits = 20
    driver.layer.dense_below = 2 * (PROMPT + fits) + 1
    replayed = Replayed(driver)
    found, whole, expected = (one.feed_steps(given[PROMPT:]) for one in (replayed, dense, sparse))
    close(found[:, :, :fits], whole[:, :, :fits])
    assert driver.layer.counters.dense_steps == fits
    assert replayed.use.replayed > 22
    assert replayed.use.captured > 1
    if tracks_recent(method):
        assert torch.any((found - whole)[:, :, fits:].abs() > 1e-3)
    else:
        close(found[:, :, fits:], expected[:, :, fits:])


def test_of_a_model():
    model, how = tiny_model("llama"), {"input_ids": tokens(61), "new": 12}
    with foveate.attached(model, "dense"):
        expected = generate(model, **how)
    for method in (
        "quest:top_k=16,page_size=4,dense_layers=0",
        "kascade_paper:anchors=1,top_k=9,min_k=4,decode_only=true",
    ):
        with foveate.attached(model, method, dense_below=4096):
            assert torch.equal(generate(model, **how), expected)
            stats = foveate.stats(model)
            assert {layer.dense_steps for layer in stats.layers} == {11}
            assert stats.summary()["keys_read_share"] == 1
            assert "11 decode steps read everything" in str(stats)
        with foveate.attached(model, method):  # on a CPU never by itself
            generate(model, **how)
            stats = foveate.stats(model, reset=True)
            assert {layer.dense_steps for layer in stats.layers} == {0}
            assert stats.summary()["keys_read_share"] < 0.8
            assert "read everything" not in str(stats)


@pytest.mark.parametrize(
    "spec",
    [
        "snapkv:top_k=17,window=8,kernel_size=3+quest:top_k=9,page_size=3,dense_layers=0",
        "adakv:top_k=17,window=8,kernel_size=3+twilight:p=0.3,min_k=6",
        "rocketkv:keep=25,top_k=9,page_size=3,window=8,kernel_size=3",
    ],
)
def test_of_a_model_under_a_composition(spec):
    """Captured or not, the kept tokens are read whole until they are more than `dense_below`."""
    outs = []
    for cuda_graph in (False, True):
        model = tiny_model("llama")
        attachment = foveate.attach(model, spec, dense_below=2 * 45, cuda_graph=False)
        if cuda_graph:
            attachment.graphs.mode, attachment.graphs.recorder = "auto", record
        outs.append(generate(model, input_ids=tokens(61, 2), new=40))
        stats = foveate.stats(model)
        assert {layer.dense_steps for layer in stats.layers} <= set(range(1, 20))
        assert cuda_graph == (stats.graphs.replayed > 30)
        outs.append([layer.dense_steps for layer in stats.layers])
    assert torch.equal(outs[0], outs[2])
    assert outs[1] == outs[3]


@pytest.mark.parametrize(
    "spec", ["snapkv:top_k=9,window=8", "streaming:window=9+twilight:p=0.3", "duo:heads=[0],recent=8"]
)
def test_a_bound_without_effect_is_said(spec):
    say_once.cache_clear()
    model = tiny_model("llama")
    with pytest.warns(UserWarning, match="dense_below=4096 has no effect, because this method never decodes densely"):
        foveate.attach(model, spec, dense_below=4096)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for method, below in ((spec, "auto"), (spec, 0), ("dense", 4096), ("quest", 4096)):
            foveate.attach(model, method, dense_below=below)


def test_dense_steps_read_all_of_the_attention_to_pages():
    model, found = tiny_model("llama"), {}
    for below in (0, 70, 4096):
        with foveate.attached(model, "pages:page_size=4,top_k=24", dense_below=below):
            generate(model, input_ids=tokens(61), new=20)
            stats = foveate.stats(model)
        found[below] = [layer.mass_read_share for layer in stats.layers]
        assert {layer.dense_steps for layer in stats.layers} == {{0: 0, 70: 8, 4096: 19}[below]}
        assert stats.summary()["mass_read_share"] == pytest.approx(sum(found[below]) / len(found[below]))
    assert found[4096] == [1.0] * len(found[0])
    for none, some in zip(found[0], found[70]):
        assert none < 0.9
        assert 8 / 19 < some < 1  # the other steps read some of it


@pytest.mark.parametrize("below", [60, 66, 90, 1000])
def test_replays_and_ordinary_steps_agree(below):
    """It is the tokens that count, not the room that there is for them, which recorded steps have more of."""
    outs, counts = [], []
    for cuda_graph in (False, True):
        model = tiny_model("llama")
        attachment = foveate.attach(
            model, "quest:top_k=16,page_size=4,dense_layers=0", dense_below=4 * below, cuda_graph=False
        )
        if cuda_graph:
            attachment.graphs.mode, attachment.graphs.recorder = "auto", record
        outs.append(generate(model, input_ids=tokens(61, 4), new=40))
        counts.append({layer.dense_steps for layer in foveate.stats(model).layers})
    assert torch.equal(*outs)
    assert counts[0] == counts[1] == {min(39, max(0, below - 62))}
    assert foveate.stats(model).graphs.replayed > 30


@pytest.mark.parametrize("below", [-1, 0.5, True, "always", None])
def test_bad_bounds(below):
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="dense_below must be a number of tokens, at least 0, or 'auto', not"):
        foveate.attach(model, "quest", dense_below=below)
    assert "foveate" not in model.__dict__


@pytest.mark.parametrize(
    ("heads", "dim", "expected"), [(8, 128, 16384), (2, 128, 65536), (3, 64, 87381), (32, 128, 16384), (8, 64, 32768)]
)
def test_fewer_bytes_a_token_take_more_tokens_to_pay(heads, dim, expected):
    assert Geometry(32, heads, dim, dim).at_least(16384) == expected


@pytest.mark.parametrize(("kv_heads", "sparse_from"), [(8, 32768), (2, 131072)])
def test_auto_counts_the_bytes_of_a_token(kv_heads, sparse_from, monkeypatch):
    """On a GPU, in the caches of Transformers and of engines."""
    monkeypatch.setattr(policy, "runs_kernel", lambda verb: True)
    method, geometry, device = methods.make("kascade"), Geometry(16, kv_heads, 128, 128), torch.device("cuda")
    store = SimpleNamespace(device=device, geometry=geometry, batch_size=2)
    one = SimpleNamespace(dense_below="auto", method=method, cache=store)
    held = sparse_from // 2
    assert [layer.Layer.decodes_densely(one, tokens) for tokens in (held - 1, held)] == [True, False]
    for ranks, bound in ((None, sparse_from), (2, 2 * sparse_from), (8, 2 * sparse_from)):  # ranks exchange scores
        steps = SimpleNamespace(device=device, methods={0: method}, ranks=ranks and SimpleNamespace(size=ranks))
        assert EngineSteps._first_sparse(steps, "auto", geometry) == bound
    steps.methods = {0: methods.make("kascade", pool="kv_head")}  # each head chooses for itself
    assert EngineSteps._first_sparse(steps, "auto", geometry) == sparse_from


@pytest.mark.parametrize(
    ("dense_below", "expected"), [("auto", [True, True, False]), (16 * 2000, [True, False, False])]
)
def test_auto_reads_short_sequences_whole_however_many(dense_below, expected, monkeypatch):
    """On a GPU, in the caches of Transformers and of engines, where rows differ in length."""
    monkeypatch.setattr(policy, "runs_kernel", lambda verb: True)
    method, geometry = methods.make("kascade"), Geometry(16, 8, 128, 128)
    store = SimpleNamespace(device=torch.device("cuda"), geometry=geometry, batch_size=16)
    one = SimpleNamespace(dense_below=dense_below, method=method, cache=store)
    lengths = [1999, 4095, 4096]
    assert [layer.Layer.decodes_densely(one, tokens) for tokens in lengths] == expected
    if dense_below == "auto":
        monkeypatch.setattr(EngineSteps, "_first_sparse", lambda *given: 32768)  # as on a GPU
    steps = EngineSteps({0: method}, torch.device("cpu"), dense_below, geometry)
    assert [bool(steps._is_short(tokens, 16)) for tokens in lengths] == expected
    assert steps._is_short(torch.tensor(lengths), torch.tensor(16)).tolist() == expected
