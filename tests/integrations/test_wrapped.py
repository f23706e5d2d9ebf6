"""Models within others (pipelines, compiled models, those of PEFT), and models that `device_map` spreads."""

import pytest
import torch
import transformers
from peft import LoraConfig, PromptTuningConfig, get_peft_model

import foveate
from foveate.integrations.transformers import releases
from foveate.integrations.transformers.facts import model_facts
from foveate.integrations.transformers.support import attention_modules, unwrapped


def tiny(hidden_size: int = 32) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


IDS = torch.randint(1, 64, (2, 20), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones_like(IDS)
PADDED[1, :5] = 0


def answer(model, mask: torch.Tensor | None = None) -> list[list[int]]:
    mask = torch.ones_like(IDS) if mask is None else mask
    return model.generate(input_ids=IDS, attention_mask=mask, max_new_tokens=8, pad_token_id=0).tolist()


def facts(model: torch.nn.Module) -> dict:
    model = unwrapped(model)
    return model_facts(model.config, attention_modules(model, model.model, model.config)[0])


PEFT = {
    "lora": LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False),
    "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}


@pytest.mark.parametrize("kind", PEFT)
def test_a_model_of_peft(kind):
    model = get_peft_model(tiny(), PEFT[kind]).eval()
    expected = answer(model)
    foveate.attach(model, "dense")
    assert answer(model) == expected
    assert foveate.stats(model).layers[0].decode_steps
    with foveate.attached(model, "streaming:window=4"):
        answer(model)
        assert foveate.stats(model).layers[0].tokens_evicted
    assert answer(model) == expected
    foveate.detach(model)
    assert "foveate" not in unwrapped(model).__dict__
    assert answer(model) == expected


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_of_bitsandbytes(bits, tmp_path):
    tiny(128).save_pretrained(tmp_path)
    config = transformers.BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(tmp_path, quantization_config=config, dtype=torch.float32, device_map="cpu").eval()
    projection = model.model.layers[0].self_attn.q_proj
    assert type(projection).__name__ == f"Linear{bits}bit" + ("Lt" if bits == 8 else "")
    expected = answer(model, PADDED)
    for spec in ("dense", "pages:top_k=1.0", "snapkv:top_k=1.0", "kascade_paper:anchors=[0],top_k=1.0"):
        with foveate.attached(model, spec):
            assert answer(model, PADDED) == expected
            assert foveate.stats(model).layers[0].decode_steps
    with foveate.attached(model, "pages:top_k=8,page_size=4"):
        answer(model)
        assert 0 < foveate.stats(model).summary()["keys_read_share"] < 1
    assert model.model.layers[0].self_attn.q_proj is projection


def test_padding_with_adapters():
    model = get_peft_model(tiny(), PEFT["lora"]).eval()
    expected = answer(model, PADDED)
    with foveate.attached(model, "dense"):
        assert answer(model, PADDED) == expected


def test_padding_with_virtual_tokens():
    model = get_peft_model(tiny(), PEFT["prompt"]).eval()
    expected = answer(model, PADDED)
    with foveate.attached(model, "dense"):
        if releases.CACHE == "past_key_values":
            assert answer(model, PADDED) == expected
        else:  # which PEFT does not look for, so that it finds each step to be the first
            with pytest.raises(ValueError, match=r"PEFT up to 0\.21 repeats its virtual tokens"):
                answer(model, PADDED)


def test_active_adapters_are_other_weights():
    """So that a calibration of the model without them is refused, as on a model that they are merged into."""
    plain = facts(tiny())
    model = get_peft_model(tiny(), PEFT["lora"]).eval()
    adapted = facts(model)
    assert adapted["weights"] != plain["weights"]
    with model.disable_adapter():
        assert facts(model) == plain
    model.merge_adapter()
    for of_layer, merged in zip(adapted["weights"], facts(model)["weights"]):
        assert of_layer == pytest.approx(merged, rel=1e-3, abs=1e-6)


def test_a_compiled_model_and_a_pipeline():
    model = tiny()
    expected = answer(model)
    compiled = torch.compile(model)
    foveate.attach(compiled, "streaming:window=4")
    answer(compiled)
    assert foveate.stats(compiled) == foveate.stats(model)
    foveate.detach(compiled)
    assert answer(model) == expected

    class Pipeline:  # as much of transformers.Pipeline as is asked for
        def __init__(self):
            self.model = model

    with foveate.attached(Pipeline(), "dense"):
        assert "foveate" in model.__dict__
    assert "foveate" not in model.__dict__


@pytest.mark.parametrize(
    "spec", ["dense", "kascade_paper:anchors=1,top_k=4,min_k=1", "luka:page_size=4,top_k=1,sinks=1,tail=4"]
)
def test_a_model_that_device_map_spreads(tmp_path, spec):
    tiny(128).save_pretrained(tmp_path)
    places = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    places["model.layers.1"] = "disk"
    spread = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map=places, offload_folder=tmp_path / "offloaded"
    )
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for model in (whole, spread):
        foveate.attach(model, spec)
    assert answer(spread) == answer(whole)
    assert foveate.stats(spread).layers[1].decode_steps
    with pytest.raises(ValueError, match="the model is spread over several devices"):
        foveate.attach(spread, "dense", cuda_graph=True)


@pytest.mark.parametrize("act", [foveate.stats, foveate.detach, lambda model: foveate.attach(model, "dense")])
def test_what_is_no_model_is_refused(act):
    with pytest.raises(ValueError, match="model must be a Transformers PreTrainedModel, not NoneType"):
        act(None)
