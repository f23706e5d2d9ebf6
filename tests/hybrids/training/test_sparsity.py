"""The sparsity feedback, step by step against Algorithm 1 written out in plain numbers."""

import pytest
import torch

from foveate.hybrids.layers import LearnedEviction
from foveate.hybrids.models import HybridForCausalLM, make_config
from foveate.hybrids.training import sparsity
from foveate.hybrids.training.sparsity import SPARED, SparsityFeedback, SparsitySettings

HEADS = 3


def scores(generator, keep, layers=2, batch=2, length=20):
    """Retention scores of which a head retains about a share `keep[head]`."""
    random = torch.rand(layers, batch, HEADS, length, generator=generator)
    shift = torch.tensor(keep)[:, None] - 0.5
    return tuple((random + shift).clamp(0.01, 0.99))


def written_out(rounds, s):
    """λ and the average after each step, [layers][heads], as Algorithm 1 and the notes on its code put it."""
    layers = len(rounds[0])
    weights = [[s.start] * HEADS for _ in range(layers)]
    average = [[None] * HEADS for _ in range(layers)]
    history = []
    a = 2 / (1 + s.interval / 2)
    for number, retention in enumerate(rounds, start=1):
        for layer in range(layers):
            for head in range(HEADS):
                rows = retention[layer][:, head, :-SPARED].tolist()
                count = sum(sum(score > 0.5 for score in row) for row in rows) / len(rows)
                old = average[layer][head]
                keep = a if s.variant == "paper" else 1 - a
                average[layer][head] = count if old is None else keep * old + (1 - keep) * count
                if number % s.interval:
                    continue
                mean, weight = average[layer][head], weights[layer][head]
                if mean > s.budget:
                    weight *= s.up
                elif mean < 0.95 * s.budget:
                    weight *= s.down
                weight = min(weight, 1.0)
                if s.variant == "paper":
                    weight = 0.0 if mean < 1e-9 else weight
                    weight = 1e-9 if mean > s.budget and weight == 0 else weight
                else:
                    weight = 0.0 if weight < 1e-9 else weight
                    weight = 1e-9 if mean >= 0.95 * s.budget and weight == 0 else weight
                weights[layer][head] = weight
        history.append(([row[:] for row in weights], [row[:] for row in average]))
    return history


@pytest.mark.parametrize("variant", ["code", "paper"])
@pytest.mark.parametrize("start", [1e-9, 0.4])
def test_algorithm_1_step_by_step(variant, start):
    settings = SparsitySettings(budget=6, interval=2, variant=variant, start=start)
    generator = torch.Generator().manual_seed(0)
    keeps = [(0.9, 0.44, 0.0)] * 8 + [(0.05, 0.5, 0.95)] * 12
    rounds = [scores(generator, keep) for keep in keeps]
    feedback = SparsityFeedback(settings)
    expected = written_out(rounds, settings)
    for retention, (weights, average) in zip(rounds, expected):
        feedback.penalty(retention)
        feedback.observe(retention)
        feedback.step()
        torch.testing.assert_close(feedback.weights, torch.tensor(weights), rtol=1e-5, atol=0)
        torch.testing.assert_close(feedback.average, torch.tensor(average), rtol=1e-5, atol=1e-5)
    seen = torch.tensor([weights for weights, _ in expected])
    assert seen.max() > start  # it rose,
    assert seen.min() < start  # it fell,
    if variant == "code" and start == 1e-9:
        gone = seen == 0
        assert (gone[:-1] & ~gone[1:]).any()  # and vanished and came back
    if start == 0.4:
        assert seen.max() == 1.0


def test_the_penalty_is_a_mean_in_the_code_and_a_sum_in_the_paper():
    retention = scores(torch.Generator().manual_seed(1), (0.9, 0.5, 0.2))
    weights = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    total = sum(
        float(weights[layer, head]) * max(0.0, float(score) - 0.5)
        for layer in range(2)
        for head in range(HEADS)
        for row in retention[layer]
        for score in row[head]
    )
    for variant, expected in (("code", total / (2 * 2 * HEADS * 20)), ("paper", total / 2)):
        feedback = SparsityFeedback(SparsitySettings(budget=6, variant=variant))
        feedback.weights = weights
        assert float(feedback.penalty(retention)) == pytest.approx(expected, rel=1e-5)


def test_the_penalty_pulls_at_retained_scores_alone():
    leaves = [torch.tensor([[[0.7, 0.4, 0.9]]], requires_grad=True)]
    SparsityFeedback(SparsitySettings(budget=6, start=0.3)).penalty(leaves).backward()
    assert (leaves[0].grad > 0).tolist() == [[[True, False, True]]]


def test_a_step_says_by_how_much_scores_exceed_the_budget():
    """It is the mean over sequences, of which one with many such tokens weighs no more."""
    logits = torch.randn(2, 4, 3, 46, generator=torch.Generator().manual_seed(0))
    feedback = SparsityFeedback(SparsitySettings(budget=10))
    feedback.observe(list(logits.sigmoid()), biased=True)
    feedback.step(held=True)
    highest_left = logits[..., :-SPARED].topk(11).values[..., -1]
    torch.testing.assert_close(feedback.excess, highest_left.mean(1))
    feedback.observe(list(logits.sigmoid()))
    feedback.step()
    assert feedback.excess is None


def test_micro_batches_count_as_one_step():
    retention = scores(torch.Generator().manual_seed(2), (0.9, 0.5, 0.2), batch=4)
    whole, parts = (SparsityFeedback(SparsitySettings(budget=6, interval=1)) for _ in range(2))
    whole.observe(retention)
    for half in (slice(0, 2), slice(2, 4)):
        parts.observe([layer[half] for layer in retention])
    whole.step()
    parts.step()
    assert torch.equal(whole.average, parts.average)
    assert torch.equal(whole.weights, parts.weights)


def test_it_goes_on_from_its_state():
    generator = torch.Generator().manual_seed(3)
    rounds = [scores(generator, (0.9, 0.5, 0.2)) for _ in range(9)]
    settings = SparsitySettings(budget=6, interval=2)
    whole = SparsityFeedback(settings)
    for number, retention in enumerate(rounds):
        if number == 5:
            again = SparsityFeedback(settings)
            again.load_state_dict({name: value.clone() for name, value in whole.state_dict().items()})
        for feedback in (whole, again) if number >= 5 else (whole,):
            feedback.observe(retention)
            feedback.step()
    assert torch.equal(whole.weights, again.weights)
    assert torch.equal(whole.average, again.average)


def test_bad_input():
    feedback = SparsityFeedback(SparsitySettings(budget=6))
    with pytest.raises(ValueError, match="retention is empty"):
        feedback.penalty(())
    with pytest.raises(ValueError, match=r"must have one shape .* got \(1, 2, 8\), \(1, 3, 8\)"):
        feedback.penalty([torch.rand(1, 2, 8), torch.rand(1, 3, 8)])
    with pytest.raises(ValueError, match="sequences of 6 tokens"):
        feedback.observe([torch.rand(1, 2, 6)])
    with pytest.raises(RuntimeError, match="without observe"):
        feedback.step()
    with pytest.raises(ValueError, match=r"unknown variant 'papr'. Did you mean 'paper'\?"):
        SparsitySettings(variant="papr")
    with pytest.raises(ValueError, match=r"sparsity\.hold is 0\.5, and sparsity\.budget is none"):
        SparsitySettings(hold=0.5)
    with pytest.raises(ValueError, match=r"sparsity\.release is 0\.1, and sparsity\.budget is none"):
        SparsitySettings(release=0.1)
    with pytest.raises(ValueError, match=r"sparsity\.release must be at least 0 and below 0\.6, .*, got 0\.7"):
        SparsitySettings(budget=6, hold=0.4, release=0.7)
    for name, value, allowed in (
        ("up", 1.0, "above 1"),
        ("interval", 0, "at least 1"),
        ("hold", 1.0, r"in \[0, 1\)"),
    ):
        with pytest.raises(ValueError, match=f"sparsity.{name} must be {allowed}, got {value}"):
            SparsitySettings(budget=6, **{name: value})


def test_the_last_tokens_are_those_whose_scores_lack_followers():
    model = HybridForCausalLM(make_config("lalte", "tiny"))
    layers = [module for module in model.modules() if isinstance(module, LearnedEviction)]
    assert {layer.reach for layer in layers} == {SPARED}


def test_silent_and_saturated_heads_are_reported(monkeypatch):
    """A head that retains nothing for so many steps is named, once; one whose scores left the slope is counted."""
    monkeypatch.setattr(sparsity, "MUTE", 3)
    feedback = SparsityFeedback(SparsitySettings(budget=6))
    retention = torch.full((2, 2, HEADS, 20), 0.6)  # [layers, B, heads, L]
    retention[1, :, 2] = 0.4
    retention[0, :, 1] = 0.999
    warnings = []
    for step in range(5):
        if step == 4:
            retention[1, :, 2, 3] = 0.6
        feedback.penalty(tuple(retention))
        feedback.observe(tuple(retention))
        feedback.step(held=step < 2)
        warnings.append(feedback.warning())
        found = feedback.summary()
        assert found["heads_silent"] == (1 if step < 4 else 0)
        assert found["heads_saturated"] == 1
        assert found["retained"][0] == 3 * [14.0]
    assert [warning is not None for warning in warnings] == [False, False, True, False, False]
    assert "(layer.head, from 0), 1.2 retained nothing for 3 steps" in warnings[2]
    assert feedback.steps == 3  # held ones do not count
