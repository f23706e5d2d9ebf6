"""`attach(lossless=...)`: answers are dense attention's, row by row, whatever the drafts are worth."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import transformers
from transformers.cache_utils import LinearAttentionLayer

import foveate
from foveate.integrations.transformers import lossless
from foveate.integrations.transformers.releases import CACHE
from foveate.integrations.transformers.support import cache_layers
from foveate.lab.recorded import record
from foveate.methods import ReadsChosen
from foveate.runtime import replay
from foveate.runtime.drafts import DraftLength
from tests.families import FAMILIES, family
from tests.helpers import cached, left_padded, of_release, tiny_model

SPECS = [
    "kascade:top_k=8,min_k=4,anchors=2",
    "kascade:top_k=8,min_k=4,anchors=2,pool=kv_head",
    "kascade_pages:top_k=8,min_k=4,anchors=2,first_layer=pages,page_size=4",
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


@pytest.fixture(autouse=True)
def even_cycles(monkeypatch):
    """However long a draft is, a cycle takes as long, so that drafts always pay."""
    monkeypatch.setattr(lossless, "DraftLength", functools.partial(DraftLength, clock=itertools.count().__next__))


@pytest.fixture(scope="module")
def dense():
    return generate(tiny_model())


@pytest.mark.parametrize(
    ("spec", "length"),
    [
        pytest.param(spec, length, marks=() if length is True or spec == FEW else pytest.mark.full)
        for spec in of_release(SPECS)
        for length in (True, 1, 5, 16)
    ],
)
def test_rows_of_a_padded_batch_write_what_dense_attention_writes(spec, length, dense):
    model = tiny_model()
    foveate.attach(model, spec, lossless=length)
    assert torch.equal(generate(model), dense)
    drafts, stats = foveate.stats(model).drafts, foveate.stats(model)
    assert 0 < drafts.accepted < drafts.drafted, "rows must differ in what they accept"
    assert drafts.cycles + drafts.accepted >= 3 * (NEW - 1)
    assert stats.keys_read_share < 1
    assert "passes verified" in str(stats)


@pytest.mark.parametrize(
    "spec", [pytest.param(spec, marks=() if spec == FEW else pytest.mark.full) for spec in of_release(SPECS)]
)
@pytest.mark.parametrize("sampled", [False, True])
def test_passes_are_replayed(spec, sampled):
    """Each kind of pass from a recording of its own: the same tokens and counts as by passes that run one by one."""
    found = []
    for recorder in (None, record):
        model = tiny_model()
        attachment = foveate.attach(model, spec, lossless=4)
        attachment.graphs.recorder = recorder
        torch.manual_seed(0)
        found.append((generate(model, do_sample=sampled), foveate.stats(model)))
    (expected, one_by_one), (answers, stats) = found
    assert torch.equal(answers, expected)
    assert stats.drafts == one_by_one.drafts
    for layer, other in zip(stats.layers, one_by_one.layers):
        assert layer.keys_read_per_step == pytest.approx(other.keys_read_per_step)
        assert layer.keys_available_per_step == pytest.approx(other.keys_available_per_step)
        assert layer.dense_steps == other.dense_steps
    assert stats.graphs.captured == 3
    assert stats.graphs.replayed > 3 * one_by_one.drafts.cycles // len(answers)


def test_only_cycles_of_replayed_passes_are_timed(monkeypatch):
    """The first one checks what its draft chooses, the second one warms up, and the third one is captured."""
    steady, learn = [], DraftLength.learn
    monkeypatch.setattr(DraftLength, "learn", lambda self, *given: steady.append(given[-1]) or learn(self, *given))
    model = tiny_model()
    foveate.attach(model, FEW, lossless=4).graphs.recorder = record
    generate(model)
    assert steady[:4] == [False, False, False, True]


@pytest.mark.parametrize("length", [3, True])
def test_a_cache_that_grows_between_passes_is_captured_anew(length):
    """Within a draft and between drafts, as recordings name the memory that they read."""
    model = tiny_model()
    expected = generate(model, new=200)
    attachment = foveate.attach(model, FEW, lossless=length)
    attachment.graphs.recorder, room = record, 5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "ROOM", room)
        patch.setattr("foveate.state.cache.capacity_for", lambda slots: slots + room)
        assert torch.equal(generate(model, new=200), expected)
    assert foveate.stats(model).graphs.captured > 12


def test_a_pass_that_cannot_be_captured_runs_by_itself(dense):
    for at in range(3):
        model, calls = tiny_model(), []

        def fails(run, calls=calls, at=at):
            calls.append(run)
            if len(calls) > at:
                raise NotImplementedError("no such launch")
            return record(run)

        foveate.attach(model, FEW, lossless=4).graphs.recorder = fails
        with pytest.warns(UserWarning, match="a step could not be captured .no such launch"):
            assert torch.equal(generate(model), dense)


def test_drafts_read_few_keys():
    model = tiny_model()
    foveate.attach(model, FEW, lossless=16)
    generate(model)
    layers = foveate.stats(model).layers
    reading = [layer for layer in layers if layer.keys_read_per_step < 0.6 * layer.keys_available_per_step]
    assert reading


SOME = ("Qwen3", "Mixtral", "OLMo 2", "Cohere", "GLM 4", "Gemma 2", "Qwen3-Next")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SOME else pytest.mark.full) for name in FAMILIES]
)
def test_families(name):
    """Every one writes what it writes densely, or is refused because its layers forget tokens or keep a state."""
    model = copy.deepcopy(family(name))
    config = model.config.get_text_config()
    recurrent = any(isinstance(one, LinearAttentionLayer) for one in cache_layers(config))
    if recurrent or not {"sliding_attention", "chunked_attention"}.isdisjoint(
        getattr(config, "layer_types", None) or ()
    ):
        with pytest.raises(ValueError, match=r"takes rejected drafts back, and layer 0 is (sliding-window|recurrent)"):
            foveate.attach(model, "kascade:top_k=8,min_k=4,anchors=1", lossless=4)
        return
    expected = generate(model, new=24)
    foveate.attach(model, "kascade:top_k=8,min_k=4,anchors=1", lossless=4)
    assert torch.equal(generate(model, new=24), expected)
    assert foveate.stats(model).drafts.accepted > 0


@pytest.mark.parametrize(("length", "recorder"), [(True, None), (6, None), (6, record)])
def test_rows_end_where_dense_ones_end(length, recorder, dense):
    """At one of several tokens, each row at its own, and at stop strings."""
    model = tiny_model()
    written = dense[:, BATCH["input_ids"].shape[1] :]
    ends = [int(written[0, 7]), int(written[1, 21])]
    expected = generate(model, eos_token_id=ends)
    foveate.attach(model, FEW, lossless=length).graphs.recorder = recorder
    found = generate(model, eos_token_id=ends)
    assert torch.equal(found, expected)
    assert found.shape[1] < dense.shape[1] or bool((found[:, -1] == 0).any())


class EndsWith(transformers.StoppingCriteria):
    def __init__(self, token):
        self.token = token

    def __call__(self, ids, scores, **kwargs):
        return ids[:, -1] == self.token


class Marked(EndsWith):
    """That has a token's name, by which `generate` pads rows that have stopped."""

    eos_token_id = 5


@pytest.mark.parametrize("kind", [EndsWith, Marked])
@pytest.mark.parametrize("place", [-38, -20])
def test_a_criterion_of_one_s_own_ends_rows(kind, place, dense):
    stop = [kind(int(dense[0, place]))]
    model = tiny_model()
    expected = generate(model, stopping_criteria=stop)
    foveate.attach(model, FEW, lossless=6)
    assert torch.equal(generate(model, stopping_criteria=stop), expected)


def test_rows_that_have_all_stopped_end_together():
    """However far ahead one of them is, without a token that ends rows."""
    config = transformers.GenerationConfig(max_new_tokens=20)
    config._pad_token_tensor = None
    criteria = [transformers.generation.MaxLengthCriteria(23), EndsWith(7)]
    rows = lossless._Rows(torch.zeros(2, 3, dtype=torch.long), transformers.StoppingCriteriaList(criteria), config)
    rows.take([[7], [1]])
    rows.take([[2] * 19, [1, 1]])
    assert rows.unfinished
    assert rows.take([[2], [7, 2]]) == [-16, 1]
    assert not rows.unfinished
    assert rows.sequences()[:, 3:].tolist() == [[7, 2, 2, 2], [1, 1, 1, 7]]


def test_stop_strings(dense):
    """Which need the tokenizer that `generate` is given."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "models" / "smollm2-135m")
    start = BATCH["input_ids"].shape[1]
    token = next(int(token) for token in dense[0, start + 9 :] if token > 40)
    how = {"stop_strings": [tokenizer.decode([token])], "tokenizer": tokenizer}
    model, one = tiny_model(), {name: x[:1] for name, x in BATCH.items()}
    expected = generate(model, one, **how)
    assert start + 1 < expected.shape[1] < dense.shape[1]
    foveate.attach(model, FEW, lossless=6)
    assert torch.equal(generate(model, one, **how), expected)


def test_positions_and_embeddings_that_are_given():
    model = tiny_model()
    far = {**BATCH, "position_ids": torch.arange(BATCH["input_ids"].shape[1])[None] + 100}
    embedded = {"inputs_embeds": model.get_input_embeddings()(BATCH["input_ids"]).detach()}
    embedded["attention_mask"] = BATCH["attention_mask"]
    expected = [generate(model, batch) for batch in (far, embedded)]
    foveate.attach(model, FEW, lossless=5)
    assert torch.equal(generate(model, far), expected[0])
    found = generate(model, embedded, return_dict_in_generate=True)
    assert torch.equal(found.sequences, expected[1])
    cache = found.get(CACHE)
    assert cache.ids.columns == cache.get_seq_length() == BATCH["input_ids"].shape[1] + NEW - 1


def test_an_interrupted_answer_leaves_a_cache_that_is_refused():
    model, calls = tiny_model(), []

    def broken(row, ids):
        calls.append(row)
        if len(calls) > 20:
            raise KeyboardInterrupt
        return [*range(97)]

    foveate.attach(model, FEW, lossless=5)
    cache = foveate.Cache(model)
    with pytest.raises(KeyboardInterrupt):
        generate(model, prefix_allowed_tokens_fn=broken, **cached(cache))
    with pytest.raises(ValueError, match="start a new cache"):
        generate(model, **cached(cache))


def test_processors_are_not_asked_about_what_follows_an_end(dense):
    end = int(dense[0, BATCH["input_ids"].shape[1] + 9])

    def allowed(row, ids):
        return [] if end in ids[60:].tolist() else [*range(97)]

    model, how = tiny_model(), {"eos_token_id": [end], "prefix_allowed_tokens_fn": allowed}
    one = {name: x[:1] for name, x in BATCH.items()}
    expected = generate(model, one, **how)
    foveate.attach(model, FEW, lossless=8)
    assert torch.equal(generate(model, one, **how), expected)


@dataclass(frozen=True)
class TwelveNewest(ReadsChosen):
    name: ClassVar[str] = "twelve_newest"

    def choose(self, cache, q, scaling):
        newest = cache.plan["counts"][:, None, None] - torch.arange(1, 13)
        return (newest[..., None] == torch.arange(cache.used)).any(2).expand(-1, cache.geometry.num_kv_heads, -1)


def test_a_method_of_one_s_own_drafts(dense):
    model = tiny_model()
    foveate.attach(model, TwelveNewest(), lossless=4)
    assert torch.equal(generate(model), dense)
    assert foveate.stats(model).drafts.drafted > 0


@dataclass(frozen=True)
class NoKey(ReadsChosen):
    name: ClassVar[str] = "no_key"

    def choose(self, cache, q, scaling):
        return torch.zeros(len(q), cache.geometry.num_kv_heads, cache.used, dtype=torch.bool)


@pytest.mark.parametrize("recorder", [None, record])
def test_a_choice_of_no_key_is_told(recorder):
    """Of a method of one's own, whether or not passes are replayed."""
    model = tiny_model()
    foveate.attach(model, NoKey(), lossless=4).graphs.recorder = recorder
    with pytest.raises(ValueError, match="chose no key for KV head 0 of row 0"):
        generate(model)


def test_short_contexts_are_not_drafted_in_and_copies_count_anew(dense):
    model = tiny_model()
    foveate.attach(model, FEW, lossless=4, dense_below=10_000)
    assert torch.equal(generate(model), dense)
    stats = foveate.stats(model)
    assert (stats.drafts.drafted, stats.drafts.cycles) == (0, 3 * (NEW - 1))
    assert all(layer.dense_steps == NEW - 1 for layer in stats.layers)
    assert foveate.stats(copy.deepcopy(model)).drafts.cycles == 0


def test_a_refusal_leaves_the_cache_as_it_was():
    model = tiny_model()
    foveate.attach(model, FEW, lossless=4)
    first = generate(model, {name: x[:1] for name, x in BATCH.items()}, return_dict_in_generate=True)
    cache, ids = first.get(CACHE), torch.cat([first.sequences, first.sequences[:, :4]], 1)
    before = cache.phase.prompt_end
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with pytest.raises(ValueError, match="does not return output_scores"):
        generate(model, batch, output_scores=True, return_dict_in_generate=True, **cached(cache))
    assert cache.phase.prompt_end == before


@pytest.mark.parametrize("new", [1, 2, 3])
def test_short_answers(new):
    model = tiny_model()
    expected = generate(model, new=new)
    foveate.attach(model, FEW, lossless=8)
    assert torch.equal(generate(model, new=new), expected)


@pytest.mark.parametrize(
    ("how", "at_once"),
    [
        ({"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}, False),
        ({"repetition_penalty": 1.3}, True),
        ({"min_new_tokens": 15}, True),
        ({"min_length": 80, "repetition_penalty": 1.1}, True),
    ],
)
def test_processors_see_the_tokens_before_each_position(how, at_once, dense, monkeypatch):
    """And those that ask only which tokens there are, or how many, see all rows and positions at once."""
    model, written = tiny_model(), dense[:, BATCH["input_ids"].shape[1] :]
    how = {"eos_token_id": [int(written[0, 3]), int(written[1, 9])]} | how
    expected = generate(model, **how)
    assert not torch.equal(expected, generate(model, eos_token_id=how["eos_token_id"]))
    calls, one_by_one = [], lossless._Scores._one_by_one
    monkeypatch.setattr(lossless._Scores, "_one_by_one", lambda *given: calls.append(1) or one_by_one(*given))
    foveate.attach(model, FEW, lossless=5)
    assert torch.equal(generate(model, **how), expected)
    assert bool(calls) != at_once


def test_prompts_without_ids_have_no_tokens_to_repeat():
    model, embedded = tiny_model(), {"attention_mask": BATCH["attention_mask"]}
    embedded["inputs_embeds"] = model.get_input_embeddings()(BATCH["input_ids"]).detach()
    expected = generate(model, embedded, repetition_penalty=1.3)
    foveate.attach(model, FEW, lossless=5)
    assert torch.equal(generate(model, embedded, repetition_penalty=1.3), expected)


class Streamer:
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


@pytest.mark.parametrize(("rows", "recorder"), [(1, None), (3, None), (3, record)])
def test_a_streamer_gets_every_token_once_and_the_cache_goes_on(rows, recorder):
    """A second turn on the cache of the first is dense attention's, too."""
    model, some = tiny_model(), {name: x[:rows] for name, x in BATCH.items()}

    def turns(model, streamer=None):
        first = generate(model, some, return_dict_in_generate=True, streamer=streamer)
        more = some["input_ids"][:, -5:]
        asked = {"input_ids": torch.cat([first.sequences, more], 1)}
        new = asked["input_ids"].shape[1] - some["attention_mask"].shape[1]
        asked["attention_mask"] = torch.nn.functional.pad(some["attention_mask"], (0, new), value=1)
        return first.sequences, generate(model, asked, **cached(first.get(CACHE)))

    foveate.attach(model, "dense")
    expected = turns(model)
    foveate.attach(model, FEW, lossless=5).graphs.recorder = recorder
    streamer = Streamer() if rows == 1 else None
    found = turns(model, streamer)
    assert all(map(torch.equal, found, expected))
    if streamer is not None:
        assert streamer.tokens == found[0][0].tolist()
        assert streamer.ended


def test_a_cache_whose_rows_ended_apart_is_not_returned(dense):
    end = int(dense[0, BATCH["input_ids"].shape[1] + 7])
    model = tiny_model()
    foveate.attach(model, FEW, lossless=5)
    cache = foveate.Cache(model)
    found = generate(model, eos_token_id=[end], return_dict_in_generate=True, **cached(cache))
    assert found.get(CACHE) is None
    for one in (cache, copy.deepcopy(cache)):
        with pytest.raises(ValueError, match=r"end after different numbers of tokens.*start a new cache"):
            generate(model, **cached(one))
    cache.reset()
    again = generate(model, eos_token_id=[end], return_dict_in_generate=True, **cached(cache))
    assert torch.equal(again.sequences, found.sequences)


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
    with pytest.raises(ValueError, match="does not hand pixel_values on to the model"):
        lossless._check(model.generation_config, [], False, {"pixel_values": torch.zeros(1)})


def test_no_layer_begins_to_choose_within_a_draft(dense):
    """Layers whose bounds differ: a reader would miss the choice of an anchor that was dense when the draft began."""
    model = tiny_model()
    attachment = foveate.attach(model, "kascade:top_k=8,min_k=4,anchors=[0,1]", lossless=16)
    for layer in (1, 2):
        attachment.policies[layer].dense_below = 3 * 68
    assert torch.equal(generate(model), dense)
    assert foveate.stats(model).drafts.drafted > 0
