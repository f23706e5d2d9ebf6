"""A cache whose pass, or other change, was stopped by an exception is refused, and so are its copies."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

import foveate
from foveate import methods
from foveate.lab.recorded import record
from foveate.runtime import ReplayedSteps, capture, handover, replay
from foveate.runtime.layer import Layer
from foveate.state import SlotCache, channels
from foveate.state.contiguous import Contiguous
from tests.helpers import cached, tiny_model, tokens

STOPS = [torch.OutOfMemoryError, KeyboardInterrupt]
REFUSED = "was interrupted, so its layers may hold different tokens; start a new cache"


def spec(name):
    return methods.make(name, **methods.get(name).about.small_budget).spec


def raising(kind, call=0):
    """What raises in its call of this number, and before it does what it stands in for."""

    def stand_in(original):
        count = iter(range(1 << 30))

        def stopped(*args, **kwargs):
            if next(count) == call:
                raise kind
            return original(*args, **kwargs)

        return stopped

    return stand_in


def refused(model, cache, path):
    """Check that nothing goes on with the cache."""
    ids = tokens(cache.get_seq_length() + 3)
    for one in (cache, copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        uses = [
            lambda one=one: model.generate(ids, max_new_tokens=2, **cached(one)),
            lambda one=one: model(ids[:, -3:], **cached(one)),
            lambda one=one: one.crop(-1),
            lambda one=one: one.reorder_cache(torch.tensor([0])),
            lambda one=one: one.activate_past_recording(),
            lambda one=one: foveate.save_cache(model, one, path),
        ]
        for use in uses:
            with pytest.raises(ValueError, match=REFUSED):
                use()
    assert not path.exists()


@pytest.mark.parametrize("kind", STOPS)
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("at", ["append", "write_step", "choose", "_prompt_rows", "o_proj"])
@pytest.mark.parametrize("name", ["dense", "h2o", "quest"])
def test_a_pass_that_is_stopped_in_a_layer(kind, layer, at, name, tmp_path, monkeypatch):
    model = tiny_model()
    foveate.attach(model, spec(name), cuda_graph=False)
    cache, ids = foveate.Cache(model), tokens(60)
    with monkeypatch.context() as stop, torch.no_grad():
        owner = {
            "append": SlotCache,
            "write_step": SlotCache,
            "_prompt_rows": Layer,
            "choose": type(cache.layers[layer].method),
            "o_proj": type(model.model.layers[0].self_attn.o_proj),
        }[at]
        if at == "o_proj":
            target = model.model.layers[layer].self_attn.o_proj
            stop.setattr(target, "forward", raising(kind, 2)(target.forward))
        else:
            stop.setattr(owner, at, raising(kind, layer)(getattr(owner, at)))
        with pytest.raises(kind):
            model.generate(ids, max_new_tokens=6, do_sample=False, **cached(cache))
    refused(model, cache, tmp_path / "cache")
    cache.reset()
    fresh = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False, **cached(cache)), fresh)


@pytest.mark.parametrize("change", ["crop", "reorder_cache", "begin"])
def test_another_change_that_is_stopped(change, tmp_path, monkeypatch):
    model = tiny_model()
    foveate.attach(model, "h2o:top_k=12,window=4")
    cache = foveate.Cache(model)
    cache.activate_past_recording()
    with torch.no_grad():
        for part in (tokens(40), tokens(1), tokens(1)):
            model(part, **cached(cache))
    name = {"crop": "restore", "reorder_cache": "take_rows", "begin": "compact"}[change]
    given = {"crop": -1, "reorder_cache": torch.tensor([0, 0]), "begin": 42}[change]
    more = [False] if change == "begin" else []
    cache.assisted = change == "begin"
    with monkeypatch.context() as stop:
        stop.setattr(SlotCache, name, raising(KeyboardInterrupt, 1)(getattr(SlotCache, name)))
        with pytest.raises(KeyboardInterrupt):
            getattr(cache, change)(given, *more)
    refused(model, cache, tmp_path / "cache")


@pytest.mark.parametrize("at", ["_maintain", "_ready"])
def test_a_replayed_step_that_is_stopped(at, tmp_path, monkeypatch):
    model = tiny_model()
    foveate.attach(model, spec("quest")).graphs.recorder = record
    cache = foveate.Cache(model)
    with monkeypatch.context() as stop:
        stop.setattr(ReplayedSteps, at, raising(KeyboardInterrupt, 5)(getattr(ReplayedSteps, at)))
        with pytest.raises(KeyboardInterrupt):
            model.generate(tokens(60), max_new_tokens=12, min_new_tokens=12, do_sample=False, **cached(cache))
    refused(model, cache, tmp_path / "cache")


def test_a_pass_that_fails_before_it_writes_leaves_the_cache_as_it_was():
    model = tiny_model()
    foveate.attach(model, spec("h2o"))
    cache = foveate.Cache(model)
    with torch.no_grad():
        model(tokens(40), **cached(cache))
        twin = copy.deepcopy(cache)
        with pytest.raises(IndexError):
            model(torch.tensor([[model.config.vocab_size]]), **cached(cache))
        with pytest.raises(ValueError, match="sequences"):
            model(tokens(1, 2), **cached(cache))
        expected = model(tokens(2), **cached(twin)).logits
        assert torch.equal(model(tokens(2), **cached(cache)).logits, expected)


@pytest.mark.parametrize("at", ["choose", "take"])
def test_an_interrupted_pass_keeps_nothing_of_its_cache(at, monkeypatch):
    """At ``take`` a layer was posted, and its attention not yet computed."""
    model = tiny_model()
    attachment = foveate.attach(model, spec("quest"), cuda_graph=False)
    cache = foveate.Cache(model)
    kept = [weakref.ref(one) for one in (cache, cache.phase, *cache.layers)]
    with monkeypatch.context() as stop:
        if at == "choose":
            owner = type(cache.layers[2].method)
            stop.setattr(owner, at, raising(KeyboardInterrupt, 2)(owner.choose))
        else:
            stop.setattr(handover, "take", raising(KeyboardInterrupt, 2)(handover.take))
        with pytest.raises(KeyboardInterrupt):
            model.generate(tokens(60), max_new_tokens=6, **cached(cache))
    assert handover.current(attachment.uid) is not None
    del cache
    gc.collect()
    assert [one() for one in kept] == [None] * len(kept)
    foveate.detach(model)
    assert handover.current(attachment.uid) is None


@pytest.mark.parametrize(
    ("owner", "at", "call"),
    [
        (ReplayedSteps, "_load", 0),
        (ReplayedSteps, "_load", 3),
        (ReplayedSteps, "_choose_dense", 2),
        (Contiguous, "_buffer", 1),
        (Contiguous, "_buffer", 3),
        (channels, "buffer", 1),
        (SlotCache, "move_to_device", 1),
        (capture, "device_rows", 0),
        (capture, "freed_slots", 1),
    ],
)
@pytest.mark.parametrize("name", ["quest", "h2o"])
def test_a_replayed_step_that_fails_before_it_runs_can_be_run_again(owner, at, call, name, monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(replay, "ROOM", 120)  # slots are added before the first step

    def steps(stop=None):
        """Logits of ten steps, and the ids that the cache knows."""
        foveate.attach(model, spec(name)).graphs.recorder = record
        cache, failed = foveate.Cache(model), 0
        model.generate(tokens(60), max_new_tokens=1, **cached(cache))
        run, out = model.get_compiled_call(None), []
        if stop is not None:
            stop.setattr(owner, at, raising(torch.OutOfMemoryError, call)(getattr(owner, at)))
        while len(out) < 10:
            given = {"input_ids": torch.tensor([[7 + len(out)]]), "position_ids": torch.tensor([[60 + len(out)]])}
            try:
                out.append(run(**given, **cached(cache)).logits.clone())
            except torch.OutOfMemoryError:
                failed += 1
                assert cache.get_seq_length() == 60 + len(out)
                assert cache.ids.columns == 60 + len(out)
        assert failed == (stop is not None)
        assert model.foveate.graphs.use.replayed > 5
        return torch.cat(out), cache.ids.read(70)

    with torch.no_grad():
        expected = steps()
        with monkeypatch.context() as stop:
            found = steps(stop)
    assert all(map(torch.equal, found, expected))


def test_layers_of_different_lengths_are_named_every_time():
    model = tiny_model()
    foveate.attach(model, "dense")
    cache = foveate.Cache(model)
    with torch.no_grad():
        model(tokens(40), **cached(cache))
        cache.layers[1].crop(-1)
        for _ in range(2):
            with pytest.raises(ValueError, match="hold different numbers of tokens"):
                model(tokens(1), **cached(cache))
        cache.layers[1] = copy.deepcopy(cache.layers[0])
        cache.layers[1].phase = cache.phase
        assert cache.ids.columns == 40
        model(tokens(1), **cached(cache))


@pytest.mark.parametrize("kind", STOPS)
@torch.no_grad()
def test_a_pass_that_is_stopped_before_it_writes_leaves_the_cache_as_it_was(kind, monkeypatch):
    model = tiny_model()
    foveate.attach(model, spec("h2o"))
    cache = foveate.Cache(model)
    model(tokens(40), **cached(cache))
    twin = copy.deepcopy(cache)
    with monkeypatch.context() as stop:
        stop.setattr(Layer, "_split", raising(kind)(Layer._split))
        with pytest.raises(kind):
            model(tokens(1), **cached(cache))
    with pytest.raises(ValueError, match="at least one token"):  # ends a pass that Ctrl-C has left
        model(tokens(0), **cached(cache))
    expected = model(tokens(2), **cached(twin)).logits
    assert torch.equal(model(tokens(2), **cached(cache)).logits, expected)
