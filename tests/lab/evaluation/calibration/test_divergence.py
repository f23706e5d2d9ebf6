"""The divergence of predictions when one layer reads another's choice, against a model that is run with masks."""

import dataclasses

import pytest
import torch
from transformers import AttentionInterface

import foveate
from foveate.integrations.transformers import loading
from foveate.lab.evaluation import generation
from foveate.lab.evaluation.calibration import divergence
from foveate.lab.evaluation.tasks.base import Item
from foveate.methods import SharedPrompt
from foveate.methods.kascade_paper import KascadePaper
from tests import tiny

LAYERS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("models") / "tiny-llama", layers=LAYERS)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return loading.load_tokenizer(folder)


@pytest.fixture
def model(folder):
    return loading.load_model(folder, "float32", "cpu")


def item(seed, length, new=6):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 600, (length,), generator=generator).tolist()
    return Item(id=str(seed), prompt="", prompt_ids=tuple(ids), max_new_tokens=new)


def answered(model, one):
    """The prompt with dense attention's greedy answer, its end among it."""
    ids = torch.tensor([one.prompt_ids])
    for _ in range(one.max_new_tokens):
        token = model(ids).logits[0, -1].argmax()
        ids = torch.cat([ids, token[None, None]], 1)
        if token == 1:
            break
    return ids


def masked(model, ids, prompt, chooser, reader, number, heads, pool, pooling="post_softmax"):
    """Logits when the reader's tokens after the prompt see the chooser's ``number`` heaviest keys alone."""
    chosen = {}

    def attend(module, q, k, v, mask, scaling, **more):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        logits = (q @ k.mT) * scaling
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        weights = logits.masked_fill(later, float("-inf")).softmax(-1)
        if module.layer_idx == chooser:
            mass = (weights[0].sqrt() if pooling == "sqrt" else weights[0]).unflatten(0, (2, 2)).mean(1)
            mass = mass.mean(0, keepdim=True).expand(2, -1, -1) if pool == "layer" else mass
            for row in range(prompt, q.shape[2]):
                held, keys = mass[:, row].sort(-1, descending=True)
                kept = (torch.arange(len(held[0])) < min(number, row + 1)).expand_as(held)
                chosen[row] = torch.zeros_like(kept).scatter(-1, keys, kept)
        if module.layer_idx == reader:
            for row, keys in chosen.items():
                seen = keys[heads]
                logits[0, :, row] = logits[0, :, row].masked_fill(~seen.repeat_interleave(2, 0), float("-inf"))
            weights = logits.masked_fill(later, float("-inf")).softmax(-1)
        return (weights @ v).transpose(1, 2), None

    AttentionInterface.register("masked", attend)
    model.set_attn_implementation("masked")
    try:
        return model(ids).logits[0]
    finally:
        model.set_attn_implementation("sdpa")


@torch.no_grad()
def expected(model, one, chooser, reader, number, heads, pool, **more):
    ids, start = answered(model, one), len(one.prompt_ids)
    theirs = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
    ours = masked(model, ids, start, chooser, reader, number, heads, pool, **more)[start - 1 : -1].log_softmax(-1)
    return float((theirs.exp() * (theirs - ours)).sum(-1).mean())


MAPS = torch.tensor([1, 0]).expand(LAYERS, LAYERS, 2)


@pytest.mark.parametrize(
    ("spec", "number", "pool", "mapped"),
    [
        ("kascade_paper:top_k=7", 7, "kv_head", True),
        ("kascade:top_k=0.1,min_k=9,pooling=post_softmax,decode_only=false", 9, "layer", False),
    ],
)
def test_is_that_of_a_model_with_masks(model, tokenizer, spec, number, pool, mapped):
    items = [item(0, 50), item(1, 38), item(2, 64)]
    steps = []
    found = divergence.measure(
        model, tokenizer, items, foveate.methods.parse(spec), range(LAYERS), MAPS, lambda: steps.append(1)
    )
    pairs = [(a, b) for b in range(1, LAYERS) for a in range(b + 1)]
    assert sorted(divergence.pairs(range(LAYERS))) == sorted(pairs)
    assert len(steps) == len(pairs) + 1
    for a in range(LAYERS):
        for b in range(LAYERS):
            if (a, b) not in pairs:
                assert found[a, b] == 0.0
                continue
            heads = torch.tensor([1, 0] if mapped and a != b else [0, 1])
            of_items = [expected(model, one, a, b, number, heads, pool) for one in items]
            assert float(found[a, b]) == pytest.approx(sum(of_items) / 3, rel=2e-3, abs=1e-7), (a, b)
    assert found[found > 0].min() > 1e-6, "every pair changes something"


@pytest.mark.parametrize(
    ("spec", "number", "more"),
    [
        ("kascade:top_k=7,pool=kv_head,decode_only=false", 7, {"pooling": "sqrt"}),
    ],
)
def test_is_of_some_layers_under_the_settings_of_the_method(model, tokenizer, spec, number, more):
    one, layers = item(0, 50), [1, 3]
    found = divergence.measure(model, tokenizer, [one], foveate.methods.parse(spec), layers, MAPS[:2, :2])
    for a, b in ((0, 0), (0, 1), (1, 1)):
        heads = torch.tensor([0, 1] if a == b else [1, 0])
        value = expected(model, one, layers[a], layers[b], number, heads, "kv_head", **more)
        assert float(found[a, b]) == pytest.approx(value, rel=2e-3, abs=1e-7)
    assert found[1, 0] == 0.0


def test_predictions_that_are_not_finite_name_the_layers(model, tokenizer, monkeypatch):
    nothing = torch.tensor([float("nan")], dtype=torch.float64)
    monkeypatch.setattr(generation._Questions, "divergence", lambda self, model, trace, shared: nothing)
    with pytest.raises(ValueError, match=r"layer 1: the predictions of the model are not finite .* choice of layer 0"):
        divergence.measure(model, tokenizer, [item(0, 50)], foveate.methods.parse("kascade"), range(LAYERS), MAPS)


def test_is_nothing_where_all_keys_are_read(model, tokenizer):
    items = [item(0, 50), item(1, 38)]
    found = divergence.measure(
        model, tokenizer, items, foveate.methods.parse("kascade_paper:top_k=1.0"), range(LAYERS), MAPS
    )
    assert found.max() < 1e-6


def test_layers_that_do_not_begin_with_layer_0_may_choose_for_themselves():
    assert divergence.pairs([2, 5]) == [(0, 0), (0, 1), (1, 1)]


@pytest.mark.parametrize(
    "spec", ["kascade_paper:anchors=2,top_k=5,decode_only=true", "luka:page_size=4,tail=8,top_k=2"]
)
def test_one_forward_pass_sees_what_steps_see(model, tokenizer, spec):
    items, method = [item(0, 50), item(1, 38), item(2, 64)], foveate.methods.parse(spec)
    model.generation_config.eos_token_id = int(answered(model, items[1])[0, -3])  # one ends before the others
    with foveate.attached(model, SharedPrompt((foveate.methods.parse("dense"), method))):
        prompt = generation.read_prompt(model, tokenizer, items)
    with foveate.attached(model, "dense"):
        trace = prompt.trace(model, shared=True)
    with foveate.attached(model, method):
        steps = [output.divergence / output.tokens for output in prompt.decode(model, True, trace).outputs]
        at_once = prompt.divergence(model, trace, shared=True).tolist()
    assert trace.lengths.tolist()[1] < trace.tokens.shape[1]
    assert max(steps) > 1e-4
    assert at_once == pytest.approx(steps, rel=1e-3, abs=1e-7)


def test_an_answer_of_one_token_is_the_prompts(model, tokenizer):
    with foveate.attached(model, SharedPrompt((foveate.methods.parse("dense"),))):
        prompt = generation.read_prompt(model, tokenizer, [item(0, 50, 1)])
    with foveate.attached(model, "dense"):
        assert prompt.divergence(model, prompt.trace(model, shared=True), shared=True).tolist() == [0.0]


@pytest.mark.parametrize("tokens", [1, 5])
def test_sparse_prompts_are_read_by_each_method_and_predict_the_first_token(model, tokenizer, tokens):
    items = [item(0, 50, tokens), item(1, 38, tokens)]
    answered, sparse = divergence.answer(model, tokenizer, items), KascadePaper(anchors=2, top_k=5, tile=12)
    behind_dense = dataclasses.replace(sparse, decode_only=True)
    found = divergence.together(model, answered, [sparse, behind_dense, KascadePaper(anchors=2, top_k=1.0)])
    with foveate.attached(model, sparse):
        prompt = generation.read_prompt(model, tokenizer, items)
        steps = [output.divergence / output.tokens for output in prompt.decode(model, along=answered.trace).outputs]
    assert float(found[0]) == pytest.approx(sum(steps) / 2, rel=1e-3)
    assert (float(found[1]) > 0) == (tokens > 1)
    assert found[0] > found[1]
    assert found[2] < 1e-6


def test_given_texts_have_no_answers_to_go_along(model, tokenizer):
    text = dataclasses.replace(item(0, 50), target_ids=(5, 6, 7))
    with foveate.attached(model, SharedPrompt((foveate.methods.parse("dense"),))):
        prompt = generation.read_prompt(model, tokenizer, [text])
    with pytest.raises(TypeError, match="no answers to go along"):
        prompt.divergence(model, None)
