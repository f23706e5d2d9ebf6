"""Models with sparse attention of their own, against what Transformers computes with masks."""

import copy
import itertools
import pickle

import pytest
import torch
import transformers

import foveate
from foveate.calibration import say_once
from foveate.integrations.transformers import csa
from foveate.integrations.transformers.csa import attention as csa_attention
from tests.helpers import LargestTensor, cached

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_topk": 9,
    "index_head_dim": 16,
    "index_n_heads": 8,
    "max_position_embeddings": 1024,
}
KINDS = {
    "deepseek_v32": ("DeepseekV32Config", "DeepseekV32ForCausalLM", {}),
    "glm_moe_dsa": ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", {}),
    "layers that read another's": (
        "GlmMoeDsaConfig",
        "GlmMoeDsaForCausalLM",
        {"indexer_types": ["full", "shared", "full"]},
    ),
    "axk2": ("AXK2Config", "AXK2ForCausalLM", {}),
    "dots3_note": (
        "Dots3NoteTextConfig",
        "Dots3NoteForCausalLM",
        {"layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"], "sliding_window": 7}
        | {f"swa_{name}": value for name, value in (("num_attention_heads", 2), ("num_key_value_heads", 2))}
        | {f"swa_{name}": 16 for name in ("q_lora_rank", "kv_lora_rank", "head_dim")}
        | {f"swa_{name}": 8 for name in ("qk_nope_head_dim", "v_head_dim")}
        | {"shared_experts_intermediate_size": 16},
    ),
    "glm5_next": (
        "Glm5NextTextConfig",
        "Glm5NextForConditionalGeneration",
        {"layer_types": ["full_attention", "linear_attention", "full_attention"], "index_kpool": 3}
        | {"indexer_types": ["full", "full", "full"], "linear_head_dim": 8, "linear_num_heads": 2, "hc_mult": 2}
        | {"qk_rope_head_dim": 0, "qk_nope_head_dim": 16},
    ),
    "pools that another layer reads": (
        "Glm5NextTextConfig",
        "Glm5NextForConditionalGeneration",
        {"layer_types": ["full_attention"] * 3, "indexer_types": ["full", "shared", "full"], "index_kpool": 3}
        | {"hc_mult": 2, "qk_rope_head_dim": 0},
    ),
    "hy_v4": ("HYV4Config", "HYV4ForCausalLM", {"indexer_types": ["full", "shared", "full"], "hc_mult": 2}),
    "mistral_large4": (
        "MistralLarge4TextConfig",
        "MistralLarge4ForConditionalGeneration",
        {"no_rope_layers": [1, 0, 1], "kv_source_layers": [0, 1, 0], "indexer_types": ["full", "shared", "full"]},
    ),
}


@pytest.fixture(params=KINDS)
def model(request):
    *names, more = KINDS[request.param]
    if not all(hasattr(transformers, name) for name in names):
        pytest.skip(f"this version of Transformers has no {names[1]}")
    config, kind = (getattr(transformers, name) for name in names)
    config = config(**(SMALL | more), bos_token_id=1, eos_token_id=None, pad_token_id=0)
    if kind.__name__ == "MistralLarge4ForConditionalGeneration":  # it reads images, too
        vision = transformers.PixtralVisionConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
        config = transformers.MistralLarge4Config(text_config=config, vision_config=vision, image_token_id=1)
    if kind.__name__ == "Glm5NextForConditionalGeneration":
        vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
        vision["projection_intermediate_size"] = 16
        config = transformers.Glm5NextConfig(text_config=config.to_dict(), vision_config=vision)
    torch.manual_seed(0)
    model = kind(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def ids(batch=2, length=40, seed=0):
    return torch.randint(2, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_logits_are_those_of_masks(model):
    expected = model(ids()).logits
    with foveate.attached(model):
        found = model(ids()).logits
        for module in (
            model,
            model.base_model,
            model.get_decoder(),
        ):  # whole models have one between
            assert module.config.get_text_config()._attn_implementation == csa_attention.IMPLEMENTATION
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(model(ids()).logits, expected), "detached, the model is its own again"


@torch.no_grad()
def test_padded_rows(model):
    real, mask = ids(), torch.ones(2, 40, dtype=torch.int64)
    mask[0, :13] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    expected = model(real, attention_mask=mask, position_ids=positions).logits
    with foveate.attached(model):
        found = model(real, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_packed_sequences_are_refused(model):
    packed = torch.arange(40).remainder(20).expand(2, -1)
    with foveate.attached(model), pytest.raises(ValueError, match="position_ids must rise by one"):
        model(ids(), position_ids=packed, use_cache=False)


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_generation(model, padded):
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[0, : 13 * padded] = 0
    how = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids(), **how)
    foveate.attach(model)
    assert torch.equal(model.generate(ids(), **how), expected)
    assert torch.equal(model.generate(ids(), prefill_chunk_size=11, **how), expected)
    total = foveate.stats(model, reset=True)
    assert len(total.layers) == sum(
        isinstance(m.__dict__.get("forward"), tuple(csa.MODELS.values())) for m in model.modules()
    )
    assert len(total.layers) >= 2
    assert total.layers[0].method == "csa"
    assert total.layers[0].keys_read_per_step == (10 if "Glm5Next" in type(model).__name__ else 9)
    assert total.layers[0].prompt_tokens == 80
    assert foveate.stats(model).layers[0].decode_steps == 0


@pytest.mark.full
@torch.no_grad()
def test_no_tensor_of_queries_by_keys(model, monkeypatch):
    if "linear_attention" in model.get_decoder().config.layer_types:
        pytest.skip("what linear layers work with is larger at this length")
    for name in ("QUERY_CHUNK", "KEY_CHUNK"):
        monkeypatch.setattr(f"foveate.csa.indexer.{name}", 96)
    monkeypatch.setattr("foveate.ops._math.SCRATCH_BYTES", 1 << 17)
    foveate.attach(model)
    with LargestTensor() as gauge:
        model(ids(1, 800), logits_to_keep=1)
    foveate.detach(model)
    with LargestTensor() as masks:
        model(ids(1, 800), logits_to_keep=1)
    assert masks.bytes >= 4 * 800 * 800 * 2, masks.what
    assert gauge.bytes < 800 * 800, gauge.what  # not even of bytes


@pytest.mark.parametrize("pickled", [False, True])
def test_a_copy_is_attached_too(monkeypatch, model, pickled):
    foveate.attach(model)
    if pickled:
        written = pickle.dumps(model)
        for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
            monkeypatch.delitem(interface._global_mapping, csa_attention.IMPLEMENTATION)  # as in another process
    twin = pickle.loads(written) if pickled else copy.deepcopy(model)
    foveate.detach(model)
    with torch.no_grad():
        expected = model(ids()).logits
        torch.testing.assert_close(twin(ids()).logits, expected, rtol=1e-4, atol=1e-4)
    assert foveate.stats(twin).layers[0].prompt_tokens == 40
    foveate.detach(twin)
    assert not any(isinstance(m.__dict__.get("forward"), tuple(csa.MODELS.values())) for m in twin.modules())


def test_detach_keeps_what_was_changed_since(model):
    config, implementation = model.config, model.config._attn_implementation
    foveate.attach(model)
    model.resize_token_embeddings(70)
    foveate.detach(model)
    assert model.config is config
    assert config.get_text_config().vocab_size == len(model.get_input_embeddings().weight) == 70
    assert config._attn_implementation == implementation


def test_what_is_refused(model):
    with foveate.attached(model):
        for padding in (20, 39):
            mask = torch.ones(2, 40, dtype=torch.int64)
            mask[1, padding] = 0
            with pytest.raises(ValueError, match="padding after real tokens"):
                model(ids(), attention_mask=mask)
        with pytest.raises(ValueError, match="output_attentions=True is not possible"):
            model(ids(), output_attentions=True)
        with pytest.raises(ValueError, match="fixed size"):
            model.generate(ids(), max_new_tokens=2, cache_implementation="static")
    with pytest.raises(ValueError, match="settings need a method: top_k"):
        foveate.attach(model, top_k=3)
    with pytest.raises(ValueError, match="dense_below=4096 needs a method"):
        foveate.attach(model, dense_below=4096)


@torch.no_grad()
def test_sets_are_those_that_transformers_selects(model):
    """Of keys that a query may read; Transformers fills what is left with others, and -1 does here."""
    indexers = [module for module in model.modules() if type(module).__name__.endswith("Indexer")]
    found = []
    for attached in (False, True):
        selected = []
        hooks = [one.register_forward_hook(lambda _m, _a, out, to=selected: to.append(out)) for one in indexers]
        foveate.attach(model) if attached else None
        model(ids(), use_cache=False)
        for hook in hooks:
            hook.remove()
        found.append(selected)
    assert len(found[0]) == len(found[1]) == len(indexers) > 0
    for theirs, ours in zip(*found):
        for b, t in itertools.product(range(2), range(40)):
            expected = {key for key in theirs[b, t].tolist() if 0 <= key <= t}
            assert {key for key in ours[b, t].tolist() if key >= 0} == expected, (b, t)


@torch.no_grad()
def test_a_decode_step_that_does_not_wait_says_afterwards_that_it_was_lost(model, monkeypatch):
    monkeypatch.setattr("foveate.csa.indexer._waits", lambda found: found.shape[1] > 1)  # as on a GPU
    cache = transformers.DynamicCache(config=model.config)
    indexer = next(module for module in model.modules() if type(module).__name__.endswith("Indexer"))
    with foveate.attached(model):
        model(ids(), **cached(cache))
        model(ids(length=1), **cached(cache))
        assert foveate.stats(model).layers[0].selections_lost == 0
        indexer.weights_proj.weight.fill_(torch.nan)
        with torch.inference_mode():
            model(ids(length=1), **cached(cache))
        found = foveate.stats(model, reset=True)
        assert found.layers[0].selections_lost == 1
        assert any("scores were NaN" in note for note in found.summary()["notes"])
        assert foveate.stats(model).layers[0].selections_lost == 0
        with pytest.raises(ValueError, match="weights must be finite"):
            model(ids())


@pytest.mark.parametrize("method", [None, "auto"])
def test_auto_is_the_attention_of_the_model_and_says_so(model, method):
    say_once.cache_clear()
    kind = model.get_decoder().config.get_text_config(decoder=True).model_type
    with pytest.warns(UserWarning, match=f"auto: csa, the sparse attention of {kind} models"):
        foveate.attach(model, method)
    assert f"of {kind} models" in str(foveate.stats(model))
