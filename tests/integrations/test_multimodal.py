"""Whole multimodal models of docs/models.md: text prompts, and images where their decoder reads them causally."""

import functools
from pathlib import Path

import pytest
import torch
import transformers

import foveate
from foveate import methods
from tests.families import _EXPERTS, _SIZES
from tests.helpers import generate, left_padded
from tests.multimodal import IMAGES, WHOLE, image, whole

CAUSAL_IMAGES = [name for name in IMAGES if name != "Gemma 3"]


@functools.cache
def own(name):
    """Transformers' own tokens of a padded batch."""
    return generate(whole(name), **text(), new=10)


def text():
    batch = left_padded([40, 23])
    return batch | {"input_ids": batch["input_ids"].clamp(max=88)}  # no image token


@pytest.mark.parametrize("name", WHOLE)
def test_text_prompts(name):
    model = whole(name)
    assert len(own(name).unique()) > 5
    for method in ("luka", "h2o"):
        with foveate.attached(model, method, **methods.get(method).full_budget):
            assert torch.equal(generate(model, **text(), new=10), own(name)), method
    assert torch.equal(generate(model, **text(), new=10), own(name))  # nothing of it remains


@pytest.mark.parametrize("name", CAUSAL_IMAGES)
def test_images(name):
    model, batch = whole(name), image(name)
    expected = generate(model, **batch, new=10)
    other = dict(batch, pixel_values=batch["pixel_values"] * -3)
    assert not torch.equal(generate(model, **other, new=10), expected)  # the image matters
    for method in ("luka", "h2o"):
        with foveate.attached(model, method, **methods.get(method).full_budget):
            assert torch.equal(generate(model, **batch, new=10), expected), method


def test_a_prompt_without_images_beside_types_of_tokens(monkeypatch):
    """As Gemma 3's processor gives them with every prompt."""
    monkeypatch.setattr("foveate.integrations.transformers.attention._BLOCK", 16)
    model, batch = whole("Gemma 3"), left_padded([30, 21])
    batch |= {"input_ids": batch["input_ids"].clamp(max=88), "token_type_ids": torch.zeros_like(batch["input_ids"])}
    expected = generate(model, **batch, new=6)
    with foveate.attached(model, "h2o", **methods.get("h2o").full_budget):
        assert torch.equal(generate(model, **batch, new=6), expected)


def test_images_whose_tokens_see_each_other():
    with foveate.attached(whole("Gemma 3"), "h2o"), pytest.raises(ValueError, match="images whose tokens see later"):
        generate(whole("Gemma 3"), **image("Gemma 3"), new=4)


def test_the_documented_table():
    def row(name):
        with foveate.attached(whole(name), "dense") as attachment:
            kinds = ", ".join(sorted({"full attention", *attachment.unchanged.values()}))
        tried = "refused" if name == "Gemma 3" else "yes" if name in IMAGES else ""
        return f"| {name} | `{type(whole(name)).__name__}` | {kinds} | {tried} |"

    told = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert [line for line in told.splitlines() if "ForConditionalGeneration` |" in line] == list(map(row, WHOLE))


LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
REFUSED = {
    "MiniMaxM3VLTextConfig": (
        _EXPERTS | {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads": 2, "index_head_dim": 16},
        r"an indexer of their own \(MiniMaxM3VLIndexer\)",
    ),
    "DeepseekV3Config": (
        _EXPERTS | LATENT | {"num_key_value_heads": 4, "first_k_dense_replace": 1},
        "latent attention",
    ),
    "MllamaTextConfig": (
        {
            "num_hidden_layers": 3,
            "cross_attention_layers": [1],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        r"layers \[1\] attend to images",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused_before_anything_is_changed(kind):
    settings, why = REFUSED[kind]
    config = getattr(transformers, kind)(**_SIZES | settings)
    model = getattr(transformers, kind.replace("TextConfig", "Config").replace("Config", "ForCausalLM"))(config)
    with pytest.raises(ValueError, match=why):
        foveate.attach(model, "h2o")
    assert "foveate" not in vars(model)
