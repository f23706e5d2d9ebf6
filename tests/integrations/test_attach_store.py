"""`attach(store=...)`: a store of a user's own gives the tokens and logits of memory on the device."""

import copy
import functools
import inspect
import re
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import foveate
from foveate import methods
from foveate.lab.recorded import record
from foveate.runtime import replay
from foveate.state import FetchingStore, Store
from foveate.state.contiguous import Contiguous
from foveate.state.engine_blocks import EngineBlocks
from foveate.state.host_pages import HostPages
from tests.combinations import in_turn
from tests.helpers import cached, left_padded, repetitive, returned_cache, tiny_model
from tests.stores import PAGE, Least, MappedFile
from tests.test_real_model import DATA, MODEL

SPECS = {
    "pages": "pages:top_k=24,page_size=4",
    "unweighted": "pages:top_k=0.4,page_size=3,weighted=false",
    "luka": "luka:page_size=4,sinks=2,tail=9,top_k=2",
    "levels": "luka:page_size=[4, 8],sinks=4,tail=9,top_k=2,expand=2",
    "kascade_pages": "kascade_pages:top_k=12,pool=kv_head,pooling=post_softmax,anchors=[1],page_size=4",
    "layer": "kascade_pages:top_k=9,anchors=[0],first_layer=pages,page_size=4",
}
MODES = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "chunks": {"prefill_chunk_size": 20},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
}
pytestmark = pytest.mark.usefixtures("little_room")


class Replayed(Least):
    """Steps write and read one tensor on the device, which stays where it is."""

    can_be_captured = True

    def device_tensors(self):
        return [self.both]

    @property
    def resident_bytes(self):
        return self.both.nbytes


def run(model, mode="greedy", tokens=16):
    alone = mode == "prompt_lookup"
    inputs = {"input_ids": repetitive(61)} if alone else left_padded([61, 23, 40])
    how = {"max_new_tokens": tokens, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(**inputs, **how, **MODES[mode])


def close(mine, its):
    assert torch.equal(mine.sequences, its.sequences)
    for a, b in zip(mine.logits, its.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def stores(cache):
    return [layer.cache.store for layer in cache.layers]


# The store of the guide


@pytest.fixture(scope="module")
def smollm():
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    novel = (DATA / "books" / "moby_dick.txt").read_text(encoding="utf-8")
    return model, AutoTokenizer.from_pretrained(MODEL)(novel[:3000], return_tensors="pt")["input_ids"][:, :300]


def test_keys_in_files_give_the_tokens_of_dense_attention(smollm, tmp_path):
    """A real model with the store that the guide prints: all keys give dense attention's tokens, and few keys the
    tokens of the same method on the device."""
    model, ids = smollm
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 16, "do_sample": False}
    with foveate.attached(model, "dense"):
        dense = model.generate(ids, **how)
    store = functools.partial(MappedFile, folder=tmp_path)
    with foveate.attached(model, "pages:top_k=1.0", store=store):
        assert torch.equal(model.generate(ids, **how), dense)
        host = foveate.stats(model).host_bytes
        assert host > 30 * 300 * 2 * 3 * 64 * 4  # layers, tokens, keys and values, KV heads, dims, bytes
    found = []
    for given in (None, store):
        with foveate.attached(model, "pages:top_k=64", dense_below=0, store=given):
            found.append(model.generate(ids, **how))
            assert 0.2 < foveate.stats(model).keys_read_share < 0.5
    assert torch.equal(*found)
    assert not list(tmp_path.iterdir())  # files are deleted as soon as they are mapped


@in_turn(("spec", SPECS), ("mode", MODES), ("family", ["llama", "gemma3"]))
def test_the_store_of_the_guide_gives_the_same(spec, mode, family):
    model, found = tiny_model(family), []
    for store in (None, MappedFile):
        with foveate.attached(model, SPECS[spec], dense_below=0, store=store):
            found.append(run(model, mode))
            read = foveate.stats(model).keys_read_share
            found.append(read)
    close(found[2], found[0])
    assert found[3] == pytest.approx(found[1])


def test_layers_that_read_all_keys_stay_on_the_device():
    model = tiny_model()
    with foveate.attached(model, SPECS["kascade_pages"], store=MappedFile):
        kinds = [type(store) for store in stores(returned_cache(run(model)))]
    assert kinds == [Contiguous, *[MappedFile] * (len(kinds) - 1)]


def turn(model, cache, ids):
    how = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **how, **cached(cache))


@pytest.mark.parametrize(("spec", "store"), [("pages", MappedFile), ("luka", MappedFile), ("pages", Least)])
def test_turns_copies_crops_and_files(spec, store, tmp_path):
    """What was saved with one store goes on with another one."""
    model, found, path = tiny_model(), [], tmp_path / "cache.safetensors"
    more = torch.randint(3, 90, (1, 9))
    for given in (None, store):
        with foveate.attached(model, SPECS[spec], dense_below=0, store=given):
            first = turn(model, foveate.Cache(model), repetitive(61))
            cache, outs = returned_cache(first), [first]
            both = torch.cat([first.sequences, more], 1)
            if given is None:
                foveate.save_cache(model, cache, path)
            outs += [turn(model, copy.deepcopy(cache), both), turn(model, foveate.load_cache(model, path), both)]
            foveate.save_cache(model, cache, path)
            outs += [turn(model, foveate.load_cache(model, path), both), turn(model, cache, both)]
            if spec != "luka":
                cache.crop(-4)
                outs.append(turn(model, cache, torch.cat([outs[-1].sequences[:, :-4], more], 1)))
            found.append(outs)
    for its, mine in zip(*found, strict=True):
        close(mine, its)


def test_a_store_goes_with_its_cache():
    model = tiny_model()
    with foveate.attached(model, SPECS["pages"], store=MappedFile):
        cache = returned_cache(run(model))
        kept = [weakref.ref(store) for store in stores(cache)]
        del cache  # nothing refers to itself: no collection is needed
        assert [one() for one in kept] == [None] * len(kept)


# A store that steps view


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["dense", "quest", "snapkv", "h2o", "tova", "adakv", "luka", "snapkv+quest"])
def test_the_least_store_serves_every_method(name, mode):
    """Methods that evict are served, too, and so are turns in which tokens are undone."""
    small = {part: methods.make(part) for part in name.split("+")}
    spec = "+".join(type(one)(**one.about.small_budget).spec for one in small.values())
    model, found = tiny_model(), []
    for store in (None, Least):
        with foveate.attached(model, spec, store=store):
            found.append(run(model, mode))
    close(*found)


@pytest.mark.parametrize("name", ["quest", "h2o", "streaming"])
def test_steps_are_replayed_if_the_store_declares_it(name, monkeypatch):
    monkeypatch.setattr(replay, "ROOM", 3)
    method = methods.REGISTRY[name]
    model, found = tiny_model(), []
    for store in (None, Least, Replayed):
        attachment = foveate.attach(model, method(**method.about.small_budget), store=store)
        attachment.graphs.recorder = record
        found.append(run(model, tokens=40))
        graphs = foveate.stats(model).graphs
        assert (graphs.replayed > 5) == (store is not Least)
        assert ("does not declare can_be_captured" in graphs.reason) == (store is Least)
        assert (graphs.captured > 1) == (store is not Least and name == "quest")  # again after each growth
    close(found[1], found[0])
    close(found[2], found[0])


def test_what_a_store_holds_is_reported():
    model = tiny_model()
    for store in (None, Replayed):
        with foveate.attached(model, "dense", store=store):
            cache, stats = returned_cache(run(model)), foveate.stats(model)
            assert stats.resident_bytes == cache.resident_bytes == sum(one.resident_bytes for one in stores(cache))
            assert stats.host_bytes == 0


# Refused


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("dense", {"store": "file"}, "store must be a class derived from foveate.state.Store"),
        ("dense", {"store": Store}, "lacks the methods fetch_slots"),
        ("pages", {"store": MappedFile, "offload": True}, "both say where keys are; leave one out"),
        ("pages", {"store": HostPages}, "store=HostPages: offload=True makes these stores"),
        ("pages", {"store": EngineBlocks}, "store=EngineBlocks: an engine makes these stores"),
        ("pages", {"store": MappedFile, "gpu_budget": "1GB"}, "needs offload=True"),
        ("dense", {"store": MappedFile}, "store=MappedFile: dense reads every key in each step; take pages, luka"),
        ("h2o", {"store": MappedFile}, "store=MappedFile: a decode step of h2o.* reads or weighs all keys"),
        ("pages", {"store": MappedFile, "dense_below": 99}, "store=MappedFile never decodes densely"),
        ("pages", {"store": MappedFile, "lossless": True}, "and store=MappedFile: a verifying pass reads every key"),
    ],
)
def test_what_cannot_be_is_refused(method, options, message):
    model = tiny_model()
    with pytest.raises(ValueError, match=message):
        foveate.attach(model, method, **options)
    assert not hasattr(model, "foveate")


def test_a_captured_graph_cannot_be_insisted_on(monkeypatch):
    model = tiny_model()
    monkeypatch.setattr("foveate.integrations.transformers.graphs.Graphs.obstacle", lambda *given: "")
    with pytest.raises(ValueError, match="Least does not declare can_be_captured"):
        foveate.attach(model, "dense", store=Least, cuda_graph=True)
    assert foveate.attach(model, "dense", store=Replayed, cuda_graph=True).store is Replayed


def test_branches_are_refused():
    model, shared = tiny_model(), methods.SharedPrompt([methods.make("snapkv", **{"top_k": 12, "window": 8})])
    foveate.attach(model, shared, store=Least)
    cache = foveate.Cache(model)
    model(repetitive(61), **cached(cache))
    foveate.attach(model, "snapkv:top_k=12,window=8", store=Least)
    with pytest.raises(ValueError, match="store=Least: a branch keeps its keys and values on the device"):
        cache.branch(model)


def test_a_method_is_chosen_that_fetches():
    attachment = foveate.attach(tiny_model(), store=MappedFile)
    assert attachment.method.name == "pages"
    assert "fetched from their store" in attachment.chosen


# What the page says


def test_the_page_names_what_a_store_must_have():
    """With the arguments, and all else that has a default."""
    must, may = re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE)
    described = dict(re.findall(r"^\| `(\w+)\((.*?)\)` \|", must, re.MULTILINE))
    assert described.keys() == Store.__abstractmethods__
    for name, arguments in described.items():
        assert ["self", *arguments.split(", ")] == list(inspect.signature(getattr(Store, name)).parameters), name
    named = {name for cell in re.findall(r"^\| (`.*?`) \|", may, re.MULTILINE) for name in re.findall(r"`(\w+)", cell)}
    internal = {"newest_page", "table", "fills_channels"}
    public = {name for name in vars(Store) if not name.startswith("_")}
    assert named == public - Store.__abstractmethods__ - internal
    assert issubclass(MappedFile, FetchingStore)
    assert MappedFile.__mro__[1] is FetchingStore
