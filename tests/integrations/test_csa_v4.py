"""DeepSeek-V4's layers (window alone, selected entries, all entries) against what Transformers computes with masks."""

import copy
import importlib
import sys

import pytest
import torch
import transformers

import foveate
from foveate import csa
from foveate.integrations.transformers.csa import compressed
from tests.helpers import LargestTensor, cached

modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
SPARSE, HEAVY, WINDOW = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "head_dim": 16,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "hc_mult": 2,
    "index_topk": 3,
    "index_head_dim": 16,
    "index_n_heads": 8,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
KINDS = {
    "all": {"layer_types": [WINDOW, SPARSE, HEAVY, SPARSE], "rates": (4, 8), "sliding_window": 6},
    "heavy first": {"layer_types": [HEAVY, SPARSE, WINDOW], "rates": (3, 5), "sliding_window": 4},
    "no window beyond oneself": {"layer_types": [SPARSE, HEAVY], "rates": (2, 16), "sliding_window": 2},
}


def build(name="all", **more):
    settings = dict(KINDS[name])
    rates = dict(zip((SPARSE, HEAVY), settings.pop("rates")))
    number = len(settings["layer_types"])
    config = transformers.DeepseekV4Config(
        **(SMALL | {"num_hidden_layers": number, "compress_rates": rates, "num_hash_layers": 1} | settings | more)
    )
    torch.manual_seed(0)
    model = transformers.DeepseekV4ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
        elif name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    for module in model.modules():
        if hasattr(module, "tid2eid"):
            module.tid2eid.copy_(torch.randint(0, 4, module.tid2eid.shape))
    return model


@pytest.fixture(params=KINDS)
def model(request):
    return build(request.param)


def ids(batch=2, length=40, seed=0):
    return torch.randint(2, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 2, 7, 40])
@pytest.mark.parametrize("use_cache", [False, True])
def test_logits_are_those_of_masks(model, length, use_cache):
    expected = model(ids(length=length), use_cache=use_cache).logits
    with foveate.attached(model):
        found = model(ids(length=length), use_cache=use_cache).logits
    close(found, expected)
    assert torch.equal(model(ids(length=length), use_cache=use_cache).logits, expected), "detached, it is its own again"


@torch.no_grad()
@pytest.mark.parametrize("pieces", [(11, 11, 11, 7), (1, 1, 30, 1, 7), (37, 1, 1, 1)])
def test_pieces_with_a_cache(model, pieces):
    expected = model(ids(), use_cache=False).logits
    foveate.attach(model)
    cache, found = transformers.DynamicCache(config=model.config), []
    for piece in ids().split(pieces, 1):
        found.append(model(piece, **cached(cache)).logits)
    close(torch.cat(found, 1), expected)


@torch.no_grad()
def test_a_cache_goes_from_one_to_the_other(model):
    expected = model(ids(), use_cache=False).logits
    cache = transformers.DynamicCache(config=model.config)
    model(ids()[:, :13], **cached(cache))
    with foveate.attached(model):
        found = [model(ids()[:, 13:27], **cached(cache)).logits]
    found.append(model(ids()[:, 27:], **cached(cache)).logits)
    close(torch.cat(found, 1), expected[:, 13:])


@torch.no_grad()
def test_sets_are_those_that_transformers_selects(model, monkeypatch):
    theirs, ours = [], []
    indexers = [module for module in model.modules() if isinstance(module, modeling.DeepseekV4Indexer)]
    hooks = [indexer.register_forward_hook(lambda _m, _a, out: theirs.append(out)) for indexer in indexers]
    model(ids())
    for hook in hooks:
        hook.remove()
    real = csa.lightning_indexer
    monkeypatch.setattr(csa, "lightning_indexer", lambda *a, **k: ours.append(real(*a, **k)) or ours[-1])
    with foveate.attached(model):
        model(ids())
    assert len(theirs) == len(ours) == len(indexers) > 0
    for expected, found in zip(theirs, ours):
        assert torch.equal(expected.sort(-1).values, found.long().sort(-1).values)


@torch.no_grad()
@pytest.mark.parametrize("use_cache", [False, True])
def test_a_padded_row_is_what_it_is_alone(model, use_cache):
    for padding in (1, 13, 36):
        mask = torch.ones(3, 40, dtype=torch.int64)
        mask[0, :padding] = 0
        mask[2, : padding // 2] = 0
        real = ids(3).masked_fill(mask == 0, 0)
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        with foveate.attached(model):
            found = model(real, attention_mask=mask, use_cache=use_cache).logits
            again = model(real, attention_mask=mask, position_ids=positions, use_cache=use_cache).logits
        assert torch.equal(again, found)
        for row in range(3):
            start = int((mask[row] == 0).sum())
            close(found[row, start:], model(real[row : row + 1, start:]).logits[0])


@torch.no_grad()
def test_transformers_lets_padding_in():
    """Why padded batches are not held against it: its windows are cut at slots, and mix padding with tokens."""
    model, mask = build(), torch.ones(1, 40, dtype=torch.int64)
    mask[0, :13] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    found = [
        model(ids(1).masked_fill(mask == 0, filler), attention_mask=mask, position_ids=positions).logits[0, -1]
        for filler in (0, 9)
    ]
    assert float((found[0] - found[1]).abs().max()) > 1e-2
    with foveate.attached(model):
        found = [
            model(ids(1).masked_fill(mask == 0, filler), attention_mask=mask, position_ids=positions).logits[0, -1]
            for filler in (0, 9)
        ]
    assert torch.equal(*found)


@torch.no_grad()
def test_generation(model):
    how = {"max_new_tokens": 8, "do_sample": False}
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[0, :13] = 0
    expected, alone = model.generate(ids(), **how), model.generate(ids()[:1, 13:], **how)
    foveate.attach(model)
    for chunk in (None, 11):
        assert torch.equal(model.generate(ids(), prefill_chunk_size=chunk, **how), expected), chunk
    for chunk in (None, 1, 17):
        found = model.generate(ids(), attention_mask=mask, prefill_chunk_size=chunk, **how)
        assert torch.equal(found[1], expected[1]), chunk
        assert torch.equal(found[:1, 13:], alone), chunk
    foveate.detach(model)
    assert torch.equal(model.generate(ids(), **how), expected)


@torch.no_grad()
def test_beams(model):
    how = {"max_new_tokens": 9, "do_sample": False, "num_beams": 3}
    alone = [model.generate(ids()[:1, 13:], **how), model.generate(ids()[1:], **how)]
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[0, :13] = 0
    with foveate.attached(model):
        assert torch.equal(model.generate(ids()[1:], **how), alone[1])
        found = model.generate(ids(), attention_mask=mask, **how)
    assert torch.equal(found[:1, 13:], alone[0])
    assert torch.equal(found[1:], alone[1])


@torch.no_grad()
def test_what_is_counted():
    model = build()
    foveate.attach(model)
    model.generate(ids(), max_new_tokens=12, do_sample=False)
    total = foveate.stats(model, reset=True)
    assert [layer.layer for layer in total.layers] == [1, 2, 3], "those with a compressor"
    assert all(layer.method == "csa" and layer.prompt_tokens == 40 for layer in total.layers)
    assert all(layer.decode_steps == 11 for layer in total.layers)
    assert total.layers[0].keys_read_per_step == 3 + 6
    assert total.layers[1].keys_read_per_step == pytest.approx(sum(t // 8 + 6 for t in range(41, 52)) / 11)
    assert total.layers[0].keys_available_per_step == 46
    assert foveate.stats(model).layers[0].decode_steps == 0


@pytest.mark.full
@torch.no_grad()
@pytest.mark.parametrize("padding", [0, 5])
def test_no_tensor_of_queries_by_keys(monkeypatch, padding):
    model, length = build(max_position_embeddings=4096, index_head_dim=8), 2400
    for name in ("QUERY_CHUNK", "KEY_CHUNK"):
        monkeypatch.setattr(f"foveate.csa.indexer.{name}", 64)
    monkeypatch.setattr("foveate.ops._math.SCRATCH_BYTES", 1 << 19)
    monkeypatch.setattr(sys.modules["foveate.ops.attend.ranges"], "_FEWEST", 32)
    mask = torch.ones(1, length, dtype=torch.int64)
    mask[:, :padding] = 0
    foveate.attach(model)
    with LargestTensor() as gauge:
        model(ids(1, length), attention_mask=mask, logits_to_keep=1)
    foveate.detach(model)
    with LargestTensor() as masks:  # of a shorter text
        model(ids(1, 600), attention_mask=mask[:, :600], logits_to_keep=1)
    assert masks.bytes >= 4 * 600 * 600, masks.what
    assert gauge.bytes <= 4 * length * 64, gauge.what  # hidden states; not even bytes of queries by the fewest entries
    assert length // 8 > 4 * 64


@torch.no_grad()
def test_a_cache_keeps_no_more_than_it_must(model):
    cache = transformers.DynamicCache(config=model.config)
    with foveate.attached(model):
        model(ids(2, 203), **cached(cache))
    layers = [layer for layer in cache.layers if hasattr(layer, "compress_rate")]
    assert layers
    for layer in layers:
        for buffer in (layer.buffer_kv, layer.buffer_gate):
            for held in buffer.values():
                assert held.shape[1] == 203 % layer.compress_rate
                assert held.untyped_storage().nbytes() == held.nbytes


def test_a_copy_is_attached_too(model):
    foveate.attach(model)
    twin = copy.deepcopy(model)
    foveate.detach(model)
    with torch.no_grad():
        expected = model(ids()).logits
        close(twin(ids()).logits, expected)
    assert all(layer.prompt_tokens == 40 for layer in foveate.stats(twin).layers)
    foveate.detach(twin)
    assert not any(isinstance(module.__dict__.get("forward"), compressed.Compress) for module in twin.modules())
    assert not twin.model._forward_pre_hooks
    with torch.no_grad():
        assert torch.equal(twin(ids()).logits, expected)


@torch.no_grad()
def test_padded_rows_must_be_compressed_from_the_beginning(model):
    mask, cache = torch.ones(2, 40, dtype=torch.int64), transformers.DynamicCache(config=model.config)
    mask[0, :5] = 0
    model(ids()[:, :20], attention_mask=mask[:, :20], **cached(cache))
    with foveate.attached(model), pytest.raises(ValueError, match="padded rows that were compressed without foveate"):
        model(ids()[:, 20:], attention_mask=mask, **cached(cache))


def test_gradients_are_those_of_masks():
    model, found = build(), []
    for attached in (False, True):
        if attached:
            foveate.attach(model)
        model.zero_grad()
        model(ids(), labels=ids(), use_cache=False).loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=1e-4)


def test_what_is_refused(model):
    mask = torch.ones(2, 40, dtype=torch.int64)
    with foveate.attached(model):
        for padding in (20, 39):
            broken = mask.clone()
            broken[1, padding] = 0
            with pytest.raises(ValueError, match="attention_mask has padding after real tokens"):
                model(ids(), attention_mask=broken)
        with pytest.raises(ValueError, match=r"attention_mask must be \[B, T\] with sparse attention, not \[2, 1, 4"):
            model(ids(), attention_mask=torch.ones(2, 1, 40, 40))
        with pytest.raises(ValueError, match=r"attention_mask must be \[B, 40\] with sparse attention, not \[2, 39\]"):
            model(ids(), attention_mask=mask[:, 1:])
        with pytest.raises(ValueError, match=r"attention_mask must be \[B, T\] .*, not a dict of masks"):
            model(ids(), attention_mask={"sliding_attention": mask})
        with pytest.raises(ValueError, match="position_ids must count the tokens of each row from its first real one"):
            model(ids(), position_ids=torch.arange(40).remainder(20)[None], use_cache=True)
        with pytest.raises(ValueError, match=r"the cache has a DynamicLayer for layer \d, which compresses"):
            model(ids(), **cached(transformers.DynamicCache()))
        with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
            model.model()
        with pytest.raises(ValueError, match="output_attentions=True is not possible"):
            model(ids(), output_attentions=True)
        model.train()
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.5
        with pytest.raises(ValueError, match=r"dropout must be 0 with sparse attention, not 0\.5"):
            model(ids())
    with pytest.raises(ValueError, match="settings need a method: top_k"):
        foveate.attach(model, top_k=3)


@torch.no_grad()
def test_a_cache_of_padded_rows_is_not_gone_on_with_without_foveate_or_without_a_mask(model):
    cache, mask = transformers.DynamicCache(config=model.config), torch.ones(2, 30, dtype=torch.int64)
    mask[0, :5] = 0
    with foveate.attached(model):
        model(ids(length=30), attention_mask=mask, **cached(cache))
        with pytest.raises(ValueError, match="attention_mask is missing: the cache holds rows with padding"):
            model(ids(length=4, seed=1), **cached(cache))
    with pytest.raises(KeyError):
        model(ids(length=10, seed=1), **cached(cache))


def test_padding_is_refused_with_gradient_checkpointing(model):
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[0, :5] = 0
    model.train()
    model.model.gradient_checkpointing = True
    with foveate.attached(model), pytest.raises(ValueError, match="not supported with gradient checkpointing"):
        model(ids(), attention_mask=mask, use_cache=False)


@torch.no_grad()
def test_nothing_is_left_behind_by_a_layer_that_failed(model, monkeypatch):
    slot = importlib.import_module("foveate.integrations.transformers.csa.attention")._slot
    expected = model(ids(), use_cache=False).logits
    foveate.attach(model)
    with monkeypatch.context() as patched:
        patched.setattr(csa, "sparse_attention", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids(), use_cache=False)
    close(model(ids(), use_cache=False).logits, expected)
    foveate.detach(model)
    assert slot.posted is None
