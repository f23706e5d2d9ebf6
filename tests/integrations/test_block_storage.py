"""Models whose caches keep keys and values in blocks: `generate` gives the same, bit for bit."""

import copy

import pytest
import torch

import foveate
from foveate import methods
from foveate.integrations.transformers.layers import CacheLayer
from tests.combinations import in_turn
from tests.helpers import FAMILIES, left_padded, repetitive, returned_cache, tiny_model

SMALL = {name: methods.make(name, **methods.get(name).about.small_budget) for name in methods.names()}
EVICTING = [name for name, method in SMALL.items() if any(method.for_layer(n, 4).evicts.in_decode for n in range(4))]
SPECS = {name: method for name, method in SMALL.items() if name not in EVICTING}
SPECS = {name: method.spec for name, method in SPECS.items() if method.prompt_tile(1) is not None}
SPECS |= {
    "kascade_decode": "kascade_paper:top_k=6,anchors=1,decode_only=true",
    "luka_levels": "luka:page_size=[3, 6, 12],sinks=2,tail=9,top_k=2,expand=1",
}
MODES = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "chunks": {"prefill_chunk_size": 20},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
}


def run(model, mode, **options):
    alone = mode == "prompt_lookup"
    inputs = {"input_ids": repetitive(61)} if alone else left_padded([61, 23, 40])
    how = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(**inputs, **how, **MODES[mode], **options)


@in_turn(("method", SPECS), ("mode", MODES), ("block_size", [1, 5, 16]), ("family", ["llama", "gemma3"]))
def test_blocks_give_the_same_tokens_and_logits(method, mode, block_size, family):
    model, found = tiny_model(family), []
    for size in (0, block_size):
        with foveate.attached(model, SPECS[method], block_size=size):
            found.append(run(model, mode))
        stores = [layer.store for layer in returned_cache(found[-1]).layers if isinstance(layer, CacheLayer)]
        assert stores
        assert {store.block_size for store in stores} == {size}
    assert torch.equal(found[0].sequences, found[1].sequences)
    for mine, its in zip(found[1].logits, found[0].logits, strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_blocks(family):
    model, found = tiny_model(family), []
    for size in (0, 5):
        with foveate.attached(model, "quest:top_k=9,page_size=3,dense_layers=0", block_size=size):
            found.append(run(model, "greedy"))
    assert torch.equal(found[0].sequences, found[1].sequences)


def test_a_copy_of_a_model_keeps_its_keys_in_blocks():
    model = tiny_model()
    with foveate.attached(model, "dense", block_size=16):
        cache = returned_cache(run(copy.deepcopy(model), "greedy"))
    assert {layer.store.block_size for layer in cache.layers} == {16}


@pytest.mark.parametrize("name", EVICTING)
def test_methods_that_evict_in_some_layer_refuse_blocks(name):
    model = tiny_model()
    with pytest.raises(ValueError, match=r"block_size=16: \w+ evicts in decode, with its slots in one piece"):
        foveate.attach(model, SMALL[name], block_size=16)
    assert not hasattr(model, "foveate")


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "16", None, 65537, 10**7])
def test_sizes_that_are_none(wrong):
    with pytest.raises(ValueError, match="block_size must be 1 to 65536 slots, or 0 for one piece"):
        foveate.attach(tiny_model(), "dense", block_size=wrong)
