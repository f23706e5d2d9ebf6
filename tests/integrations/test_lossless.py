"""`attach(lossless=...)`: answers are dense attention's, row by row, whatever the drafts are worth."""

from __future__ import annotations

import collections
import copy
import re

import pytest
import torch
import transformers

import foveate
from foveate.integrations.transformers.releases import CACHE
from tests.families import FAMILIES, family
from tests.helpers import cached, left_padded, of_release, tiny_model

SPECS = [
    "kascade:top_k=8,min_k=4,anchors=2",
    "kascade:top_k=8,min_k=4,anchors=2,pool=kv_head",
    "kascade:anchors=2,top_k=8,min_k=4,score_keys=pages,first_layer=pages,page_size=4",
    "pages:top_k=24,page_size=4,rank=2",
    "quest:top_k=24,page_size=4",
    "locks:top_k=24,page_size=4,rank=2",
    "twilight:p=0.5,min_k=4",
    "lessismore:top_k=9,sinks=2",
    "oracle_topk:top_k=6,decode_only=true",
]
FEW = SPECS[0]
NEW = 40
BATCH = left_padded([60, 41, 9])


def generate(model, batch=BATCH, new=NEW, **how):
    return model.generate(**batch, max_new_tokens=new, pad_token_id=0, **({"do_sample": False} | how))


@pytest.fixture(scope="module")
def dense():
    return generate(tiny_model())


@pytest.mark.parametrize("spec", of_release(SPECS))
@pytest.mark.parametrize("length", [True, 1, 5, 16])
def test_rows_of_a_padded_batch_write_what_dense_attention_writes(spec, length, dense):
    model = tiny_model()
    foveate.attach(model, spec, lossless=length)
    assert torch.equal(generate(model), dense)
    drafts, stats = foveate.stats(model).drafts, foveate.stats(model)
    assert 0 < drafts.accepted < drafts.drafted, "rows must differ in what they accept"
    assert drafts.cycles + drafts.accepted >= 3 * (NEW - 1)
    assert stats.keys_read_share < 1
    assert "passes verified" in str(stats)


def test_drafts_read_few_keys():
    model = tiny_model()
    foveate.attach(model, FEW, lossless=16)
    generate(model)
    layers = foveate.stats(model).layers
    reading = [layer for layer in layers if layer.keys_read_per_step < 0.6 * layer.keys_available_per_step]
    assert reading


@pytest.mark.parametrize(
    "name", [name for name in FAMILIES if name in ("Qwen3", "Mixtral", "OLMo 2", "Cohere", "GLM 4")]
)
def test_families(name):
    model = copy.deepcopy(family(name))
    expected = generate(model)
    foveate.attach(model, "kascade:top_k=8,min_k=4,anchors=1", lossless=4)
    assert torch.equal(generate(model), expected)


@pytest.mark.parametrize("length", [True, 6])
def test_rows_end_where_dense_ones_end(length, dense):
    """At one of several tokens, each row at its own, and at stop strings."""
    model = tiny_model()
    written = dense[:, BATCH["input_ids"].shape[1] :]
    ends = [int(written[0, 7]), int(written[1, 21])]
    expected = generate(model, eos_token_id=ends)
    foveate.attach(model, FEW, lossless=length)
    found = generate(model, eos_token_id=ends)
    assert torch.equal(found, expected)
    assert found.shape[1] < dense.shape[1] or bool((found[:, -1] == 0).any())


class EndsWith(transformers.StoppingCriteria):
    def __init__(self, token):
        self.token = token

    def __call__(self, ids, scores, **kwargs):
        return ids[:, -1] == self.token


def test_a_criterion_of_one_s_own_ends_rows(dense):
    stop = [EndsWith(int(dense[0, -20]))]
    model = tiny_model()
    expected = generate(model, stopping_criteria=stop)
    foveate.attach(model, FEW, lossless=6)
    assert torch.equal(generate(model, stopping_criteria=stop), expected)


@pytest.mark.parametrize("new", [1, 2, 3])
def test_short_answers(new):
    model = tiny_model()
    expected = generate(model, new=new)
    foveate.attach(model, FEW, lossless=8)
    assert torch.equal(generate(model, new=new), expected)


def test_processors_see_the_tokens_before_each_position():
    how = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
    model = tiny_model()
    expected = generate(model, **how)
    foveate.attach(model, FEW, lossless=5)
    assert torch.equal(generate(model, **how), expected)


class Streamer:
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_a_streamer_gets_every_token_once_and_the_cache_goes_on():
    """A second turn on the cache of the first is dense attention's, too."""
    model, one = tiny_model(), {name: x[:1] for name, x in BATCH.items()}

    def turns(model, streamer=None):
        first = generate(model, one, return_dict_in_generate=True, streamer=streamer)
        ids = torch.cat([first.sequences, one["input_ids"][:, :5]], 1)
        asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return first.sequences, generate(model, asked, **cached(first.get(CACHE)))

    foveate.attach(model, "dense")
    expected = turns(model)
    foveate.attach(model, FEW, lossless=5)
    streamer = Streamer()
    found = turns(model, streamer)
    assert all(map(torch.equal, found, expected))
    assert streamer.tokens == found[0][0].tolist()
    assert streamer.ended


def test_a_cache_whose_rows_ended_apart_is_not_returned(dense):
    end = int(dense[0, BATCH["input_ids"].shape[1] + 7])
    model = tiny_model()
    foveate.attach(model, FEW, lossless=5)
    cache = foveate.Cache(model)
    found = generate(model, eos_token_id=[end], return_dict_in_generate=True, **cached(cache))
    assert found.get(CACHE) is None
    with pytest.raises(ValueError, match="start a new cache"):
        generate(model, **cached(cache))


def test_sampled_tokens_have_the_model_s_distribution():
    """The second token of many answers, by a temperature, beside the exact distribution given the first."""
    model, rows = tiny_model(), 4000
    ids = BATCH["input_ids"][:1].expand(rows, -1)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    how = {"do_sample": True, "temperature": 0.25, "top_k": 6}
    with torch.no_grad():
        first = model(ids[:1]).logits[0, -1]
        start = int(first.argmax())
        after = model(torch.cat([ids[:1], torch.tensor([[start]])], 1)).logits[0, -1]
    scores, order = (after / 0.25).topk(6)
    share = dict(zip(order.tolist(), scores.softmax(0).tolist()))
    foveate.attach(model, FEW, lossless=3)
    torch.manual_seed(0)
    written = generate(model, batch, new=4, **how)[:, ids.shape[1] :]
    counts = collections.Counter(written[written[:, 0] == start, 1].tolist())
    assert counts.keys() <= share.keys()
    total = sum(counts.values())
    assert total > 500
    chi = sum((counts[token] - total * p) ** 2 / (total * p) for token, p in share.items())
    assert chi < 25.7, "five degrees of freedom, at 1e-4"


def test_ties_are_counted():
    """A model whose logits are all alike."""
    model = tiny_model()
    model.get_output_embeddings().weight.data.zero_()
    expected = generate(model)
    foveate.attach(model, FEW, lossless=4)
    assert torch.equal(generate(model), expected)
    assert foveate.stats(model, reset=True).drafts.ties == 3 * (NEW - 1)
    assert foveate.stats(model).drafts.ties == 0


def test_detach_gives_generate_back(dense):
    model = tiny_model()
    foveate.attach(model, FEW, lossless=True)
    assert "generate" in model.__dict__
    foveate.detach(model)
    assert "generate" not in model.__dict__
    with foveate.attached(model, FEW, lossless=4):
        assert torch.equal(generate(model), dense)
    assert torch.equal(generate(model), dense)


def test_what_cannot_be_lossless_is_refused():
    model = tiny_model()
    for asked in (0, 17, "yes", 2.0):
        with pytest.raises(ValueError, match="lossless must be True, False or a number of tokens from 1 to 16"):
            foveate.attach(model, "kascade", lossless=asked)
    for spec, why in (
        ("h2o", "it evicts tokens"),
        ("luka", "it keeps a state"),
        ("dense", "needs a method that reads few keys"),
        ("kascade:decode_only=false,anchors=1", "its prompts are sparse"),
    ):
        with pytest.raises(ValueError, match=why):
            foveate.attach(model, spec, lossless=True)
    with pytest.raises(ValueError, match="a verifying pass reads every key"):
        foveate.attach(model, "pages", lossless=True, offload=True)
    with pytest.raises(ValueError, match="cuda_graph=True is not possible: lossless decoding runs its passes one by"):
        foveate.attach(model, FEW, lossless=True, cuda_graph=True)
    with pytest.raises(ValueError, match="layer 0 is sliding-window"):
        foveate.attach(copy.deepcopy(family("Gemma 2")), FEW, lossless=True)
    foveate.attach(model, FEW, lossless=True)
    for how, why in (
        ({"num_beams": 2}, "is greedy or sampled, not beam_search"),
        ({"use_cache": False}, "leave use_cache=False out"),
        ({"output_scores": True, "return_dict_in_generate": True}, "does not return output_scores"),
        ({"assistant_model": tiny_model()}, "leave assistant_model out"),
        ({"custom_generate": lambda *given, **more: None}, "leave custom_generate out"),
        ({"guidance_scale": 2.0}, "does not run guidance"),
    ):
        with pytest.raises(ValueError, match=re.escape(why)):
            generate(model, **how)
