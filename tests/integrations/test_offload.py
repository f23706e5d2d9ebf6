"""Keys and values in host memory: `generate` gives the tokens and logits of a cache on the device, bit for bit."""

import copy
import pickle

import pytest
import torch

import foveate
from foveate.integrations.transformers.layers import CacheLayer
from foveate.runtime import offload
from foveate.state import host_memory
from foveate.state.offloaded import OffloadedCache
from tests.combinations import in_turn
from tests.helpers import FAMILIES, cached, left_padded, repetitive, returned_cache, tiny_model

SPECS = {
    "pages": "pages:top_k=24,page_size=4",
    "unweighted": "pages:top_k=0.4,page_size=3,weighted=false",
}
READERS = [
    "kascade_paper:anchors=[1],score_keys=pages,top_k=12,page_size=4,decode_only=true",
    "kascade:anchors=[0],score_keys=pages,first_layer=pages,page_size=4,top_k=9",
    "luka:page_size=4,sinks=2,tail=9,top_k=2",
    "luka:page_size=[4, 8],sinks=4,tail=9,top_k=2,expand=2",
]
MODES = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "chunks": {"prefill_chunk_size": 20},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
}

pytestmark = pytest.mark.usefixtures("little_room", "small_segments")


@pytest.fixture
def small_segments(monkeypatch):
    """Many segments of host memory, and of few pages."""
    monkeypatch.setattr(host_memory, "SEGMENT_BYTES", 1 << 11)
    monkeypatch.setattr(offload, "ROOM", 1)


def run(model, mode="greedy", **options):
    alone = mode == "prompt_lookup"
    inputs = {"input_ids": repetitive(61)} if alone else left_padded([61, 23, 40])
    how = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(**inputs, **how, **MODES[mode], **options)


def stores(out):
    return [one.store for one in returned_cache(out).layers if isinstance(one, CacheLayer)]


def equal(mine, its):
    assert torch.equal(mine.sequences, its.sequences)
    for a, b in zip(mine.logits, its.logits, strict=True):
        assert torch.equal(a, b)


@in_turn(("spec", SPECS), ("mode", MODES), ("budget", [0.5, 1.0, "1GB", None]), ("family", ["llama", "gemma3"]))
def test_host_memory_gives_the_same_tokens_and_logits(spec, mode, budget, family):
    model, found = tiny_model(family), []
    for how in ({}, {"offload": True, "gpu_budget": budget}):
        with foveate.attached(model, SPECS[spec], dense_below=0, **how):
            found.append(run(model, mode))
    equal(found[1], found[0])
    assert {type(store) for store in stores(found[1])} == {OffloadedCache}
    assert all(len(store.host.pages.keys) > 1 for store in stores(found[1]))
    asked, fetched = (
        sum(float(one.counters[name]) for one in stores(found[1])) for name in ("pages_asked", "pages_fetched")
    )
    assert 0 < fetched < asked


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_host_memory(family):
    model, found = tiny_model(family), []
    for how in ({}, {"offload": True, "gpu_budget": 0.5}):
        with foveate.attached(model, SPECS["pages"], **how):
            found.append(run(model))
    assert torch.equal(found[0].sequences, found[1].sequences)


@pytest.mark.parametrize("spec", READERS)
def test_layers_that_read_what_others_chose(spec):
    """And dense ones, which stay on the device."""
    model, found = tiny_model(), []
    for how in ({}, {"offload": True, "gpu_budget": 1.0}):
        with foveate.attached(model, spec, **how):
            found.append(run(model))
    equal(found[1], found[0])
    kinds = [isinstance(store, OffloadedCache) for store in stores(found[1])]
    assert kinds == [not spec.startswith("kascade") or "first_layer" in spec, *[True] * (len(kinds) - 1)]


def turn(model, cache, ids):
    how = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **how, **cached(cache))


@pytest.mark.parametrize("spec", [*SPECS.values(), *READERS])
def test_turns_copies_crops_and_files(spec, tmp_path):
    model, found, path = tiny_model(), [], tmp_path / "cache.safetensors"
    more = torch.randint(3, 90, (1, 9))
    for how in ({}, {"offload": True, "gpu_budget": 1.0}):
        with foveate.attached(model, spec, **how):
            first = turn(model, foveate.Cache(model), repetitive(61))
            cache, outs = returned_cache(first), [first]
            foveate.save_cache(model, cache, path)
            both = torch.cat([first.sequences, more], 1)
            outs += [turn(model, copy.deepcopy(cache), both), turn(model, foveate.load_cache(model, path), both)]
            outs.append(turn(model, pickle.loads(pickle.dumps(cache)), both))
            outs.append(turn(model, cache, both))
            if "luka" not in spec:
                cache.crop(-4)
                outs.append(turn(model, cache, torch.cat([outs[-1].sequences[:, :-4], more], 1)))
            found.append(outs)
    for its, mine in zip(*found, strict=True):
        equal(mine, its)
    held = cache.layers[1].store
    assert held.host.nbytes == held.counters.host_bytes > 0


def test_a_file_is_of_any_storage(tmp_path):
    """What was saved on the device goes on in host memory, and the other way round."""
    model, path, found = tiny_model(), tmp_path / "cache.safetensors", []
    for how, other in (({}, {"offload": True}), ({"offload": True}, {})):
        with foveate.attached(model, SPECS["pages"], **how):
            first = turn(model, foveate.Cache(model), repetitive(61))
            foveate.save_cache(model, returned_cache(first), path)
        with foveate.attached(model, SPECS["pages"], **other):
            ids = torch.cat([first.sequences, first.sequences[:, :9]], 1)
            found.append(turn(model, foveate.load_cache(model, path), ids))
    equal(*found)
