"""Keys and values in host memory: `generate` gives the tokens and logits of a cache on the device, bit for bit."""

import pytest
import torch

import foveate
from foveate.integrations.transformers.layers import CacheLayer
from foveate.runtime import offload
from foveate.state import host_memory
from foveate.state.offloaded import OffloadedCache
from tests.combinations import in_turn
from tests.helpers import FAMILIES, left_padded, repetitive, returned_cache, tiny_model

SPECS = {
    "pages": "pages:top_k=24,page_size=4",
    "unweighted": "pages:top_k=0.4,page_size=3,weighted=false",
}
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
