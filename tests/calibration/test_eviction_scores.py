"""Scores of a frozen model's tokens: rotation undone, pieces, budgets under one threshold, the file."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from foveate import ops
from foveate.calibration import eviction_scores
from foveate.calibration.eviction_scores import LEVELS, EvictionScores
from foveate.hybrids.layers import Rotary, rotate

FACTS = {
    **{"model_type": "llama", "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 16},
    **{"weights": [[0.5, -0.25]], "rope": {"rope_type": "default", "rope_theta": 100.0}},
}


def drawn(layers=(1, 3), dim=16, rotated=12, seed=0):
    """A module with random weights and statistics."""
    torch.manual_seed(seed)
    frequencies = (100.0 ** -(torch.arange(0, rotated, 2) / rotated)).expand(len(layers), -1)
    scores = EvictionScores(FACTS, layers, 2, dim, dim, frequencies, torch.full((len(layers),), 1.3), 32, 512)
    for name in ("centre", "offset"):
        getattr(scores, name).normal_()
    for name in ("spread", "scale"):
        getattr(scores, name).uniform_(0.5, 2)
    scores.quantiles.copy_(torch.randn(len(layers), 2, LEVELS).sort(-1).values)
    return scores.eval()


def tokens(length, dim=16, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(2, 2, length, dim, generator=generator) for _ in range(2))


def test_rotation_is_undone():
    k, _ = tokens(50, 24)
    positions = torch.arange(7, 57)[None, None]
    rotary = Rotary(16, 1000.0)
    turned = torch.cat([1.3 * rotate(k[..., :16], rotary.angles(positions[0])), k[..., 16:]], -1)
    frequencies = 1000.0 ** -(torch.arange(0, 16, 2) / 16)
    assert (turned - k).abs().max() > 1
    torch.testing.assert_close(ops.Rotary(frequencies, 1.3).remove(turned, positions), k, atol=1e-5, rtol=1e-5)


def test_a_score_does_not_depend_on_where_the_token_stands():
    scores, (k, v) = drawn(), tokens(40)
    at = torch.arange(40)[None, None]
    found = []
    for first in (0, 300):
        rotary = Rotary(12, 100.0)
        turned = torch.cat([1.3 * rotate(k[..., :12], rotary.angles(at[0] + first)), k[..., 12:]], -1)
        found.append(scores.score(3, turned, v, at + first))
    torch.testing.assert_close(*found, atol=1e-3, rtol=1e-3)
    assert found[0].std() > 0.1


def test_pieces_are_one_piece(monkeypatch):
    scores, (k, v) = drawn(), tokens(100)
    at = torch.arange(100)[None, None]
    whole = scores.score(1, k, v, at)
    monkeypatch.setattr(eviction_scores, "_PIECE", 9)
    torch.testing.assert_close(scores.score(1, k, v, at), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores.score(1, *(x[:, :, 50 - 6 : 51 + 6] for x in (k, v, at)))[..., 6], whole[..., 50])


def test_a_head_is_scored_alone():
    scores, (k, v) = drawn(), tokens(20)
    at = torch.arange(20)[None, None]
    before = scores.score(1, k, v, at)
    k[:, 1] += 1
    after = scores.score(1, k, v, at)
    assert torch.equal(before[:, 0], after[:, 0])
    assert not torch.isclose(before[:, 1], after[:, 1]).any()


@given(share=st.floats(0.01, 0.99), seed=st.integers(0, 99))
def test_heads_share_a_budget_by_one_threshold(share, seed):
    scores = drawn(seed=seed)
    spread = torch.rand(2, 2, 1, generator=torch.Generator().manual_seed(seed)) * 3
    scores.quantiles.copy_(torch.linspace(-1, 1, LEVELS) * spread + spread)
    found = scores.shares(share, (1, 3))
    assert found.mean() == pytest.approx(share, rel=1e-3)
    samples = scores.quantiles.double()
    threshold = samples.flatten().quantile(1 - share)  # all heads have as many samples
    torch.testing.assert_close(found, (samples > threshold).double().mean(-1), atol=0.01, rtol=0.01)


def test_who_shares_the_budget_matters():
    scores = drawn()
    scores.quantiles[1] += 10
    together, alone = scores.shares(0.5, (1, 3)), scores.shares(0.5, (1,))
    torch.testing.assert_close(together, torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64), atol=0.01, rtol=0)
    assert alone.mean() == pytest.approx(0.5, rel=1e-3)
    assert torch.equal(scores.shares(1.0, (1, 3)), torch.ones(2, 2, dtype=torch.float64))


def test_the_file_brings_back_the_same_scores(tmp_path):
    scores, (k, v) = drawn(), tokens(30)
    scores.save(tmp_path / "lte.safetensors")
    loaded = EvictionScores.load(tmp_path / "lte.safetensors")
    at = torch.arange(30)[None, None]
    assert torch.equal(loaded.score(3, k, v, at), scores.score(3, k, v, at))
    assert (loaded.model, loaded.layers, loaded.window, loaded.length) == (FACTS, (1, 3), 32, 512)
    assert torch.equal(loaded.shares(0.1, (1, 3)), scores.shares(0.1, (1, 3)))
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert [path.name for path in tmp_path.iterdir()] == ["lte.safetensors"]


def with_facts(path, **changed):
    facts = {"schema": 1, "model": FACTS, "layers": [1, 3], "num_kv_heads": 2, "head_dim": 16, "value_dim": 16}
    facts |= {"window": 32, "length": 512} | changed
    save_file(load_file(path), path, {"foveate.eviction_scores": json.dumps(facts)})


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda path: path.unlink(), "no such LTE file"),
        (lambda path: path.write_bytes(path.read_bytes()[:100]), "not an LTE file"),
        (lambda path: save_file(load_file(path), path), "not an LTE file"),
        (lambda path: with_facts(path, schema=2), "schema 2, and this version reads 1"),
        (lambda path: with_facts(path, num_kv_heads=4), "a damaged LTE file"),
        (lambda path: with_facts(path, layers=[1]), "a damaged LTE file"),
        *(
            (lambda path, changed=changed: with_facts(path, **changed), match)
            for changed, match in (
                ({"length": -5}, "length must be an integer of at least 1, not -5"),
                ({"length": 1.5}, "length must be an integer of at least 1, not 1.5"),
                ({"window": 0}, "window must be an integer of at least 1, not 0"),
                ({"layers": [3, 1]}, r"layers must be ascending numbers, not \[3, 1\]"),
                ({"layers": [1, 1]}, "layers must be ascending numbers"),
                ({"layers": ["1", "3"]}, "layers must be ascending numbers"),
            )
        ),
        *(
            (lambda path, name=name, value=value: drawn_with(name, value).save(path), match)
            for name, value, match in (
                ("scale", torch.nan, "not finite"),
                ("scale", -1.0, "scale must be above 0"),
                ("spread", 0.0, "spread must be above 0"),
                ("rotary_scaling", 0.0, "rotary_scaling must be above 0"),
                ("quantiles", torch.linspace(1, -1, LEVELS), "quantiles must not descend"),
                ("quantiles", 0.0, "quantiles of a head must not all be the same"),
            )
        ),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path, spoil, match):
    path = tmp_path / "lte.safetensors"
    drawn().save(path)
    spoil(path)
    with pytest.raises(ValueError, match=match) as error:
        EvictionScores.load(path)
    assert "foveate train lte" in str(error.value)


def drawn_with(name, value):
    """A module of which one tensor begins with a value that no training leaves."""
    scores = drawn()
    getattr(scores, name)[0] = value
    return scores


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"layers": 5}, "with layers 4, and this one has 5"),
        ({"model_type": "qwen2"}, "with model_type 'llama', and this one has 'qwen2'"),
        ({"weights": [[0.5, 0.25]]}, "its weights differ"),
        ({"rope": {"rope_type": "yarn"}}, "rotary positions"),
    ],
)
def test_another_model_is_refused(changed, match):
    scores = drawn()
    scores.check_model(FACTS)
    scores.source = "a.safetensors"
    with pytest.raises(ValueError, match=match) as error:
        scores.check_model(FACTS | changed)
    assert "LTE file 'a.safetensors'" in str(error.value)


def test_the_copy_for_another_device_is_made_outside_of_inference_mode(monkeypatch):
    own, made = drawn(), []
    copied = eviction_scores.copy.deepcopy

    def noting(one, *memo):
        made.append(torch.is_inference_mode_enabled())
        return copied(one, *memo)

    monkeypatch.setattr(eviction_scores.copy, "deepcopy", noting)
    k, v = (torch.empty(1, own.num_kv_heads, 40, 16, device="meta") for _ in range(2))
    with torch.inference_mode():
        for layer in own.layers:
            assert own.score(layer, k, v, torch.arange(40, device="meta")[None, None]).device.type == "meta"
    assert made
    assert not any(made)


@pytest.mark.gpu
def test_scores_on_a_gpu_are_those_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    own, (k, v) = drawn(), tokens(300)
    at = torch.arange(300)[None, None]
    with torch.inference_mode():
        found = own.score(3, k.cuda(), v.cuda(), at.cuda())
    torch.testing.assert_close(found.cpu(), own.score(3, k, v, at), rtol=1e-4, atol=1e-4)
