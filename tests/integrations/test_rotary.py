"""The rotary positions that methods get are those of Transformers' own modules, or the model is refused."""

import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama

import foveate
from foveate import methods, ops
from foveate.integrations.transformers.rotary import rotary_of_layers
from foveate.integrations.transformers.support import attention_modules, decoder_of
from foveate.methods import Dense, base
from foveate.ops import KV
from tests.helpers import cached, generate, prepare, tokens

SIZES = {
    **{"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0},
}
ORIGINAL = {"original_max_position_embeddings": 64, "rope_theta": 1000.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)], **ORIGINAL}
NARROW = {"rope_type": "longrope", "short_factor": [1.5] * 4, "long_factor": [3.0 + i for i in range(4)], **ORIGINAL}
KINDS = {
    "default": ("Llama", {}),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}}),
    "llama3": (
        "Llama",
        {
            "rope_parameters": {
                **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL}
            }
        },
    ),
    "yarn": ("Llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}}),
    "longrope": ("Llama", {"rope_parameters": LONG}),
    "partial": ("Phi3", {"partial_rotary_factor": 0.5}),
    "partial longrope": ("Phi3", {"partial_rotary_factor": 0.5, "rope_parameters": NARROW}),
    "partial neighbours": ("Glm", {}),
    "neighbours": ("Cohere", {}),
    "by type of layer": ("Gemma3Text", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    "norms of queries": ("Qwen3", {}),
    "yarn with sinks": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def build(family, **more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | more)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def found(model):
    decoder = decoder_of(model)
    config = decoder.config.get_text_config(decoder=True)
    modules, _ = attention_modules(model, decoder, config)
    return rotary_of_layers(model, decoder, config, modules), modules, config


def by_transformers(model, module, config, x, positions):
    """Heads ``[1, H, L, D]`` as the model itself rotates them at positions ``[1, L]``."""
    kinds = getattr(config, "layer_types", None)
    by_type = isinstance((config.rope_parameters or {}).get(kinds[module.layer_idx] if kinds else ""), dict)
    own = {"layer_type": kinds[module.layer_idx]} if by_type else {}
    cos, sin = decoder_of(model).rotary_emb(x, positions, **own)
    return sys.modules[type(module).__module__].apply_rotary_pos_emb(x, x, cos, sin)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_rotations_are_those_of_the_model(kind):
    family, more = KINDS[kind]
    model = build(family, **more)
    layers, modules, config = found(model)
    x = torch.randn(1, 3, 40, 16, generator=torch.Generator().manual_seed(1))
    for layer, module in modules.items():
        for first in (0, 300):  # LongRoPE's other frequencies in the second case
            at = torch.arange(first, first + 40)[None]
            expected = by_transformers(model, module, config, x, at)
            rotary = layers[layer]()
            assert first == 0 or not torch.allclose(expected, x, atol=0.1)
            torch.testing.assert_close(rotary.apply(x, at[:, None]), expected, atol=2e-4, rtol=1e-4)
            torch.testing.assert_close(rotary.remove(expected, at[:, None]), x, atol=2e-4, rtol=1e-4)
            one = x[:, :, :1].expand_as(x)
            mean = by_transformers(model, module, config, one, at).mean(2)
            torch.testing.assert_close(rotary.mean(x[:, :, 0], first, 40), mean, atol=2e-4, rtol=1e-4)


def test_the_mean_knows_at_which_position_longrope_turns_to_other_frequencies():
    model = build("Llama", rope_parameters=LONG)
    layers, modules, config = found(model)
    x = torch.randn(1, 1, 1, 16)
    each = [by_transformers(model, modules[0], config, x, torch.tensor([[at]])) for at in range(50, 80)]
    by_transformers(model, modules[0], config, x, torch.tensor([[49]]))  # the prompt's own pass
    expected = torch.cat(each).mean(0, keepdim=True)
    torch.testing.assert_close(layers[0]().mean(x, 50, 30), expected, atol=1e-5, rtol=1e-4)
    flat = foveate.ops.Rotary(layers[0]().inv_freq, layers[0]().factor).mean(x, 50, 30)
    assert not torch.allclose(flat, expected, atol=1e-2)


def test_a_covariance_is_turned_from_both_sides():
    rotary = foveate.ops.Rotary(torch.rand(3), 1.2, neighbours=True)
    eye = torch.eye(8)
    matrix = torch.stack([rotary.apply(eye, torch.tensor(at)).T for at in range(5, 12)]).mean(0)
    c = torch.randn(8, 8)
    torch.testing.assert_close(rotary.mean(rotary.mean(c, 5, 7).mT, 5, 7), (matrix @ c @ matrix.T).mT)


def test_layers_without_positions_rotate_nothing():
    layers, _, _ = found(build("SmolLM3", no_rope_layers=[1, 0]))
    assert [len(layers[layer]().inv_freq) for layer in (0, 1)] == [8, 0]
    x = torch.randn(1, 2, 3, 16)
    assert torch.equal(layers[1]().apply(x, torch.arange(3)), x)
    assert torch.equal(layers[1]().mean(x, 5, 9), x)


@dataclass(frozen=True)
class Turning(Dense):
    """Dense attention that looks at the rotary positions of prompts."""

    name: ClassVar[str] = "turning"
    needs_rotary: ClassVar[bool] = True
    seen: ClassVar[list] = []

    def observe(self, cache, q, attended, scaling):
        positions = cache.positions[:, :1, -q.shape[2] :]
        self.seen.append(cache.rotary.remove(q, positions))


def test_a_prompt_in_chunks_and_copies_of_a_model_know_their_own(monkeypatch):
    model, ids = prepare(build("Llama", rope_parameters=LONG)), tokens(140)
    foveate.attach(model, Turning(), dense_below=0)
    bare = {}
    for module in model.model.layers:
        module.self_attn.q_proj.register_forward_hook(lambda one, _, out: bare.setdefault(id(one), []).append(out))
    monkeypatch.setattr(Turning, "seen", [])
    generate(model, ids, 1, prefill_chunk_size=70)  # both by the frequencies of long contexts
    first = bare[id(model.model.layers[0].self_attn.q_proj)]
    for seen, queries in zip(Turning.seen[::2], first, strict=False):
        torch.testing.assert_close(seen, queries.unflatten(-1, (4, 16)).transpose(1, 2), atol=1e-4, rtol=1e-4)
    assert len(Turning.seen) == 4


def test_what_cannot_be_undone_is_refused_and_the_model_left_as_it_was(monkeypatch):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ValueError, match=r"turning cannot undo the model's rotary positions: layer 0 .*'dynamic'"):
        foveate.attach(build("Llama", rope_parameters=rope), Turning())
    model = build("Llama")
    rotated = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, c, s: rotated(*rotated(q, k, c, s), c, s))
    for attach in (lambda: None, lambda: foveate.attach(model, "dense")):
        before = attach()
        with pytest.raises(ValueError, match="layer 0: queries and keys differ from position to position otherwise"):
            foveate.attach(model, Turning())
        assert model.__dict__.get("foveate") is before
        assert model.config._attn_implementation == ("sdpa" if before is None else "foveate")


class Halves(methods.Method):
    """All keys are read, prompts too, as if each position were half of what it is."""

    name = "halves"
    needs_rotary, stateful = True, False

    def prompt(self, cache, q, scaling):
        held, at = cache.positions, cache.positions[:, :1, -q.shape[2] :]
        k = cache.rotary.apply(cache.rotary.remove(cache.keys, held), held // 2)
        turned = cache.rotary.apply(cache.rotary.remove(q, at), at // 2)
        seen = (held[:, :, None] <= at[..., None]) & (held >= 0)[:, :, None]
        return ops.attend(turned, KV(k, cache.values), mask=seen, logits=cache.logits(scaling))

    def choose(self, cache, q, scaling):
        at = (cache.plan["lengths"] - 1)[:, None, None]
        k = cache.rotary.apply(cache.rotary.remove(cache.keys, cache.positions), cache.positions // 2)
        turned = cache.rotary.apply(cache.rotary.remove(q, at), at // 2)
        there = (cache.positions >= 0)[:, :, None]
        attended = ops.attend(turned, KV(k, cache.values), mask=there, logits=cache.logits(scaling))
        return methods.Choice(attended=attended, read=cache.plan["lengths"][:, None])


def test_a_method_that_moves_positions_attends_alike_with_and_without_a_cache(monkeypatch):
    """In a prompt, in decode steps, without a cache, in a padded batch, and with gradients."""
    monkeypatch.setattr(base, "REGISTRY", base.REGISTRY.copy())
    halves, model, ids = methods.register(Halves)(), build("Llama"), tokens(50)
    dense = model(ids).logits
    foveate.attach(model, halves, dense_below=0)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        assert (whole - dense).abs().max() > 2e-4
        cache = foveate.Cache(model, 40)
        parts = [model(part, **cached(cache)).logits for part in (ids[:, :40], *ids[:, 40:].split(1, 1))]
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=0)
        mask = torch.ones(2, 50, dtype=torch.long)
        mask[1, :20] = 0
        batch = torch.cat([ids, ids.roll(20, 1)])  # the second row is the first 30 tokens, padded on the left
        padded = model(batch, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(padded[1, 20:], model(ids[:, :30]).logits[0], atol=1e-5, rtol=0)
    model(ids, labels=ids, use_cache=False).loss.backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


def test_a_token_that_shows_no_rotation_is_refused():
    model = build("Llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[3] = 0
    with pytest.raises(ValueError, match="layer 0: the queries or keys of token 3 are zero, which shows no rotation"):
        foveate.attach(model, Turning())


def test_a_model_in_training_stays_so_and_a_failure_leaves_its_method(monkeypatch):
    model = build("Llama").train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    attached = foveate.attach(model, Turning())
    assert [module.training for module in model.modules()] == modes

    def failing(*args, **kwargs):
        assert not model.model.training
        raise KeyboardInterrupt

    monkeypatch.setattr(model.model.norm, "forward", failing)
    with pytest.raises(KeyboardInterrupt):
        foveate.attach(model, Turning())
    assert model.__dict__["foveate"] is attached
    assert [module.training for module in model.modules()] == modes
