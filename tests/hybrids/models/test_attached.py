"""Methods on the full-attention layers of a hybrid, whose other layers keep memories of their own."""

import pytest
import torch

import foveate
from foveate.hybrids.models import HybridForCausalLM, make_config
from tests.helpers import CACHE
from tests.hybrids.models.test_models import generate, greedy, model_of, prompt

FULL = ["dense", "tova:top_k=1.0", "h2o:top_k=1.0", "uniform:top_k=1.0", "kascade_paper:top_k=1.0,anchors=1"]
SPARSE = ["tova:top_k=24", "uniform:top_k=8,window=8", "kascade_paper:top_k=12,anchors=1,tile=1"]


@pytest.mark.parametrize("spec", FULL)
def test_a_full_budget_changes_no_token(spec):
    model = model_of("gdn_attn")
    with foveate.attached(model, spec):
        assert torch.equal(generate(model, prompt()), greedy("gdn_attn"))


@pytest.mark.parametrize("spec", SPARSE)
def test_modes_agree(spec):
    model, ids = model_of("gdn_attn"), prompt()
    with foveate.attached(model, spec):
        expected = generate(model, ids)
        assert not torch.equal(expected, greedy("gdn_attn"))
        assert torch.equal(generate(model, ids, prefill_chunk_size=32), expected)
        assert torch.equal(generate(model, ids[:1], prompt_lookup_num_tokens=3), expected[:1])
        mask = torch.ones_like(ids)
        mask[1, :31] = 0
        padded = generate(model, ids.masked_fill(mask == 0, 1), attention_mask=mask, pad_token_id=1)
        assert torch.equal(padded[:1], expected[:1])
        assert torch.equal(padded[1:, 31:], generate(model, ids[1:, 31:]))
        assert generate(model, ids, num_beams=3).shape == expected.shape
        read = foveate.stats(model)
    assert {layer.layer: layer.method for layer in read.layers if layer.method == "unchanged"} == dict.fromkeys(
        [0, 2], "unchanged"
    )
    assert "gdn layers stay as they are" in str(read)


def test_undone_tokens():
    """A cache that records goes back in all layers, or in none."""
    model, ids = model_of("gdn_attn"), prompt(batch=1)
    with foveate.attached(model, "tova:top_k=24"), torch.no_grad():
        cache = foveate.Cache(model, prompt_length=80)
        cache.activate_past_recording()
        model(ids[:, :80], **{CACHE: cache})
        cache.crop(0)
        model(ids[:, 80:84] * 0, **{CACHE: cache})
        with pytest.raises(ValueError, match=r"cannot be undone|already made the last tokens final"):
            cache.crop(-60)
        cache.crop(-4)
        for token in range(80, 90):
            out = model(ids[:, token : token + 1], **{CACHE: cache})
    with foveate.attached(model, "tova:top_k=24"), torch.no_grad():
        plain = foveate.Cache(model, prompt_length=80)
        model(ids[:, :80], **{CACHE: plain})
        for token in range(80, 90):
            one = model(ids[:, token : token + 1], **{CACHE: plain})
    torch.testing.assert_close(out.logits, one.logits, atol=1e-5, rtol=1e-4)


def test_models_without_full_attention_are_refused():
    for preset in ("lalte", "gdn_swa", "lansa", "gdn"):
        with pytest.raises(ValueError, match="there is no long context to make cheaper"):
            foveate.attach(HybridForCausalLM(make_config(preset, "tiny")), "tova")
