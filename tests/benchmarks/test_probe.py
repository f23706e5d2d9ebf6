"""Watching a model's attention: the weights are those that Transformers itself computes, and nothing remains."""

import copy

import pytest
import torch
from helpers import FAMILIES, LargestTensor, fingerprint, tiny_model, tokens

from benchmarks.probe import watched


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_eager_attention(family):
    model, ids = tiny_model(family), tokens(29)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    expected = eager(ids, output_attentions=True, use_cache=False).attentions
    seen = {}
    with torch.no_grad(), watched(model, lambda one: seen.setdefault(one.layer, one)):
        logits = model(ids, use_cache=False).logits
    assert sorted(seen) == list(range(model.config.num_hidden_layers))
    for layer, one in seen.items():
        assert one.heads == model.config.num_attention_heads
        for head in range(one.heads):
            torch.testing.assert_close(one.weights(head), expected[layer][0, head], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(logits, model(ids, use_cache=False).logits)


def test_nothing_remains_even_after_an_error():
    model = tiny_model()
    before, implementation = fingerprint(model), model.config._attn_implementation
    with pytest.raises(ZeroDivisionError), watched(model, lambda one: 1 / 0):
        model(tokens(5))
    assert model.config._attn_implementation == implementation
    assert fingerprint(model) == before


def test_one_head_costs_one_matrix():
    model, length = tiny_model(), 301
    with torch.no_grad(), LargestTensor() as largest, watched(model, lambda one: one.weights(1).sum()):
        model(tokens(length), use_cache=False, logits_to_keep=1)
    assert largest.bytes <= 4 * length * length, largest.what


def test_a_layer_that_does_more_than_softmax_is_refused():
    model = tiny_model()
    with watched(model, lambda one: None), pytest.raises(ValueError, match="layer 0 passes softcap to its attention"):
        model(tokens(5), softcap=30.0)
