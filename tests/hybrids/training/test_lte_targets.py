"""What later queries take of tokens, against attention written out; rotations that can be undone."""

import pytest
import torch
import transformers

from foveate.errors import UserError
from foveate.hybrids.training import lte_targets
from foveate.hybrids.training.lte_targets import FrozenModel, largest_share, log_length
from foveate.ops import Logits, Rotary
from tests.helpers import COMMON, FAMILIES, SLIDING, tiny_model, tokens


@pytest.mark.parametrize("length", [9, 40, 300])
@pytest.mark.parametrize("window", [1, 7])
def test_the_largest_share_of_later_queries(length, window, monkeypatch):
    monkeypatch.setattr(lte_targets, "_QUERIES", 13)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, length, 8, generator=generator) for heads in (6, 2))
    logits = q @ k.repeat_interleave(3, 1).transpose(-1, -2) * 0.7
    logits = logits.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    early = torch.arange(length)[:, None] - torch.arange(length) < window
    expected = logits.log_softmax(-1).masked_fill(early, float("-inf")).amax(2)
    found = largest_share(q, k, logits.logsumexp(-1), Logits(0.7), window)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert found[:, :, -window:].isneginf().all()


def test_the_length_of_a_value_in_the_output():
    model = tiny_model()
    attention = model.model.layers[1].self_attn
    v = torch.randn(1, 2, 5, 16, generator=torch.Generator().manual_seed(0))
    frozen = FrozenModel(model, 4)
    found = log_length(v, frozen._reader.grams[1]).flatten(1, 2)
    for head in range(6):
        alone = torch.zeros(1, 5, 96)
        alone[..., head * 16 : (head + 1) * 16] = v[:, head // 3]
        with torch.no_grad():
            torch.testing.assert_close(found[:, head].exp(), attention.o_proj(alone).norm(dim=-1))


def test_the_worth_of_a_token_is_the_most_that_a_head_of_its_group_takes():
    """Of the probability times the length of the value in the output, from queries beyond the window."""
    model, ids, window = tiny_model(), tokens(40), 5
    seen = FrozenModel(model, window).read(ids)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
        for layer, one in seen.items():
            expected = torch.zeros(2, 40 - window)
            for head in range(6):
                alone = torch.zeros(40, 96)
                alone[:, head * 16 : (head + 1) * 16] = one.v[0, head // 3]
                length = model.model.layers[layer].self_attn.o_proj(alone).norm(dim=-1)
                for key in range(40 - window):
                    taken = attentions[layer][0, head, key + window :, key].max() * length[key]
                    expected[head // 3, key] = max(expected[head // 3, key], taken)
            torch.testing.assert_close(one.worth[0, :, :-window].exp(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_keys_and_worth_of_a_model(family):
    model, ids = tiny_model(family), tokens(60)
    before = model.config._attn_implementation
    frozen = FrozenModel(model, 5)
    seen, lengths = frozen.read_with_lengths(ids)
    full = [layer for layer in range(model.config.num_hidden_layers) if layer not in SLIDING.get(family, [])]
    assert sorted(seen) == sorted(lengths) == full == list(frozen.layers)
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states
    for layer, one in seen.items():
        assert one.k.shape == one.v.shape == (1, 2, 60, 16)
        assert one.worth[..., :-5].isfinite().all()
        torch.testing.assert_close(lengths[layer], hidden[layer][0].norm(dim=-1).log(), atol=1e-4, rtol=1e-4)
    assert model.config._attn_implementation == before
    assert not hasattr(model, "foveate")


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1000.0, "original_max_position_embeddings": 128},
        {
            **{"rope_type": "llama3", "factor": 8.0, "rope_theta": 1000.0, "low_freq_factor": 1.0},
            **{"high_freq_factor": 4.0, "original_max_position_embeddings": 128},
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_static_rotations_are_undone(rope):
    """The first layer's keys are those of its projection, which knows no position."""
    model = llama(rope_parameters=rope)
    frozen, ids = FrozenModel(model, 4), tokens(50)
    with torch.no_grad():
        x = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))
        expected = model.model.layers[0].self_attn.k_proj(x).unflatten(-1, (2, 16)).transpose(1, 2)
    at = torch.arange(50)[None, None]
    turned = frozen.read(ids)[0].k
    assert (turned - expected).abs().max() > 0.1
    k = Rotary(frozen.inv_freq[0], float(frozen.rotary_scaling[0])).remove(turned, at)
    torch.testing.assert_close(k, expected, atol=1e-4, rtol=1e-4)


def llama(**more):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON | {"head_dim": 16} | more)).eval()


def test_rotations_that_move_with_the_context_are_refused():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(UserError, match=r"layer 0 has rotary positions of kind 'dynamic'.*change with the context"):
        FrozenModel(llama(rope_parameters=rope), 4)


def test_rotations_of_neighbours_are_refused():
    torch.manual_seed(0)
    model = transformers.CohereForCausalLM(transformers.CohereConfig(**COMMON)).eval()
    with pytest.raises(UserError, match="in another way than by halves"):
        FrozenModel(model, 4)


def test_layers_without_positions_are_found():
    torch.manual_seed(0)
    config = transformers.SmolLM3Config(**COMMON, no_rope_layers=[1, 0, 1])
    frozen = FrozenModel(transformers.SmolLM3ForCausalLM(config).eval(), 4)
    assert frozen.inv_freq.any(1).tolist() == [True, False, True]
