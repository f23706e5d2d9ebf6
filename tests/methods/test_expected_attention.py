"""Expected Attention: scores and kept tokens against the published formula, by the model's own rotary positions."""

import pytest
import torch
import transformers

import foveate
from foveate import methods
from foveate.methods import bases
from tests.helpers import COMMON, generate, left_padded, prepare, tokens
from tests.methods.driver import PROMPT, Driver

ORIGINAL = {"rope_theta": 1000.0, "original_max_position_embeddings": 128}
KINDS = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
}
LENGTH, FUTURE, SINKS = 70, 512, 4


def llama(rope):
    torch.manual_seed(0)
    return prepare(transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON, head_dim=16, rope_parameters=rope)))


def published(model, layer, hidden, keys, values):
    """Scores ``[Hkv, L]`` as the authors compute them, from the layer's input: fp64; infinite for sinks."""
    attention, (heads, groups) = model.model.layers[layer].self_attn, (model.config.num_attention_heads, keys.shape[1])
    hidden, weight = hidden[0, SINKS:].double(), attention.q_proj.weight.double().unflatten(0, (heads, -1))
    mean, centred = hidden.mean(0), hidden - hidden.mean(0)
    mu, cov = weight @ mean, weight @ (centred.T @ centred / len(hidden)) @ weight.mT
    at = torch.arange(keys.shape[2], keys.shape[2] + FUTURE)[None]
    cos, sin = (x[0].double() for x in model.model.rotary_emb(hidden.float(), at))
    half, eye = 8, torch.eye(16, dtype=torch.float64)
    swapped = torch.cat([-eye[half:], eye[:half]])
    turned = (cos[:, :, None] * eye + sin[:, :, None] * swapped).mean(0)
    mu, cov = mu @ turned.T, turned @ cov @ turned.T
    k = keys[0, :, SINKS:].double().repeat_interleave(heads // groups, 0)
    logits = (k @ mu[..., None])[..., 0] / 4 + ((k @ cov) * k).sum(-1) / 16 / 2
    scores = logits.softmax(-1).unflatten(0, (groups, -1)).mean(1) * values[0, :, SINKS:].double().norm(dim=-1)
    return torch.nn.functional.pad(scores, (SINKS, 0), value=torch.inf)


@pytest.fixture
def scored(monkeypatch):
    found, own = [], methods.get("expected_attention").scores

    def scores(self, cache, scaling):
        found.append((own(self, cache, scaling), cache.keys.clone(), cache.values.clone()))
        return found[-1][0]

    monkeypatch.setattr(methods.get("expected_attention"), "scores", scores)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [None, 17])
def test_scores_are_the_published_ones(kind, chunk, scored):
    model, ids, inputs = llama(KINDS[kind]), tokens(LENGTH), {}
    for layer, block in enumerate(model.model.layers):
        block.input_layernorm.register_forward_hook(lambda _, __, out, n=layer: inputs.setdefault(n, []).append(out))
    with foveate.attached(model, "expected_attention", top_k=20, dense_below=0):
        inputs.clear()  # of the tokens by which rotations were proved
        generate(model, ids, 1, **({} if chunk is None else {"prefill_chunk_size": chunk}))
    assert len(scored) == model.config.num_hidden_layers
    for layer, (scores, keys, values) in enumerate(scored):
        expected = published(model, layer, torch.cat(inputs[layer], 1)[:, :LENGTH], keys, values)
        torch.testing.assert_close(scores[0, :, SINKS:].double(), expected[..., SINKS:], atol=1e-6, rtol=2e-3)


def test_sinks_and_the_best_are_kept(scored):
    model = llama(KINDS["yarn"])
    with foveate.attached(model, "expected_attention", top_k=20, dense_below=0):
        cache = foveate.Cache(model)
        with torch.no_grad():
            model(tokens(LENGTH), **{foveate.integrations.transformers.releases.CACHE: cache})
        for layer, (scores, _, _) in zip(cache.layers, scored):
            best = scores[..., SINKS:].topk(20 - SINKS).indices + SINKS
            for head in range(2):
                assert layer.cache.positions[0, head].tolist() == sorted([*range(SINKS), *best[0, head].tolist()])


def test_rows_of_a_padded_batch_are_scored_as_alone(scored):
    model, batch = llama(KINDS["default"]), left_padded([60, 41])
    with foveate.attached(model, "expected_attention", top_k=20, dense_below=0):
        generate(model, batch["input_ids"], 1, attention_mask=batch["attention_mask"])
        together = [scores for scores, _, _ in scored]
        scored.clear()
        generate(model, batch["input_ids"][1:, 19:], 1)
    torch.testing.assert_close(together[1], scored[0][0], atol=1e-5, rtol=1e-3)


def test_budgets_below_the_sinks_are_refused():
    with pytest.raises(ValueError, match="top_k must be an integer of at least 4"):
        methods.make("expected_attention", top_k=3)
    assert methods.make("expected_attention", top_k=0.01).allowed(100) == 4


def test_an_engine_without_rotary_positions_is_refused():
    with pytest.raises(ValueError, match="expected_attention needs the layer's rotary positions, which the engine"):
        Driver(methods.make("expected_attention")).feed(0, PROMPT)


def test_a_plain_attribute_takes_a_setting_from_a_base():
    assert {"sinks", "top_k"} <= methods.settings_of(methods.make("expected_attention")).keys()
    assert {"window", "min_k"} & methods.settings_of(methods.make("expected_attention")).keys() == set()
    assert issubclass(methods.get("expected_attention"), bases.KeepsByScore)
    with pytest.raises(ValueError, match="has no setting 'window'"):
        methods.make("expected_attention", window=3)
