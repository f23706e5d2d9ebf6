"""Answers drawn from the model's distribution instead of chosen greedily."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import foveate
from foveate.integrations.transformers import loading
from foveate.lab.evaluation import decoding, generation
from foveate.lab.evaluation.tasks.base import Item, Sampling

TEXTS = ["Call me Ishmael.", "It was the whale, and", "Queequeg"]


@pytest.fixture(scope="module")
def model(tiny_folder):
    return loading.load_model(tiny_folder, "float32", "cpu")


def question(tokenizer, text, seed, temperature=1.0, top_p=1.0, new=12):
    sampling = Sampling(temperature, top_p, seed)
    return Item(f"{text}/{seed}", text, tuple(tokenizer.encode(text)), max_new_tokens=new, sampling=sampling)


def answers(model, tokenizer, items):
    return [(output.text, output.tokens) for output in generation.run_batch(model, tokenizer, items).outputs]


def drawn(logits, temperature, top_p, count=4000):
    """How often each token is picked, by so many draws from the same scores."""
    scores = torch.tensor(logits)
    paused = SimpleNamespace(ids=torch.zeros(1, 1, dtype=torch.int64), criteria=[], processors=None, pad=0)
    item = Item("a", "", (), max_new_tokens=count, sampling=Sampling(temperature, top_p, "seed"))
    chooser = decoding.Sampled(paused, [item])
    picked = torch.cat([chooser._pick(scores[None]) for _ in range(count)])
    return torch.bincount(picked, minlength=len(logits)) / count


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_come_as_often_as_they_should(temperature):
    logits = [0.3, float("-inf"), 2.0, -1.0, 1.5]
    expected = (torch.tensor(logits) / temperature).softmax(-1)
    assert torch.allclose(drawn(logits, temperature, 1.0), expected, atol=0.025)


@pytest.mark.parametrize(("top_p", "kept"), [(1.0, [0, 1, 2, 3]), (0.85, [0, 2, 3]), (0.61, [0, 2]), (0.1, [2])])
def test_only_the_likeliest_tokens_are_drawn_from(top_p, kept):
    probabilities = torch.tensor([0.2, 0.1, 0.5, 0.2])
    expected = torch.zeros(4)
    expected[kept] = probabilities[kept] / probabilities[kept].sum()
    assert torch.allclose(drawn(probabilities.log().tolist(), 1.0, top_p), expected, atol=0.025)


def test_probabilities_that_are_no_numbers_give_a_token_all_the_same():
    """So that what ends the answer is the check after it."""
    assert len(drawn([0.0, float("nan"), 1.0], 1.0, 1.0)) == 3


def test_an_answer_does_not_depend_on_its_batch(model, tokenizer):
    items = [question(tokenizer, text, seed) for seed in "ab" for text in TEXTS]
    together = answers(model, tokenizer, items)
    assert together == [answer for item in items for answer in answers(model, tokenizer, [item])]
    assert together == answers(model, tokenizer, items[::-1])[::-1]
    assert len({text for text, _ in together}) == 6
    torch.manual_seed(5)
    assert answers(model, tokenizer, items) == together


def test_cold_answers_are_the_greedy_ones(model, tokenizer):
    items = [question(tokenizer, text, "a", temperature=1e-4) for text in TEXTS]
    greedy = [dataclasses.replace(item, sampling=None) for item in items]
    assert answers(model, tokenizer, items) == answers(model, tokenizer, greedy)
    top = [dataclasses.replace(item, sampling=Sampling(1.0, 1e-9, "a")) for item in items]
    assert answers(model, tokenizer, top) == answers(model, tokenizer, greedy)


def test_rows_end_and_are_counted(model, tokenizer, monkeypatch):
    monkeypatch.setattr(model.generation_config, "eos_token_id", list(range(1, 600, 9)))
    items = [question(tokenizer, TEXTS[0], f"{seed}", temperature=5.0, new=20) for seed in range(8)]
    prompt = generation.read_prompt(model, tokenizer, items)
    trace = prompt.trace(model)
    lengths = [tokens for _, tokens in answers(model, tokenizer, items)]
    assert trace.lengths.tolist() == lengths
    assert len(set(lengths)) > 2
    for row, length in zip(trace.tokens.tolist(), lengths):
        ends = [place for place, token in enumerate(row) if token % 9 == 1 and place < length]
        assert ends == [length - 1] or (length == 20 and not ends)


def test_methods_share_prompts_and_draws(model, tokenizer):
    items = [question(tokenizer, text, "a", new=20) for text in TEXTS]
    methods = tuple(map(foveate.methods.parse, ["dense", "h2o:top_k=8,window=4", "h2o:top_k=1000"]))
    with foveate.attached(model, foveate.methods.SharedPrompt(methods)):
        prompt = generation.read_prompt(model, tokenizer, items)
    outputs = []
    for method in methods:
        with foveate.attached(model, method):
            outputs.append(prompt.decode(model, shared=True).outputs)
            assert generation.run_batch(model, tokenizer, items).outputs == outputs[-1]
    assert outputs[0] == outputs[2]
    assert outputs[0] != outputs[1]


def test_the_drawn_answers_of_dense_can_be_gone_along(model, tokenizer):
    items = [question(tokenizer, text, "a", new=20) for text in TEXTS]
    with foveate.attached(model, "dense"):
        prompt = generation.read_prompt(model, tokenizer, items)
        trace = prompt.trace(model)
        own = generation.run_batch(model, tokenizer, items).outputs
        along = generation.read_prompt(model, tokenizer, items).decode(model, along=trace).outputs
    assert [(output.text, output.tokens) for output in along] == [(output.text, output.tokens) for output in own]
    assert all(output.agreed == output.tokens for output in along)
    assert all(output.divergence < 1e-6 for output in along)


def test_greedy_and_sampled_items_share_no_batch(tokenizer):
    sampled = question(tokenizer, "a", "a")
    greedy = dataclasses.replace(sampled, sampling=None)
    assert [len(group) for group in generation.batches([sampled, sampled, greedy, sampled], 4)] == [2, 1, 1]


def test_greedy_answers_are_counted(model, tokenizer, monkeypatch):
    greedy = [dataclasses.replace(question(tokenizer, text, "a"), sampling=None) for text in TEXTS]
    (ids,) = generation.read_prompt(model, tokenizer, greedy[:1]).trace(model).tokens.tolist()
    assert [tokens for _, tokens in answers(model, tokenizer, greedy)] == [12, 12, 12]
    monkeypatch.setattr(model.generation_config, "eos_token_id", ids[4])
    assert answers(model, tokenizer, greedy)[0][1] == ids.index(ids[4]) + 1
